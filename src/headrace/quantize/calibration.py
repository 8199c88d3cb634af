"""How much each input of a matrix matters: its mean square, while the original reads a text.

With 4 bits some error is left wherever one rounds to; this says where it hurts least. The text is the source of this
package's errors: English and code, and nothing of what `damage` measures with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace import errors
from headrace.engine import Engine
from headrace.lowbit.modules import candidates
from headrace.settings import parse_size

Progress = Callable[[str, int, int], None]

WINDOW, WINDOWS = 512, 8
"""Tokens that are seen at once, and how often."""


def importances(
    directory: Path, modules: Collection[str], on_progress: Progress, *, memory: str | None = None
) -> Mapping[str, torch.Tensor]:
    """By name of a module: for each of its inputs the mean square, float32. The original may stream meanwhile.

    Raises: UserError, CheckpointError, ReadError.
    """
    budget = None if memory is None else parse_size(memory, "--memory")
    with Engine.open(
        directory, memory=budget, context=(lambda *_: (WINDOW, WINDOW)), on_progress=on_progress
    ) as engine:
        watched = {name: module for name, module in candidates(engine.model) if name in modules}
        sums = {name: torch.zeros(module.weight.shape[1]) for name, module in watched.items()}
        for name, module in watched.items():
            module.register_forward_pre_hook(_adding_to(sums[name]))
        ids = torch.tensor(engine.tokenizer(inspect.getsource(errors), verbose=False)["input_ids"][: WINDOW * WINDOWS])
        windows = ids.split(WINDOW)  # type: ignore[no-untyped-call]
        for number, window in enumerate(windows):
            with torch.inference_mode():
                engine.model(window[None], use_cache=False, logits_to_keep=1)
            on_progress(f"calibrating with {directory.name}", number + 1, len(windows))
    return {name: total / len(ids) for name, total in sums.items()}


def _adding_to(sums: torch.Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, len(sums)).float()
        sums.add_(rows.square().sum(dim=0).cpu())

    return add
