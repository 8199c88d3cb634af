"""`headrace plan`: what a model would take and how fast it would be, before anything is loaded. Knows the forecast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headrace import forecast
from headrace.cli import show, terminal
from headrace.config import OffloadConfig, parse_size
from headrace.errors import InvalidSetting
from headrace.units import format_bytes, format_flag_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What was asked for on the command line."""

    model: str
    memory: str | None = None
    device: str | None = None
    host_memory: str | None = None
    context: int | None = None
    batch: int = 1
    machine: Path | None = None
    plot: Path | None = None
    engine: str | None = None
    """vllm or sglang; None plans for Headrace."""
    gpus: int = 1
    utilization: float = 0.9
    as_json: bool = False
    fast: bool = False
    trust_remote_code: bool = False


def plan(options: PlanOptions, config: OffloadConfig) -> None:
    """Read what there is of the model, plan, print."""
    memory, host_memory = _size(options.memory, "--memory"), _size(options.host_memory, "--host-memory")
    if options.engine is not None:
        _plan_for_peer(options, memory, host_memory, config)
        return
    _refuse_peer_flags(options)
    probed = forecast.machine_for(options.machine, options.device)
    subject = forecast.read_subject(options.model, trust_remote_code=options.trust_remote_code)
    demand = forecast.demand_for(
        subject,
        probed.machine,
        memory=memory,
        host_memory=host_memory,
        context=options.context,
        batch=options.batch,
        fast=options.fast,
    )
    made = forecast.forecast(subject, probed, demand, config)
    if options.plot is not None:
        from headrace.cli.plot import draw

        draw(made, forecast.curve(made, config), options.plot)
    if options.as_json:
        terminal.write(json.dumps(forecast.to_json(made), indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    console.print(show.plan_rows(made.plan))
    console.print()
    console.print(show.Rows("memory", list(_memory(made))))
    console.print()
    console.print(show.Rows("speed", list(_speed(made))))
    for note in made.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)


def _plan_for_peer(options: PlanOptions, memory: int | None, host_memory: int | None, config: OffloadConfig) -> None:
    from headrace import advice
    from headrace.cli.advice import print_advice

    for setting, given in (
        ("--memory", memory is not None),
        ("--plot", options.plot is not None),
        ("--fast", options.fast),
        (" ".join(config.to_flags()), bool(config.to_flags())),
    ):
        if given:
            raise InvalidSetting(
                setting=setting,
                value=f"given beside --for {options.engine}",
                allowed="left out: that engine's own flags are what is planned",
                suggestion="without --for, or use --device and --gpu-memory-utilization instead",
            )
    probed = forecast.machine_for(options.machine, options.device or "any")
    subject = forecast.read_subject(options.model, trust_remote_code=options.trust_remote_code)
    made = advice.advise(
        subject,
        probed,
        engine=options.engine or "",
        gpus=options.gpus,
        context=options.context,
        batch=options.batch,
        utilization=options.utilization,
        host_memory=host_memory,
    )
    print_advice(made, as_json=options.as_json)


def _refuse_peer_flags(options: PlanOptions) -> None:
    if options.gpus != 1:
        raise InvalidSetting(
            setting="--gpus",
            value=str(options.gpus),
            allowed="1 without --for: Headrace runs on one device",
            suggestion=f"{options.gpus} together with --for vllm",
        )


def _size(text: str | None, setting: str) -> int | None:
    return None if text is None else parse_size(text, setting)


def _memory(made: forecast.Forecast) -> Iterator[tuple[str, str, str]]:
    """Bytes by tier."""
    memory, host = made.plan.memory, made.plan.host
    where = "device" if host is not None else "memory"
    for name, nbytes in (
        ("libraries", memory.baseline_bytes),
        ("weights", memory.resident_bytes),
        ("ring", memory.ring_bytes),
        ("staging", memory.staging_bytes),
        ("KV cache", memory.kv_bytes),
        ("activations", memory.working_bytes),
        ("together", memory.total_bytes),
    ):
        yield where, format_bytes(nbytes), name
    if host is not None:
        yield "host", format_bytes(host.tier_bytes), "weights"
        rest = host.total_bytes - host.tier_bytes
        yield "host", format_bytes(rest), "libraries, staging, ring"
    on_disk = made.plan.offloaded_bytes - (host.tier_bytes if host is not None else 0)
    if on_disk:
        yield "disk", format_bytes(on_disk), "weights, read from the checkpoint where it is"


def _speed(made: forecast.Forecast) -> Iterator[tuple[str, str]]:
    plan, bound = made.plan, made.plan.bound
    yield (
        "decode",
        f"{_rate(plan.tokens_per_s)} ({format_seconds(plan.seconds_per_pass)} per pass; bound "
        f"{format_seconds(bound.seconds)}, by {bound.limited_by})",
    )
    prefill = plan.prefill
    if prefill is not None:
        yield (
            "prefill",
            f"first token after {format_seconds(plan.seconds_to_first_token)} for {made.demand.prefill_tokens} tokens "
            f"(by {prefill.limited_by})",
        )
    yield "moved", f"{format_bytes(bound.moved_bytes)} per pass"
    for step in made.steps:
        everything = ", with everything resident" if step.plan.backend == "resident" else ""
        yield "instead", f"with {format_flag_bytes(step.memory_bytes)}: {_rate(step.plan.tokens_per_s)}{everything}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.3g} tokens/s" if tokens_per_s < 10 else f"{tokens_per_s:.0f} tokens/s"
