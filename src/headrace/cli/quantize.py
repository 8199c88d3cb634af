"""`headrace quantize`: a checkpoint with fewer bits, and what it costs. Knows the room that does it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headrace.cli import show, terminal
from headrace.cli.run import require_engine
from headrace.units import format_bytes

if TYPE_CHECKING:
    from headrace.quantize.damage import Damage
    from headrace.quantize.write import Written


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What was asked for on the command line."""

    model: str
    output: Path
    bits: int | None = None
    group_size: int | None = None
    calibrate: bool = True
    damage: bool | None = None
    memory: str | None = None
    as_json: bool = False
    trust_remote_code: bool = False


def quantize(options: QuantizeOptions) -> int:
    """Write, measure, print."""
    require_engine()
    from headrace import machine
    from headrace.quantize import job

    terminal.raise_if_interrupted()
    machine.tune_allocator(return_memory=True)
    console = Console(highlight=False, stderr=options.as_json)
    with show.bars(console) as bars:
        written = job.quantize(
            options.model,
            options.output,
            bars,
            bits=options.bits,
            group_size=options.group_size,
            calibrate=options.calibrate,
            memory=options.memory,
            trust_remote_code=options.trust_remote_code,
        )
    peak_bytes = machine.peak_resident_bytes()
    if written is not None:
        console.print(show.Rows("quantized", list(_sizes(written, peak_bytes))))
    damage = _damage(options, console) if written is not None else None
    if damage is not None:
        console.print()
        console.print(show.Rows("damage", list(_losses(damage))))
    console.print(f"written to {options.output}", style="dim", soft_wrap=True)
    if options.as_json:
        document = {
            "output": str(options.output),
            "written": None if written is None else asdict(written) | {"directory": str(written.directory)},
            "peak_memory_bytes": peak_bytes,
            "damage": None if damage is None else asdict(damage) | {"change": damage.change},
        }
        terminal.write(json.dumps(document, allow_nan=False) + "\n")
    return 0


def _damage(options: QuantizeOptions, console: Console) -> Damage | None:
    """None if it was not asked for, or if nothing here runs the original."""
    from headrace import sources
    from headrace.quantize import damage
    from headrace.quantize.job import runs

    if options.damage is False or (options.damage is None and Path(options.model).is_file()):
        return None
    if not runs(options.model):
        console.print("The original is quantized in a form that does not run here, so the two are not compared.")
        return None
    with show.bars(console) as bars:
        original = sources.resolve(options.model, trust_remote_code=options.trust_remote_code, on_progress=bars)
        return damage.measure(original, options.output, bars, memory=options.memory)


def _sizes(written: Written, peak_bytes: int) -> Iterator[tuple[str, str]]:
    after = written.bytes_after
    yield (
        "weights",
        f"{format_bytes(after)} instead of {format_bytes(written.bytes_before)} "
        f"({100 * after / written.bytes_before:.0f} %)",
    )
    for bits, nbytes in sorted(written.by_bits.items()):
        what = "stay in" if bits > 8 else "now have"
        yield f"{bits} bits", f"{format_bytes(nbytes)} of the original's weights {what} {bits} bits"
    if 4 in written.by_bits:
        none = "none: what was rounded to 4 bits loses more than with it"
        yield "calibration", "on a text of its own" if written.calibrated else none
    yield "peak memory", format_bytes(peak_bytes)


def _losses(damage: Damage) -> Iterator[tuple[str, str]]:
    before, after = damage.perplexity_before, damage.perplexity_after
    yield (
        "perplexity",
        f"{after:.3f} instead of {before:.3f} ({100 * damage.change:+.2f} %), over {damage.tokens} tokens",
    )
    yield "divergence", f"{damage.divergence:.4f} nats from the original's distribution, in the mean"
    yield "same token", f"{100 * damage.same_choice:.1f} % of the likeliest tokens are the same"
