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
    package: Package,
    source: SourceOption = None,
    wheel: WheelOption = None,
    versions: Annotated[
        str | None,
        typer.Option("--versions", metavar="A,B,C", help="Fetch the wheels of these versions; they tell its history."),
    ] = None,
    distribution: Annotated[
        str | None,
        typer.Option("--distribution", metavar="NAME", help="With --versions: what pip calls it; default: PACKAGE."),
    ] = None,
    verify: VerifyOption = False,
    prose_from: Annotated[
        str | None,
        typer.Option(
            "--prose-from", metavar="URL", help="Have a model there write common situations; its API is OpenAI's."
        ),
    ] = None,
    prose_model: Annotated[
        str | None, typer.Option("--prose-model", metavar="NAME", help="Which model; default: the first one there.")
    ] = None,
    prose_limit: Annotated[
        int, typer.Option("--prose-limit", metavar="N", help="Ask about at most so many errors.", min=1)
    ] = 50,
    prose_ids: Annotated[
        str | None, typer.Option("--prose-ids", metavar="ID,ID", help="Ask only about the errors with these ids.")
    ] = None,
) -> None:
    """Read the source of a package and store its errors in the cache. Nothing of it is imported or run.

    Only with --verify are its functions run, each cut out of its file, with stand-ins for all that is around it: once
    with values that meet the condition of an error, and once with values that mend it. That happens in processes with a
    time limit, without network, in a temporary directory.

    A model is asked only with --prose-from: it is shown the source of an error (the key is OPENAI_API_KEY's), and a
    sentence of it that names anything which is not there is dropped.
    """
    from headrace.cli.reference_work import build_package, fetched, write_prose

    wheels = [*(wheel or []), *(fetched(distribution or package, versions) if versions is not None else [])]
    path = build_package(package, source, wheels, verify=verify)
    if prose_from is not None:
        write_prose(path, prose_from, model=prose_model, limit=prose_limit, ids=prose_ids)


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


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.command(short_help="Find messages that print what was not meant.")
def lint(
    package: Package,
    source: SourceOption = None,
    wheel: WheelOption = None,
    as_json: JsonOption = False,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write the findings there too, as SARIF 2.1.0.")
    ] = None,
) -> int:
    """Find messages that print tuples, unfilled values, glued words or nothing. Exit code 1 if there are any.

    What cannot be told for sure from the source is not a finding. Nothing of the package is imported or run.
    """
    from headrace.cli.reference_lint import lint_package

    return lint_package(package, source, wheel or [], as_json=as_json, sarif_file=sarif)


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
    sarif: Annotated[
        Path | None,
        typer.Option(
            "--sarif", metavar="FILE", help="What `headrace reference lint` finds in PACKAGE, as SARIF 2.1.0."
        ),
    ] = None,
    source: SourceOption = None,
    wheel: WheelOption = None,
) -> int:
    """Write the errors of a package, or of all that were built, as pages that need no server or as JSON.

    With --sarif, what is wrong with the messages of one package; --source and --wheel are for that alone.
    """
    if sarif is not None:
        from headrace.cli.reference_lint import export_sarif

        export_sarif(package, source, wheel or [], sarif)
        if html is None and json is None:
            return 0
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
