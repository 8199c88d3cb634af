"""The flags that commands share, declared once. Knows how flags are written, not what they mean: `config` does that.

A command that takes the offload flags has one parameter for them:

    @app.command(cls=FlagsCommand)
    @with_offload_flags
    def check(offload: OffloadFlags) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from headrace.config import OffloadConfig

TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Decode single sequences in bfloat16 with torch's own matrix-vector kernel, not oneDNN's: about twice as "
        "fast where weights are in memory. Last bits of the logits can differ from plain transformers'. Prompts and "
        "larger batches are computed as always.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="With --device: the budget of the host's memory; what it does not hold stays on disk."
    ),
]


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """The seven offload flags as they were given; names and defaults are those of `OffloadConfig`'s fields."""

    offload_backend: Annotated[
        str,
        typer.Option(
            metavar="auto|uva|prefetch",
            help="How weights are offloaded. auto: prefetch if a group size is given, else uva if --cpu-offload-gb is, "
            "else what suits the memory budget.",
        ),
    ] = "auto"
    cpu_offload_gb: Annotated[
        float, typer.Option(metavar="GIB", help="uva: keep up to this many GiB of weights out of device memory.")
    ] = 0.0
    cpu_offload_params: Annotated[
        list[str],
        typer.Option(
            metavar="NAME...",
            help="uva: only parameters with these name segments (experts.w2_weight); several with spaces or commas.",
        ),
    ] = field(default_factory=list)
    offload_group_size: Annotated[
        int, typer.Option(metavar="N", help="prefetch: layers are grouped by N; 0 turns prefetch off.")
    ] = 0
    offload_num_in_group: Annotated[
        int, typer.Option(metavar="N", help="prefetch: the last N layers of each group are offloaded.")
    ] = 1
    offload_prefetch_step: Annotated[
        int, typer.Option(metavar="N", help="prefetch: copy N offloaded layers ahead of their use.")
    ] = 1
    offload_params: Annotated[
        list[str],
        typer.Option(metavar="NAME...", help="prefetch: only parameters of those layers with these name segments."),
    ] = field(default_factory=list)

    def config(self) -> OffloadConfig:
        """The checked config; what it says is ignored goes to stderr. Raises a ConfigError."""
        import warnings

        from headrace.config import OffloadConfig, OffloadConfigWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadConfigWarning)  # they are told below, without a source line
            config = OffloadConfig.model_validate(self._nested())
        for note in config.notes:
            typer.echo(f"warning: {note}", err=True)
        return config

    def _nested(self) -> dict[str, Any]:
        return {
            "offload_backend": self.offload_backend,
            "uva": {
                "cpu_offload_gb": self.cpu_offload_gb,
                "cpu_offload_params": _names(self.cpu_offload_params),
            },
            "prefetch": {
                "offload_group_size": self.offload_group_size,
                "offload_num_in_group": self.offload_num_in_group,
                "offload_prefetch_step": self.offload_prefetch_step,
                "offload_params": _names(self.offload_params),
            },
        }


def _names(values: Sequence[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",")]


def with_offload_flags(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Show typer the seven flags in place of the command's parameter `offload`."""
    signature = inspect.signature(command, eval_str=True)
    hints = typing.get_type_hints(OffloadFlags, include_extras=True)
    flags = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if callable(each.default_factory) else each.default,
            annotation=hints[each.name],
        )
        for each in fields(OffloadFlags)
    ]
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "offload"
    ]

    @functools.wraps(command)
    def call(**values: Any) -> int | None:
        given = {each.name: values.pop(each.name) for each in flags}
        return command(offload=OffloadFlags(**given), **values)

    shown = {parameter.name: parameter for parameter in [*others, *flags]}
    call.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in shown.items()}
    return call


class FlagsCommand(TyperCommand):
    """A command whose list flags also take their values as vLLM does, separated by spaces: `--offload-params a b`."""

    has_arguments = True
    """Whether what follows the values of a list may be an argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        arguments = self.has_arguments and any(param.param_type_name == "argument" for param in self.params)
        return super().parse_args(ctx, spread_lists(args, lists, may_be_argument=_is_path if arguments else _never))


class PassingCommand(FlagsCommand):
    """A command whose arguments all come after `--`: another program's command line."""

    has_arguments = False


def spread_lists(args: Sequence[str], lists: set[str], may_be_argument: Callable[[str], bool]) -> list[str]:
    """`--flag a b` as `--flag a --flag b` for each flag in `lists`, up to the next flag or argument."""
    spread: list[str] = []
    current: str | None = None
    values = 0
    for position, token in enumerate(args):
        if token == "--":
            return [*spread, *args[position:]]
        if token.startswith("-"):
            name, equals, _ = token.partition("=")
            current, values = (name if name in lists else None), len(equals)
        elif current is not None:
            if values and may_be_argument(token):
                current = None
            elif values:
                spread.append(current)
            values += 1
        spread.append(token)
    return spread


def _is_path(token: str) -> bool:
    return "/" in token or os.path.exists(token)


def _never(token: str) -> bool:
    return False
