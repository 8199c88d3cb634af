"""What goes into the matrices of a model: mean products of neighbouring inputs, while the original reads a text.

With 4 bits some error is left wherever one rounds to; this says where it hurts least. The text (its file names the
sources) is of many kinds, and nothing of what `damage` measures with.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.engine import Engine
from headrace.lowbit.modules import candidates
from headrace.lowbit.rounding import moment_blocks
from headrace.settings import parse_size

Progress = Callable[[str, int, int], None]

WINDOW = 512
"""Tokens that are seen at once."""
MOST_TOKENS = 6144
"""Of the text that are read; what a tokenizer makes more of it is left out."""


def text() -> str:
    """What the original reads."""
    file = importlib.resources.files("headrace.quantize") / "data" / "calibration.txt"
    return "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# "))


def second_moments(
    directory: Path, columns: Mapping[str, int], on_progress: Progress, *, memory: str | None = None
) -> Mapping[str, torch.Tensor]:
    """By name of a module, of which `columns` has the inputs: their moments, as `rounding.to_4_bits` takes them.

    The original may stream meanwhile. Memory: 256 bytes for each column, within `memory` too.

    Raises: UserError, CheckpointError, ReadError.
    """
    budget = None if memory is None else parse_size(memory, "--memory")
    # Written to before the engine looks how much of the budget is taken.
    sums = {name: torch.empty(moment_blocks(count)).fill_(0) for name, count in columns.items()}
    with Engine.open(
        directory, memory=budget, context=(lambda *_: (WINDOW, WINDOW)), on_progress=on_progress
    ) as engine:
        for name, module in candidates(engine.model):
            if name in sums:
                module.register_forward_pre_hook(_adding_to(sums[name]))
        ids = torch.tensor(engine.tokenizer(text(), verbose=False)["input_ids"][:MOST_TOKENS])
        windows = ids.split(WINDOW)  # type: ignore[no-untyped-call]
        for number, window in enumerate(windows):
            with torch.inference_mode():
                engine.model(window[None], use_cache=False, logits_to_keep=1)
            on_progress(f"calibrating with {directory.name}", number + 1, len(windows))
    return {name: total.div_(len(ids)) for name, total in sums.items()}


def _adding_to(sums: torch.Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    blocks, width, _ = sums.shape

    def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, blocks, width).transpose(0, 1).float().cpu()
        sums.baddbmm_(rows.transpose(1, 2), rows)

    return add
