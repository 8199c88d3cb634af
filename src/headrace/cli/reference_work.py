"""What the commands of `headrace reference` do. Knows the rooms, not the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headrace.errors import NotInReference, SourceUnusable
from headrace.reference import packages, pieces
from headrace.reference.build import build, version_key
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


def build_package(package: str, source: Path | None, wheels: Sequence[Path], *, verify: bool = False) -> None:
    """Build the reference and tell what is in it."""
    for one in sources(package, source, wheels):
        path = _built(one, verify=verify)
        with Catalogue.open(path) as catalogue:
            typer.echo(f"{catalogue.package} {catalogue.version}: {len(catalogue)} errors, in {path}")
            if verify:
                typer.echo(_tried(catalogue.tried))


def _tried(counts: Mapping[str, int]) -> str:
    verified, refuted, left = (counts.get(verdict, 0) for verdict in ("verified", "refuted", "not run"))
    return (
        f"Conditions tried by running their functions: {verified} verified, {refuted} refuted, {left} could not be run."
    )


def build_quietly(package: str) -> Path:
    """Build the reference of an installed package because something asks for it. Raises: PackageNotFound ..."""
    return _built(packages.installed(package))


def _built(source: PackageSource, *, verify: bool = False) -> Path:
    """Build with a progress bar that vanishes when it is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(label: str, done: int, total: int) -> None:
            progress.update(task, description=label, completed=done, total=total)

        return build(source, on_progress=show, verify=verify)


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
