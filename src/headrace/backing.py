"""Where the weights of a module are while they are away: in host memory beside a device, or in a file of its own.

Knows no order of blocks and no modules but to move what stays. A checkpoint on disk needs none of this.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from headrace.blocks import Block, Weight
from headrace.copying.arena import HostArena
from headrace.copying.device import Device
from headrace.copying.disk import DiskReader
from headrace.copying.spill import SpillFile
from headrace.core import DIRECT_ALIGNMENT, Segment, StoredTensor
from headrace.live import Live
from headrace.metrics import Metrics
from headrace.store import coalesce, layout

logger = logging.getLogger(__name__)

SPILL = "spill"
"""Name of the file in segments."""


class Backing:
    """One file and one arena for everything that is away.

    Memory: the arena is exactly as large as what lies in it, page-locked as one piece. Guarantees: `close` is
    idempotent; a file that was spilled to is gone once it, or the process, has ended.
    """

    def __init__(self, device: Device | None, metrics: Metrics, *, chunk_bytes: int, threads: int) -> None:
        self.device = device
        self.metrics = metrics
        self.host: dict[Block, torch.Tensor] = {}
        """Blocks in host memory, packed."""
        self.arena: HostArena | None = None
        self.fallbacks: list[str] = []
        self.reader: DiskReader | None = None
        self.chunk_bytes = chunk_bytes
        self._threads = threads
        self.held = contextlib.ExitStack()
        """Gives back what is held. Knows no modules: what closes a module's backing must not keep it alive."""
        self._arena_used = 0
        self._spill: SpillFile | None = None
        self._in_host: dict[Weight, torch.Tensor] = {}
        self._on_disk: dict[Weight, Weight] = {}
        """The same weight with its place in the file."""

    def reserve(self, host_bytes: int, disk_bytes: int, *, pin_memory: bool) -> None:
        """Make room before anything is moved. Raises: SpillFailed."""
        if host_bytes:
            assert self.device is not None
            self.arena = HostArena(host_bytes, self.device)
            self.held.callback(self.arena.close)
            refused = self.arena.page_lock() if pin_memory else None
            if refused is not None:
                self.announce(refused)
        if disk_bytes:
            self._spill = SpillFile(disk_bytes)
            self.held.callback(self._spill.close)
            paths = {SPILL: self._spill.path}
            self.reader = DiskReader(paths, self.metrics, threads=self._threads, chunk_bytes=self.chunk_bytes)
            self.held.callback(self.reader.close)

    def flush(self) -> None:
        """Everything was put away: nothing of it stays in the page cache. Raises: SpillFailed."""
        if self._spill is not None:
            self._spill.drop_cached()

    def put(self, block: Block, lives: Sequence[Live], *, on_disk: bool) -> list[Weight]:
        """Copy the bytes of `lives` away, as one packed run, and say where they are. Raises: SpillFailed."""
        offsets, nbytes = layout(live.weight.nbytes for live in lives)
        if on_disk:
            return self._spill_block(lives, offsets)
        assert self.arena is not None
        begin = self._arena_used
        self._arena_used += nbytes
        assert self._arena_used <= self.arena.nbytes
        self.host[block] = self.arena.bytes[begin : begin + nbytes]
        weights = []
        for live, offset in zip(lives, offsets, strict=True):
            assert live.bytes is not None
            place = self.host[block][offset : offset + live.weight.nbytes]
            place.copy_(live.bytes)
            weights.append(live.weight)
            self._in_host[live.weight] = place
        return weights

    def _spill_block(self, lives: Sequence[Live], offsets: Sequence[int]) -> list[Weight]:
        assert self._spill is not None
        self._spill.skip_to(DIRECT_ALIGNMENT)
        begin = self._spill.written_bytes
        weights = []
        for live, offset in zip(lives, offsets, strict=True):
            assert live.bytes is not None
            here = live.bytes.cpu()
            self._spill.written_bytes = begin + offset
            segment = Segment(SPILL, begin + offset, here.numel())
            if here.numel():
                self._spill.append(here.data_ptr(), here.numel())
            stored = StoredTensor(live.weight.name, "U8", (here.numel(),), segment)
            weights.append(replace(live.weight, parts=(stored,)))
            self._on_disk[live.weight] = weights[-1]
        return weights

    def bring_back(self, weight: Weight) -> torch.Tensor:
        """The bytes of `weight` in memory of their own, 1-d uint8. Raises: ReadError."""
        memory = torch.empty(weight.nbytes, dtype=torch.uint8)  # not a mapping each: the system limits their number
        if weight in self._in_host:
            memory.copy_(self._in_host[weight])
        else:
            assert self.reader is not None
            reads = coalesce(list(self._on_disk[weight].placements(0)), self.reader.chunk_bytes)
            self.reader.submit(reads, memory.data_ptr(), weight.name, urgent=True, keep=memory).wait()
        return memory

    @property
    def staging_bytes(self) -> int:
        return self.reader.staging_bytes if self.reader is not None else 0

    def in_host(self, weight: Weight) -> bool:
        """Whether it is in host memory; else it is in the file."""
        return weight in self._in_host

    @property
    def host_bytes(self) -> int:
        return self.arena.nbytes if self.arena is not None else 0

    @property
    def paths(self) -> dict[str, Path]:
        return {SPILL: self._spill.path} if self._spill is not None else {}

    @property
    def disk_bytes(self) -> int:
        return self._spill.written_bytes if self._spill is not None else 0

    def announce(self, message: str) -> None:
        """Say once, in the log and in the report, that something is done another way than asked."""
        self.fallbacks.append(message)
        logger.warning(message)

    def all_fallbacks(self) -> tuple[str, ...]:
        """What does not work here as it should, its own and the reader's."""
        return (*self.fallbacks, *(self.reader.fallbacks if self.reader is not None else ()))

    def close(self) -> None:
        self.held.close()


def to_device(root: nn.Module, lives: Sequence[Live], device: torch.device) -> None:
    """Move what stays: weights (tied ones stay tied), buffers, tensors that are plain attributes."""
    for live in lives:
        if live.bytes is None:  # a subclass: it knows itself how to move
            for parameter in set(live.originals.values()):
                parameter.data = parameter.data.to(device)
        else:
            live.restore(live.bytes.to(device))
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for name, value in vars(module).items():
            if type(value) is torch.Tensor:
                vars(module)[name] = value.to(device)
