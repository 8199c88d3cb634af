"""The checkpoint file mapped into memory and used in place: no ring, no copies, the page cache decides.

On the CPU this is what zero-copy is on an accelerator. A tensor whose place in the file is not aligned well enough for
the kernels to give the same bits, or which the file holds in several parts, is copied into a slab for each run.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from headrace import errors
from headrace.backends.base import Backend
from headrace.blocks import Block, Weight, tensor_view
from headrace.copying.slots import Slab
from headrace.metrics import Metrics
from headrace.store import layout

IN_PLACE_ALIGNMENT = 16
"""Measured: float32 products differ in the last bits below it (docs/log.md), and are equal from it on."""


class MappedFile:
    """A private mapping: the model could write to it without touching the file. Raises: ReadError."""

    def __init__(self, path: Path) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise errors.ReadError(file=str(path), offset=0, nbytes=0, reason=str(error)) from None
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def advise(self, advice: int, offset: int, nbytes: int) -> None:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(advice, start, offset + nbytes - start)


class UvaBackend(Backend):
    """Memory: none of its own but one slab for the largest copied block. Mapped pages are given back after each run.

    A disk that fails under a mapping ends the process (SIGBUS); `prefetch` turns the same failure into an error.
    """

    name = "uva"

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Mapping[Block, Sequence[Weight]],
        metrics: Metrics,
        paths: Mapping[str, Path],
    ) -> None:
        super().__init__(blocks, weights, metrics)
        files = {part.segment.file for block in blocks for weight in weights[block] for part in weight.parts}
        self._files = {file: MappedFile(paths[file]) for file in files}
        copied = {block: [w for w in weights[block] if not self._in_place(w)] for block in blocks}
        self.copied_bytes = sum(weight.nbytes for some in copied.values() for weight in some)
        self._layouts = {block: layout(weight.nbytes for weight in copied[block]) for block in blocks}
        largest = max((nbytes for _, nbytes in self._layouts.values()), default=0)
        self._slab = Slab(largest) if largest else None
        self._copied = copied
        self._parameters = {
            weight: nn.Parameter(self._view(weight), requires_grad=False)
            for block in blocks
            for weight in weights[block]
            if self._in_place(weight)
        }
        # Looked up once: it means walking the block's modules, and binding happens twice per run and weight.
        self._sites = {weight: weight.sites_within(block.module) for block in blocks for weight in weights[block]}
        self._depth: dict[int, int] = {}

    @property
    def allocated_bytes(self) -> int:
        return self._slab.nbytes if self._slab else 0

    def _in_place(self, weight: Weight) -> bool:
        return len(weight.parts) == 1 and weight.parts[0].segment.offset % IN_PLACE_ALIGNMENT == 0

    def _view(self, weight: Weight) -> torch.Tensor:
        segment = weight.parts[0].segment
        return tensor_view(self._files[segment.file].bytes, segment.offset, weight.meta)

    def before(self, index: int) -> None:
        block = self.blocks[index]
        try:
            self._bring(block)
        except BaseException:
            if not self._depth.get(index):
                self._give_back(block)
            raise
        self._depth[index] = self._depth.get(index, 0) + 1
        self.metrics.add(blocks_run=1)

    def _bring(self, block: Block) -> None:
        self._advise(block, mmap.MADV_WILLNEED)
        offsets, nbytes = self._layouts[block]
        slab = self._slab
        if self._copied[block] and any(self._depth.values()):  # nested: the shared slab is taken
            slab = Slab(nbytes)
            self.metrics.add(overflow_slots=1)
        for weight, offset in zip(self._copied[block], offsets, strict=True):
            assert slab is not None
            self._bind(weight, self._copy(weight, slab, offset))
        for weight in self.weights[block]:
            if weight in self._parameters:
                self._bind(weight, self._parameters[weight])

    def after(self, index: int) -> None:
        self._depth[index] -= 1
        if self._depth[index] == 0:
            self._give_back(self.blocks[index])

    def _give_back(self, block: Block) -> None:
        for weight in self.weights[block]:
            self._bind(weight, weight.meta)
        # Drops the pages from this process, not from the page cache: memory stays within the budget.
        self._advise(block, mmap.MADV_DONTNEED)

    def _bind(self, weight: Weight, parameter: nn.Parameter) -> None:
        for site in self._sites[weight]:
            site.bind(parameter)

    def _copy(self, weight: Weight, slab: Slab, offset: int) -> nn.Parameter:
        target = offset
        for part in weight.parts:
            source = self._files[part.segment.file].bytes
            slab.bytes[target : target + part.nbytes].copy_(source[part.segment.offset :][: part.nbytes])
            target += part.nbytes
        return nn.Parameter(tensor_view(slab.bytes, offset, weight.meta), requires_grad=False)

    def _advise(self, block: Block, advice: int) -> None:
        for weight in self.weights[block]:
            for part in weight.parts:
                self._files[part.segment.file].advise(advice, part.segment.offset, part.nbytes)

    def close(self) -> None:
        with self._lock:
            super().close()
            if not any(self._depth.values()):  # else a block closes its own model: what it runs with must stay
                self._parameters.clear()
                self._files.clear()
