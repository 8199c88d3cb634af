"""The reference as files: a folder of the same pages that are served, or one JSON document. Knows no HTTP.

Guarantees:
- A file that can be seen is whole: all of them are written to a folder beside and moved to their places at the end.
- Only what an earlier export wrote is replaced or removed; its list lies in the folder. Other files stay, and one that
  stands where a page has to go is refused before anything is moved.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from headrace.errors import InvalidSetting, OutputFailed
from headrace.reference import codec, html, library
from headrace.reference.database import Catalogue
from headrace.reference.document import ID_SCHEME, page_document
from headrace.reference.explain import explain_page
from headrace.reference.records import Page

Progress = Callable[[str, int, int], None]

MANIFEST = ".headrace-reference"
_STAGE = ".headrace-partial-"
_PAGES_PER_TASK = 200
_WORTH_PROCESSES = 1500
"""With fewer pages to write, starting processes takes longer than writing."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Static:
    """Links between files; `up` leads from the folder of a page to the top."""

    explains = False

    def __init__(self, up: str) -> None:
        self._up = up

    def index(self) -> str:
        return f"{self._up}index.html"

    def error(self, page_id: str) -> str:
        return f"{self._up}errors/{page_id}.html"

    def json(self, page_id: str) -> str:
        return f"{self._up}errors/{page_id}.json"

    def listing(self, package: str, error_class: str | None, number: int) -> str:
        return f"{self._up}{listing_file(package, error_class, number)}"

    def asset(self, name: str) -> str:
        return f"{self._up}{name}"

    def search_attributes(self) -> str:
        return Markup('data-index="{0}search-index.js" data-errors="{0}errors/" data-suffix=".html"').format(self._up)


def listing_file(package: str, error_class: str | None, number: int) -> str:
    """Where one page of the errors of a class lies. Not every expression that is raised can be a file's name."""
    name = "all" if error_class is None else error_class
    if error_class is not None and not _PLAIN.fullmatch(error_class):
        name = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', error_class)[:60]}-{html.fingerprint(error_class.encode())}"
    return f"lists/{package}/{name}{'' if number == 1 else f'-{number}'}.html"


# --- a folder of pages ------------------------------------------------------------------------------------------------


def export_html(databases: Sequence[Path], target: Path, on_progress: Progress | None = None) -> int:
    """Write all pages of the references to a folder that is new, empty or of an earlier export; how many errors.

    Raises: NotInReference, InvalidSetting if the folder holds what no export wrote, OutputFailed.
    """
    with _failing(target), contextlib.ExitStack() as stack:
        earlier = _earlier(target)
        catalogues = [stack.enter_context(Catalogue.open(path)) for path in databases]
        target.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=target, prefix=_STAGE))
        stack.callback(shutil.rmtree, stage, ignore_errors=True)
        (stage / "errors").mkdir()
        count = 0
        with (stage / "search-index.js").open("w", encoding="utf-8", errors="replace") as index:
            index.write("window.headraceErrors=[\n")
            for entries in _in_parts(functools.partial(_write_pages, stage=stage), databases, on_progress):
                index.writelines(f"{codec.dumps(entry)},\n" for entry in entries)
                count += len(entries)
            index.write("];\n")
        for catalogue in catalogues:
            _write_lists(catalogue, stage)
            _write_gone(catalogue, stage)
        _write(stage / "index.html", html.index_page([library.overview(one) for one in catalogues], Static("")))
        for name in html.ASSETS:
            (stage / name).write_bytes(html.asset(name))
        _publish(stage, target, earlier)
    return count


def _write_pages(database: Path, offset: int, count: int, stage: Path) -> list[tuple[str, str, str, str]]:
    """The pages of some errors, and what the search finds them by."""
    entries = []
    with Catalogue.open(database) as catalogue:
        for page in catalogue.of_class(None, offset, count):
            _write_error(page, catalogue, stage)
            entry = library.entry(page)
            place = f"{entry['package']} · {entry['file']}:{entry['line']} · {entry['qualname']}"
            entries.append((page.id, page.error_class, entry["template"], place))
    return entries


def _write_error(page: Page, catalogue: Catalogue, stage: Path) -> None:
    document = page_document(explain_page(page, catalogue))
    _write(stage / "errors" / f"{page.id}.html", html.error_page(document, Static("../")))
    _write(stage / "errors" / f"{page.id}.json", codec.dumps(document))


def _write_lists(catalogue: Catalogue, stage: Path) -> None:
    (stage / "lists" / catalogue.package).mkdir(parents=True)
    for error_class in (None, *(name for name, _ in catalogue.classes())):
        number = 1
        while (listing := library.listing(catalogue, error_class, number)) is not None:
            file = stage / listing_file(catalogue.package, error_class, number)
            _write(file, html.listing_page(listing, Static("../../")))
            number += 1


def _write_gone(catalogue: Catalogue, stage: Path) -> None:
    """Old ids keep answering: as what they became, or as they were."""
    for page_id in catalogue.gone():
        page = catalogue.page(page_id)
        if page is not None and page.id == page_id:
            _write_error(page, catalogue, stage)
        elif page is not None:
            _write(stage / "errors" / f"{page_id}.html", html.moved_page(page.id, Static("../")))


