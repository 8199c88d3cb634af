"""The commands, and how every failure leaves: one `error:` line, an exit code, and a traceback only with --debug.

Nothing heavy is imported here. A command is declared in one short function that imports the module with its work.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.options import FlagsCommand, OffloadFlags, with_offload_flags
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Run language models that are larger than memory by streaming their weights.",
    add_completion=False,
    rich_markup_mode=None,  # rich is loaded by the commands that draw with it
)


@app.command(cls=FlagsCommand)
@with_offload_flags
def check(
    offload: OffloadFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Tell what a set of offload flags does, or what is wrong with it. Loads no model."""
    from headrace.cli.check import check_flags

    check_flags(offload, as_json=as_json)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (at any place).")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    # Imports make many objects that stay; looking through them again and again took a tenth of the start-up time.
    gc.set_threshold(20_000)
    arguments, debug = _without_debug(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read our output has gone. What is still buffered must not fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.TyperException as error:
        return _fail(f"{error.format_message()}\nSee `headrace --help` or `headrace COMMAND --help`.", 2, debug)
    except HeadraceError as error:
        return _fail(error.message, error.exit_code, debug)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}\nThis was not expected; run again with --debug.", 1, debug)
    return code


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    result = command.main(args=arguments, prog_name="headrace", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """--debug means the same before and after the command, so it is taken out before typer looks."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [token for token in argv[:end] if token != "--debug"] + list(argv[end:]), "--debug" in argv[:end]


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    typer.echo(f"error: {message}", err=True)
    return code
