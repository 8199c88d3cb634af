"""`headrace reference`: build, search, lint, export. Declared here; what does the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="The error reference of an installed package: each error with its condition and its place.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)

Package = Annotated[str, typer.Argument(metavar="PACKAGE", help="A package by the name that it is imported by.")]
OptionalPackage = Annotated[
    str | None, typer.Argument(metavar="[PACKAGE]", help="Only this one; default: all that were built.")
]
SourceOption = Annotated[
    Path | None, typer.Option("--source", metavar="DIR", help="Read this directory instead of the installed package.")
]
WheelOption = Annotated[
    list[Path] | None,
    typer.Option("--wheel", metavar="FILE", help="Read this wheel instead; several of one package tell its history."),
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Also run the functions, to see that the conditions are right.")
]


@app.command(short_help="Read a package and store its errors.")
def build(
    package: Package, source: SourceOption = None, wheel: WheelOption = None, verify: VerifyOption = False
) -> None:
    """Read the source of a package and store its errors in the cache. Nothing of it is imported or run.

    Only with --verify are its functions run, each cut out of its file, with stand-ins for all that is around it: once
    with values that meet the condition of an error, and once with values that mend it. That happens in processes with a
    time limit, without network, in a temporary directory.
    """
    from headrace.cli.reference_work import build_package

    build_package(package, source, wheel or [], verify=verify)


@app.command(short_help="Find errors by their words.")
def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS...", help="Words of the message, class or function.")],
    package: Annotated[
        str | None, typer.Option("--package", metavar="PACKAGE", help="Only here; default: all that were built.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Show at most so many.", min=1)] = 20,
) -> int:
    """Find errors that have all of the words, in what was built."""
    from headrace.cli.reference_work import search_pages

    return search_pages(" ".join(words), package, limit)


@app.command(short_help="Write the pages as files.")
def export(
    package: OptionalPackage = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="DIR", help="Pages to open or to publish, in a new directory or an earlier one."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Every error in one JSON document, one a line.")
    ] = None,
) -> int:
    """Write the errors of a package, or of all that were built, as pages that need no server or as JSON."""
    from headrace.cli.reference_pages import export as command

    return command(package, html, json)


@app.command(short_help="Serve the pages and a search.")
def serve(
    packages: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE]...", help="Only these; default: all that were built.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen there; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes any port that is free.", min=0, max=65535)] = 8001,
) -> int:
    """Serve the errors of packages as pages at /errors and as JSON at /api, with a search and an answer to pastes."""
    from headrace.cli.reference_pages import serve as command

    return command(packages or [], host, port)
