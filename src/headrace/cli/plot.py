"""A forecast as a picture: speed over the memory budget, and where the bytes lie. Knows matplotlib, plans nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bench import chart
from headrace.forecast import Forecast, Step


def draw(made: Forecast, curve: Sequence[Step], file: Path) -> None:
    """Write the picture to `file`; its suffix says in which format.

    Raises: MissingPackage without matplotlib, InvalidSetting for a file that cannot be written.
    """
    chart.require("Drawing a plan")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    speed, tiers = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_speed(speed, made, curve)
    _draw_tiers(tiers, made)
    chart.save(figure, file, "plan.png")


def _draw_speed(axes: Any, made: Forecast, curve: Sequence[Step]) -> None:
    axes.plot([step.memory_bytes / 2**30 for step in curve], [step.plan.tokens_per_s for step in curve], color="C0")
    budget = made.demand.memory_bytes or made.plan.memory.total_bytes
    axes.plot([budget / 2**30], [made.plan.tokens_per_s], "o", color="C1", label="this plan")
    axes.set_xlabel("memory budget (GiB)")
    axes.set_ylabel("decode, tokens/s (predicted)")
    axes.set_ylim(bottom=0)
    axes.set_title(made.subject.name, fontsize="medium")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_tiers(axes: Any, made: Forecast) -> None:
    """One bar for each tier, of what lies there."""
    memory, host = made.plan.memory, made.plan.host
    bars: list[tuple[str, str, int]] = [
        ("device", "weights", memory.resident_bytes),
        ("device", "ring", memory.ring_bytes),
        ("device", "KV cache", memory.kv_bytes),
        ("device", "activations", memory.working_bytes + memory.staging_bytes),
        ("device", "libraries", memory.baseline_bytes),
    ]
    on_host = 0 if host is None else host.tier_bytes
    if host is not None:
        bars += [("host", "weights", on_host), ("host", "libraries", host.total_bytes - on_host)]
    bars.append(("disk", "weights", made.plan.offloaded_bytes - on_host))
    kinds = list(dict.fromkeys(kind for _, kind, _ in bars))
    bottoms: dict[str, float] = {}
    for kind in kinds:
        some = [(tier, nbytes / 2**30) for tier, each, nbytes in bars if each == kind]
        axes.bar(
            [tier for tier, _ in some],
            [size for _, size in some],
            bottom=[bottoms.get(tier, 0.0) for tier, _ in some],
            label=kind,
        )
        for tier, size in some:
            bottoms[tier] = bottoms.get(tier, 0.0) + size
    axes.set_ylabel("GiB")
    axes.legend(fontsize="small")