def _write(file: Path, text: str) -> None:
    file.write_bytes(text.encode(errors="replace"))


# --- whose folder it is -----------------------------------------------------------------------------------------------


def _earlier(target: Path) -> frozenset[str]:
    """The files that an earlier export wrote. Raises: InvalidSetting if somebody else's are there."""
    if not target.exists():
        return frozenset()
    manifest = target / MANIFEST
    if not target.is_dir():
        raise _refused(target, "a file")
    if manifest.is_file():
        return frozenset(manifest.read_text(encoding="utf-8").splitlines())
    foreign = next((entry.name for entry in target.iterdir() if not entry.name.startswith(_STAGE)), None)
    if foreign is not None:
        raise _refused(target, f"a directory with {foreign!r} in it, which no export wrote")
    return frozenset()


def _refused(target: Path, what: str) -> InvalidSetting:
    return InvalidSetting(
        setting="--html",
        value=f"{str(target)!r}, {what}",
        allowed="a directory that is new, empty or from an earlier export",
        suggestion="with another directory, or move what is there",
    )


def _publish(stage: Path, target: Path, earlier: frozenset[str]) -> None:
    """Move every file to its place, then remove those of the earlier export that are no more."""
    new = sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
    for name in new:
        if name not in earlier and os.path.lexists(target / name):
            raise _refused(target, f"a directory with {name!r} in it, which no export wrote")
    folders = sorted({folder for name in new for folder in Path(name).parents if folder.name})
    for folder in folders:
        if (target / folder).is_symlink():
            raise _refused(target, f"a directory whose {str(folder)!r} is a link")
        (target / folder).mkdir(exist_ok=True)
    # Until all is in place, both the old and the new files are known to be ours.
    _write_manifest(stage, target, earlier.union(new))
    for name in new:
        os.replace(stage / name, target / name)
    for name in earlier.difference(new):
        _remove(target, name)
    _write_manifest(stage, target, new)


def _write_manifest(stage: Path, target: Path, names: Iterable[str]) -> None:
    _write(stage / MANIFEST, "".join(f"{name}\n" for name in sorted(names)))
    os.replace(stage / MANIFEST, target / MANIFEST)


def _remove(target: Path, name: str) -> None:
    """A file of the earlier export. A list that was changed cannot lead out of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or any((target / folder).is_symlink() for folder in path.parents):
        return
    (target / path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds something else
        (target / path).parent.rmdir()


# --- one JSON document ------------------------------------------------------------------------------------------------


def export_json(databases: Sequence[Path], target: Path, on_progress: Progress | None = None) -> int:
    """Write every error to a JSON file, one a line; how many. Raises: NotInReference, OutputFailed."""
    with _failing(target), contextlib.ExitStack() as stack:
        catalogues = [stack.enter_context(Catalogue.open(path)) for path in databases]
        packages = [{"name": one.package, "version": one.version, "commit": one.commit} for one in catalogues]
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=".partial")
        stack.callback(Path(partial).unlink, missing_ok=True)
        count = 0
        with open(handle, "wb") as file:
            file.write(f'{{"id_scheme":{ID_SCHEME},"packages":{codec.dumps(packages)},"errors":['.encode())
            for documents in _in_parts(_documents, databases, on_progress):
                for document in documents:
                    file.write(b",\n" if count else b"\n")
                    file.write(document)
                    count += 1
            file.write(b"\n]}\n")
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, target)
    return count


def _documents(database: Path, offset: int, count: int) -> list[bytes]:
    with Catalogue.open(database) as catalogue:
        return [
            codec.dumps(page_document(explain_page(page, catalogue))).encode(errors="replace")
            for page in catalogue.of_class(None, offset, count)
        ]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


# --- many at once -----------------------------------------------------------------------------------------------------


def _in_parts(work: Callable[..., Any], databases: Sequence[Path], on_progress: Progress | None) -> Iterator[Any]:
    """`work(database, offset, count)` for each part of each reference, in order; in processes where there are many."""
    sizes = []
    for path in databases:
        with Catalogue.open(path) as catalogue:
            sizes.append(len(catalogue))
    tasks = [
        (path, offset, _PAGES_PER_TASK)
        for path, size in zip(databases, sizes, strict=True)
        for offset in range(0, size, _PAGES_PER_TASK)
    ]
    done, total = 0, sum(sizes)
    for part in _spread(work, tasks) if total >= _WORTH_PROCESSES else (work(*task) for task in tasks):
        yield part
        done += len(part)
        if on_progress is not None:
            on_progress("writing pages", done, total)


def _spread(work: Callable[..., Any], tasks: Sequence[tuple[Path, int, int]]) -> Iterator[Any]:
    # Spawned and not forked: a progress bar has a thread, and a fork would copy its locks as they are.
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_interrupts) as pool:
        yield from pool.map(work, *zip(*tasks, strict=True))


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that started this one: it cancels what has not begun."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _failing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputFailed(output=f"the reference to {str(target)!r}", reason=error.strerror or str(error)) from error
