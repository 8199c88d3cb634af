"""A checkpoint's weights around an accelerator: what stays on it, the rest in host memory or on disk.

Reads go straight from the checkpoint's files to where bytes live; nothing is in host memory twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from headrace.backends.base import Backend
from headrace.backends.on_device import open_on_device
from headrace.backends.packing import Packing
from headrace.blocks import Block, Weight
from headrace.copying.arena import HostArena
from headrace.copying.device import Device
from headrace.copying.disk import DiskReader
from headrace.copying.slots import Slab
from headrace.core import DIRECT_ALIGNMENT, Plan, align_up
from headrace.metrics import Metrics
from headrace.store import Placement, coalesce, layout

logger = logging.getLogger(__name__)

BATCH_BYTES = 64 * 2**20
"""Of residents that are read into host memory before they are copied to the device."""

Progress = Callable[[str, int, int], None]


class Around:
    """The tiers around one device. Guarantees: `close` is idempotent and gives host memory back."""

    def __init__(self, device: Device, reader: DiskReader, metrics: Metrics, *, pin_memory: bool) -> None:
        self.device = device
        self.reader = reader
        self.metrics = metrics
        self.pin_memory = pin_memory
        self.fallbacks: list[str] = []
        self._arena: HostArena | None = None
        self._residents: torch.Tensor | None = None

    def load_residents(
        self,
        resident: Sequence[Weight],
        converters: Mapping[str, Callable[[], torch.Tensor]],
        on_progress: Progress | None,
    ) -> None:
        """Bring what stays onto the device, some at a time. Raises: OutOfDeviceMemory, ReadError."""
        plain = [weight for weight in resident if weight.movable]
        offsets, nbytes = layout(weight.nbytes for weight in plain)
        memory = self._residents = self.device.allocate(nbytes, "weights that stay")
        stream = self.device.new_stream()
        done, total = 0, sum(weight.nbytes for weight in plain)
        for batch in _batches(plain, offsets):
            begin = batch[0][1]
            size = batch[-1][1] + batch[-1][0].nbytes - begin
            bounce = Slab(size)
            placements = [place for weight, offset in batch for place in weight.placements(offset - begin)]
            self._read(placements, bounce)
            self.device.copy(memory[begin : begin + size], bounce.bytes[:size], stream, page_locked=False)
            for weight, offset in batch:
                (parameter,) = weight.parameters(memory, offset)
                weight.bind(parameter)
            done += sum(weight.nbytes for weight, _ in batch)
            if on_progress is not None:
                on_progress("loading weights", done, total)
        for weight in resident:
            if not weight.movable:
                converted = converters[weight.name]().to(self.device.torch_device)
                weight.bind(nn.Parameter(converted, requires_grad=False))

    def backend(self, made: Plan, moving: Mapping[Block, Sequence[Weight]], on_progress: Progress | None) -> Backend:
        """Fill host memory with what the plan puts there, and set up what brings it to the device."""
        on_host = {block: set(names) for block, names in made.on_host}
        packings = [
            Packing(
                block,
                weights,
                self.reader.chunk_bytes,
                in_host={weight for weight in weights if weight.name in on_host.get(block.name, ())},
            )
            for block, weights in moving.items()
        ]
        host = self._fill_host(packings, on_progress)
        return open_on_device(
            made,
            packings,
            self.metrics,
            self.device,
            arena=self._arena,
            host=host,
            reader=self.reader,
            announce=self._announce,
        )

    def _fill_host(self, packings: Sequence[Packing], on_progress: Progress | None) -> dict[int, torch.Tensor]:
        sizes = [align_up(packing.disk_offset, DIRECT_ALIGNMENT) for packing in packings]
        total = sum(sizes)
        if not total:
            return {}
        arena = self._arena = HostArena(total, self.device)
        placements: list[Placement] = []
        host: dict[int, torch.Tensor] = {}
        begin = 0
        for index, (packing, size) in enumerate(zip(packings, sizes, strict=True)):
            if packing.disk_offset:
                placements += [Placement(p.segment, begin + p.target_offset) for p in packing.host_placements]
                host[index] = arena.bytes[begin : begin + packing.disk_offset]
            begin += size
        self._read(placements, arena.slab, on_progress)
        refused = arena.page_lock() if self.pin_memory else None
        if refused is not None:
            self._announce(refused)
        return host

    def _read(self, placements: list[Placement], slab: Slab, on_progress: Progress | None = None) -> None:
        on_read = None if on_progress is None else functools.partial(on_progress, "loading host memory")
        self.reader.read_all(coalesce(placements, self.reader.chunk_bytes), slab, "weights", on_read)

    def _announce(self, message: str) -> None:
        self.fallbacks.append(message)
        logger.warning(message)

    def close(self) -> None:
        """The backend is closed: nothing uses host memory, or what stays on the device, any more."""
        self.device.wait_idle()
        if self._arena is not None:
            self._arena.close()

    def free_residents(self) -> None:
        """Give back the device memory of what stays: the model cannot run any more. Idempotent."""
        if self._residents is not None:
            self.device.free(self._residents)
            self._residents = None


def _batches(weights: Sequence[Weight], offsets: Sequence[int]) -> list[list[tuple[Weight, int]]]:
    batches: list[list[tuple[Weight, int]]] = []
    for weight, offset in zip(weights, offsets, strict=True):
        if batches and offset + weight.nbytes - batches[-1][0][1] <= BATCH_BYTES:
            batches[-1].append((weight, offset))
        else:
            batches.append([(weight, offset)])
    return batches
