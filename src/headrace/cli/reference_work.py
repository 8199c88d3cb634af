"""What the commands of `headrace reference` do. Knows the rooms, not the command line."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headrace.errors import InvalidSetting, NotInReference, SourceUnusable
from headrace.reference import downloads, packages, pieces, reading
from headrace.reference.build import build, build_versions, version_key
from headrace.reference.database import Catalogue, built_packages, database_path
from headrace.reference.packages import PackageSource


def sources(package: str, source: Path | None, wheels: Sequence[Path]) -> list[PackageSource]:
    """Where to read a package, oldest version first. Raises: PackageNotFound, SourceUnusable."""
    if source is not None:
        found = [packages.directory(source, package=package)]
    elif wheels:
        found = sorted((packages.wheel(file, package) for file in wheels), key=lambda one: version_key(one.version))
    else:
        return [packages.installed(package)]
    for one in found:
        if one.name != package:
            raise SourceUnusable(source=str(source or one.root), reason=f"it holds {one.name}, not {package}")
    return found


def fetched(distribution: str, versions: str) -> list[Path]:
    """The wheels of versions that are written with commas. Raises: VersionUnavailable, NotWritable."""
    wanted = [version.strip() for version in versions.split(",") if version.strip()]
    if not wanted:
        raise InvalidSetting(
            setting="--versions", value=repr(versions), allowed="versions with commas between", suggestion="1.0,1.1"
        )
    found = []
    with progress_bar() as show:
        for number, version in enumerate(wanted):
            show(f"fetching {distribution} {version}", number, len(wanted))
            found.append(downloads.wheel(distribution, version))
    return found


def build_package(package: str, source: Path | None, wheels: Sequence[Path], *, verify: bool = False) -> Path:
    """Build the reference and tell what is in it; of several versions what changed from one to the next."""
    found = sources(package, source, wheels)
    with progress_bar() as show:
        path = build_versions(found, on_progress=show, verify=verify)
    with Catalogue.open(path) as catalogue:
        if len(found) > 1:
            _tell_changes(catalogue)
        typer.echo(f"{catalogue.package} {catalogue.version}: {len(catalogue)} errors, in {path}")
        if verify:
            typer.echo(_tried(catalogue.tried))
    return path


def write_prose(path: Path, url: str, *, model: str | None, limit: int, ids: str | None) -> None:
    """Have a model write about the errors of a database. Raises: InvalidSetting, EndpointFailed, UnknownErrorId."""
    from headrace.reference import prose
    from headrace.reference.endpoint import Endpoint

    endpoint = Endpoint.open(url, model)
    wanted = [page_id.strip() for page_id in (ids or "").split(",") if page_id.strip()]
    with progress_bar() as show:
        written = prose.write(path, endpoint, ids=wanted, limit=limit, on_progress=show)
    typer.echo(
        f"{endpoint.model} was asked about {written.pages} errors: {written.sentences} sentences kept, "
        f"{written.dropped} dropped"
    )


def _tell_changes(catalogue: Catalogue) -> None:
    """How many messages each version brought, took away and reworded."""
    came: Counter[str] = Counter()
    went: Counter[str] = Counter()
    reworded: Counter[str] = Counter()
    rows = [row for row in catalogue.rows() if pieces.has_words(row.page.template)]
    successors = {row.history.successor for row in rows}
    for row in rows:
        if row.history.introduced and row.page.id not in successors:
            came[row.history.introduced] += 1
        if row.history.removed:
            (reworded if row.history.successor else went)[row.history.removed] += 1
    for version, _ in catalogue.versions_read()[1:]:
        typer.echo(
            f"{catalogue.package} {version}: {came[version]} messages introduced, {went[version]} removed, "
            f"{reworded[version]} reworded"
        )


def _tried(counts: Mapping[str, int]) -> str:
    verified, refuted, left = (counts.get(verdict, 0) for verdict in ("verified", "refuted", "not run"))
    return (
        f"Conditions tried by running their functions: {verified} verified, {refuted} refuted, {left} could not be run."
    )


def build_quietly(package: str) -> Path:
    """Build the reference of an installed package because something asks for it. Raises: PackageNotFound ..."""
    return _built(packages.installed(package))


def _built(source: PackageSource) -> Path:
    with progress_bar() as show:
        return build(source, on_progress=show)


@contextlib.contextmanager
def progress_bar() -> Iterator[reading.Progress]:
    """A bar that vanishes when it is done; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(label: str, done: int, total: int) -> None:
            progress.update(task, description=label, completed=done, total=total)

        yield show


def search_pages(words: str, package: str | None, limit: int) -> int:
    """Print the pages with all of the words: id, class, message and place. 1 if there are none."""
    names = [package] if package is not None else built_packages()
    if not names:
        raise NotInReference(package="headrace", reason="no package was built")
    shown = 0
    for name in names:
        with Catalogue.open(database_path(name)) as catalogue:
            for page in catalogue.search(words, limit - shown):
                site = page.sites[0]
                typer.echo(f"{page.id}  {page.error_class}: {pieces.one_line(page.template)}")
                typer.echo(f"{'':18}{site.file}:{site.line} in {site.qualname}")
                shown += 1
        if shown >= limit:
            break
    if not shown:
        typer.echo(f"No error in {', '.join(names)} has all of these words.", err=True)
    return 0 if shown else 1
