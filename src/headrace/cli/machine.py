"""`headrace machine`: measure what is here, once, for every plan. Knows the probes."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from headrace import machinefile, probing
from headrace.cli import show, terminal
from headrace.core import FAST_DTYPE, Machine
from headrace.units import format_bytes, format_rate, format_seconds


def machine(*, file: Path | None, output: Path | None, as_json: bool) -> None:
    """Measure, keep it, print it. Raises: InvalidSetting, NotWritable."""
    probed = probing.probe(file)
    target = output or machinefile.cache_file()
    machinefile.write(probed.machine, target)
    if as_json:
        document = {**machinefile.to_json(probed.machine), "notes": list(probed.notes), "file": str(target)}
        terminal.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    console.print(show.Rows("machine", _rows(probed.machine)))
    for note in probed.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    console.print(f"written to {target}", style="dim", soft_wrap=True)


def _rows(here: Machine) -> list[tuple[str, str]]:
    rows = [
        ("memory", f"{format_bytes(here.memory_bytes)} that a process can have now"),
        ("disk", format_rate(here.disk.bytes_per_s)),
        *_product_rows(here),
        *_low_bits(here),
        ("matrices", f"{here.compute_operations_per_s / 1e9:.0f} billion operations/s"),
        (
            "overhead",
            f"{format_seconds(here.layer_overhead_s)} per layer, {format_seconds(here.pass_overhead_s)} per token",
        ),
    ]
    gpu = here.accelerator
    if gpu is not None:
        rows += [
            ("device", f"{gpu.name}, {format_bytes(gpu.memory_bytes)} free"),
            ("link", f"{format_rate(gpu.link.bytes_per_s)} from pinned memory"),
            ("its memory", format_rate(gpu.memory_bytes_per_s)),
            ("its matrices", f"{gpu.operations_per_s / 1e12:.0f} trillion operations/s"),
        ]
    return rows


def _product_rows(here: Machine) -> list[tuple[str, str]]:
    """Weight bytes through the cores, by dtype and by tokens at once."""
    if not here.products:
        return [("weights", f"{format_rate(here.compute_bytes_per_s)} through {here.cores} cores, decoding")]
    rows = [
        (dtype, ", ".join(f"{format_rate(rate)} for {rows}" for rows, rate in products.rates) + " tokens at once")
        for dtype, products in here.products.items()
    ]
    if here.fast_row_bytes_per_s:
        rows.append(("--fast", f"{format_rate(here.fast_row_bytes_per_s)} for 1 token in {FAST_DTYPE}"))
    return rows


def _low_bits(here: Machine) -> list[tuple[str, str]]:
    rates = ((8, here.int8_bytes_per_s), (4, here.int4_bytes_per_s))
    return [(f"{bits} bits", f"{format_rate(rate)} of quantized weights, decoding") for bits, rate in rates if rate]
