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
from headrace.backends.packing import Packing
from headrace.blocks import Block, Weight
from headrace.copying.slots import Slab
from headrace.core import CHUNK_BYTES
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
            weight: self._mapped(weight) for block in blocks for weight in weights[block] if self._in_place(weight)
        }
        self._packings = {block: Packing(block, weights[block], CHUNK_BYTES) for block in blocks}
        self._bound: dict[int, list[list[nn.Parameter]]] = {}
        """Per block that runs, what each of its runs has bound, innermost last."""

    @property
    def allocated_bytes(self) -> int:
        return self._slab.nbytes if self._slab else 0

    def _in_place(self, weight: Weight) -> bool:
        return len(weight.parts) == 1 and weight.parts[0].segment.offset % IN_PLACE_ALIGNMENT == 0

    def _mapped(self, weight: Weight) -> list[nn.Parameter]:
        segment = weight.parts[0].segment
        return weight.parameters(self._files[segment.file].bytes, segment.offset)

    def before(self, index: int) -> None:
        block = self.blocks[index]
        parameters: list[nn.Parameter] = []
        try:
            self._advise(block, mmap.MADV_WILLNEED)
            parameters = self._bring(block)
            self._packings[block].bind(parameters)
            self._bound.setdefault(index, []).append(parameters)
        except BaseException:
            if index not in self._bound:
                self._give_back(block, parameters)
            raise
        self.metrics.count_block()

    def after(self, index: int) -> None:
        parameters = self._bound[index].pop()
        if not self._bound[index]:
            del self._bound[index]
            self._give_back(self.blocks[index], parameters)

    def check_unchanged(self, index: int) -> None:
        parameters = self._bound[index][-1]
        try:
            self._packings[self.blocks[index]].check_unchanged(parameters)
        except BaseException:
            # A private mapping keeps a changed page: the file shows again once it is dropped, as after every run.
            for weight in self.weights[self.blocks[index]]:
                if weight in self._parameters:
                    self._parameters[weight] = self._mapped(weight)
            raise

    def lent_memory(self) -> tuple[int, int]:
        """The slab: what is mapped shows the same bytes for ever."""
        return (self._slab.address, self._slab.address + self._slab.nbytes) if self._slab else (0, 0)

    def _bring(self, block: Block) -> list[nn.Parameter]:
        offsets, nbytes = self._layouts[block]
        slab = self._slab
        if self._copied[block] and self._bound:  # nested: the shared slab is taken
            slab = Slab(nbytes)
            self.metrics.add(overflow_slots=1)
        places = dict(zip(self._copied[block], offsets, strict=True))
        parameters = []
        for weight in self.weights[block]:
            if weight in places:
                assert slab is not None
                self._copy(weight, slab, places[weight])
                parameters += weight.parameters(slab.bytes, places[weight])
            else:
                parameters += self._parameters[weight]
        return parameters

    def _give_back(self, block: Block, parameters: list[nn.Parameter]) -> None:
        if parameters:
            self._packings[block].unbind(parameters)
        # Drops the pages from this process, not from the page cache: memory stays within the budget.
        self._advise(block, mmap.MADV_DONTNEED)

    def _copy(self, weight: Weight, slab: Slab, offset: int) -> None:
        for part in weight.parts:
            source = self._files[part.segment.file].bytes
            slab.bytes[offset : offset + part.nbytes].copy_(source[part.segment.offset :][: part.nbytes])
            offset += part.nbytes

    def _advise(self, block: Block, advice: int) -> None:
        for weight in self.weights[block]:
            for part in weight.parts:
                self._files[part.segment.file].advise(advice, part.segment.offset, part.nbytes)

    def close(self) -> None:
        with self._lock:
            super().close()
            if not self._bound:  # else a block closes its own model: what it runs with must stay
                self._parameters.clear()
                self._files.clear()
