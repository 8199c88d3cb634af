"""`headrace reference export` and `headrace reference serve`. Knows the rooms, not the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headrace.cli import references, terminal
from headrace.errors import InvalidSetting, MissingPackage, NotInReference
from headrace.reference.database import Catalogue, built_packages, database_path


def export(package: str | None, html: Path | None, json: Path | None) -> int:
    """Write the reference of a package, or all that were built, as pages or as one document."""
    if html is None and json is None:
        raise InvalidSetting(
            setting="--html",
            value="missing",
            allowed="given, unless --json is",
            suggestion="DIR for pages, or --json FILE for data",
        )
    _require("Writing the error reference", "jinja2")
    from headrace.reference import export as exporting

    databases = _databases([package] if package is not None else [])
    names = ", ".join(path.stem for path in databases)
    for target, write in ((html, exporting.export_html), (json, exporting.export_json)):
        if target is not None:
            with _bar() as show:
                count = write(databases, target, show)
            typer.echo(f"{names}: {count} errors, in {target}")
    return 0


def _require(purpose: str, *packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(package=name, purpose=purpose, extra="reference")


def _databases(packages: Sequence[str]) -> list[Path]:
    """Where the references lie; those of named packages are built if they have to be."""
    for name in packages:
        references.opened(name).close()
    names = list(packages) or built_packages()
    if not names:
        raise NotInReference(package=references.OURS, reason="no package was built")
    paths = [database_path(name) for name in names]
    for path in paths:
        Catalogue.open(path).close()  # one that cannot be read is told before anything is written
    return paths


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar that vanishes when it is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("errors"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda label, done, total: progress.update(task, description=label, completed=done, total=total)


@dataclasses.dataclass(frozen=True)
class _Address:
    host: str
    port: int
    drain_timeout: float = 1.0


def serve(packages: Sequence[str], host: str, port: int) -> int:
    """Serve the references of packages, or of all that are built, until a signal."""
    _require("Serving the error reference", "fastapi", "jinja2", "uvicorn")
    _databases(packages)
    import uvicorn

    from headrace.reference.library import Library
    from headrace.server import listening, reference

    terminal.raise_if_interrupted()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("headrace.server").setLevel(logging.INFO)
    address = _Address(host, port)
    server = uvicorn.Server(listening.configuration(reference.build(Library(packages or None)), address))
    with listening.bind(address) as listener:
        listener.listen()
        typer.echo(f"The error reference is served at {listening.url(listener)}/errors", err=True)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once everything has ended
            server.run(sockets=[listener])
    return 0
