"""`headrace check`: what a set of offload flags does, or what is wrong with it. Knows no model and no machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import typer

from headrace.cli.options import OffloadFlags
from headrace.config import OffloadConfig, PrefetchOffloadConfig, parse_size, selected_layers
from headrace.errors import ConfigError, InvalidSetting
from headrace.units import format_bytes

_EXAMPLE_LAYERS = 32


def check_flags(offload: OffloadFlags, *, as_json: bool) -> None:
    """Print what will be used. Raises a ConfigError if the flags cannot work; its message has flags that do."""
    try:
        config = offload.config()
    except ConfigError as error:
        if as_json:
            _print_json(_refusal(error))
        raise
    if as_json:
        _print_json(_account(config))
    else:
        for name, text in _lines(config):
            typer.echo(f"{name:<9} {text}")


def check_line(
    line: list[str],
    offload: OffloadFlags,
    *,
    device: str | None,
    host_memory: str | None,
    machine: Path | None,
    as_json: bool,
) -> int:
    """Look a command line of vLLM through; its offload flags come after the --. Returns the exit code."""
    from headrace.peers import commandline

    commandline.parse(line)  # what is no such line at all is told first
    if offload != OffloadFlags():
        raise InvalidSetting(
            setting="offload flags",
            value="given before the --",
            allowed="part of the command line after it",
            suggestion="as in: headrace check -- vllm serve org/name --cpu-offload-gb 4",
        )
    from headrace.cli import advice

    size = None if host_memory is None else parse_size(host_memory, "--host-memory")
    try:
        return advice.check_line(line, device=device, host_memory=size, machine=machine, as_json=as_json)
    except ConfigError as error:
        if as_json:
            _print_json(_refusal(error))
        raise


def refuse_without_line(*, device: str | None, host_memory: str | None, machine: Path | None) -> None:
    """Raises: InvalidSetting for what only makes sense beside a command line."""
    for setting, value in (("--device", device), ("--host-memory", host_memory), ("--machine", machine)):
        if value is not None:
            raise InvalidSetting(
                setting=setting,
                value=repr(str(value)),
                allowed="left out without a command line to look through",
                suggestion=f"{value} together with one, after --",
            )


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


def _refusal(error: ConfigError) -> dict[str, Any]:
    return {"ok": False, "error": type(error).__name__, "message": error.message, "facts": error.facts}


def _account(config: OffloadConfig) -> dict[str, Any]:
    return {
        "ok": True,
        "backend": config.resolved_backend,
        "uses": dict(_lines(config)),
        "warnings": list(config.notes),
        "config": config.model_dump(mode="json"),
        "flags": config.to_flags(),
        "hash": config.compute_hash(),
    }


def _lines(config: OffloadConfig) -> list[tuple[str, str]]:
    """What will be used, as pairs of a name and a sentence."""
    lines = [("backend", _backend(config))]
    if config.resolved_backend == "prefetch":
        lines += _prefetch_lines(config.prefetch)
    elif config.resolved_backend == "uva":
        budget = format_bytes(config.uva.budget_bytes)
        lines += [
            ("budget", f"at most {budget} of weights are kept out of device memory"),
            ("params", _params(config.uva.cpu_offload_params, "every parameter, until the budget is used up")),
        ]
    if config.to_flags():
        lines.append(("flags", shlex.join(config.to_flags())))
    return lines


def _backend(config: OffloadConfig) -> str:
    if config.resolved_backend == "auto":
        return "auto: nothing is offloaded, unless --memory asks for it (headrace run MODEL --memory 3GiB)"
    if config.offload_backend != "auto":
        return f"{config.resolved_backend}, as --offload-backend says"
    because = "--offload-group-size" if config.resolved_backend == "prefetch" else "--cpu-offload-gb"
    return f"{config.resolved_backend}, because {because} is above 0"


def _prefetch_lines(prefetch: PrefetchOffloadConfig) -> list[tuple[str, str]]:
    size, taken, step = prefetch.offload_group_size, prefetch.offload_num_in_group, prefetch.offload_prefetch_step
    ahead = f"{step} offloaded layer{'s' if step > 1 else ''} ahead of use"
    if step < taken:
        ahead += (
            f"; the {taken} offloaded layers of a group follow each other, so some copies will be waited for: "
            f"--offload-prefetch-step {taken} avoids that"
        )
    return [
        ("layers", _layers(size, taken)),
        ("params", _params(prefetch.offload_params, "all of each offloaded layer")),
        ("copies", ahead),
    ]


def _layers(size: int, taken: int) -> str:
    if taken == size:
        return "every layer is offloaded"
    rule = f"layer i is offloaded if i % {size} >= {size - taken}"
    chosen = selected_layers(_EXAMPLE_LAYERS, size, taken)
    if not chosen:
        return f"{rule}; a model needs at least {size - taken + 1} layers for that, with fewer nothing is offloaded"
    shown = ", ".join(map(str, chosen if len(chosen) <= 8 else [*chosen[:4], "...", chosen[-1]]))
    return f"{rule}; of {_EXAMPLE_LAYERS} layers these {len(chosen)}: {shown}"


def _params(selectors: frozenset[str], everything: str) -> str:
    return f"only names with {', '.join(sorted(selectors))}" if selectors else everything
