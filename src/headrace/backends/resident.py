"""Nothing moves: the reference that every other backend must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from headrace.backends.base import Backend
from headrace.blocks import Block, Weight
from headrace.metrics import Metrics


class ResidentBackend(Backend):
    """Has no blocks of its own and wraps nothing, so a resident model runs as transformers made it.

    With `tables`, rows of embedding tables are read from disk: then there are passes to count and a close to respect.
    """

    name = "resident"

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Mapping[Block, Sequence[Weight]],
        metrics: Metrics,
        *,
        tables: bool = False,
    ) -> None:
        super().__init__(blocks, weights, metrics)
        self.tables = tables

    def attach(self, root: nn.Module) -> None:
        if self.tables:
            super().attach(root)

    def before(self, index: int) -> None:
        raise AssertionError

    def after(self, index: int) -> None:
        raise AssertionError

    @property
    def allocated_bytes(self) -> int:
        return 0
