"""The contract of a backend, and the wrapping of modules that holds it. Knows no model library and no planner.

A backend owns the weights of the blocks it was given. Outside of a run those weights are meta tensors, so that code
which forgets to ask for them fails loudly instead of computing with what happens to lie in a slot.
"""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headrace import errors
from headrace.blocks import Block, Weight, tensor_view
from headrace.copying.disk import DiskReader
from headrace.copying.slots import Slab
from headrace.metrics import Metrics
from headrace.store import Placement, Read, coalesce, layout


class Backend(ABC):
    """Brings the weights of `blocks` to their modules just for the time they run.

    Guarantees: `before(i)` returns with block i's weights in place, or raises and leaves nothing taken; `after(i)` is
    called once for every `before(i)` that returned, whatever happened in between; one thread at a time is inside of an
    offloaded model (a pass that another thread begins waits), so interleaved passes cannot thrash the ring.
    """

    name: str

    def __init__(self, blocks: Sequence[Block], weights: Mapping[Block, Sequence[Weight]], metrics: Metrics) -> None:
        self.blocks = tuple(blocks)
        self.weights = {block: tuple(weights[block]) for block in blocks}
        self.metrics = metrics
        self._lock = threading.RLock()
        self._closed = False

    @abstractmethod
    def before(self, index: int) -> None:
        """Bring block `index`'s weights. Raises: ReadError, ClosedError."""

    @abstractmethod
    def after(self, index: int) -> None:
        """Block `index` has run, or failed; its weights may go."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Device memory taken for moving weights: the ring."""

    def close(self) -> None:
        """Stop moving once the pass that runs is over; the weights stay meta tensors. Idempotent."""
        with self._lock:
            self._closed = True

    # --- wrapping -------------------------------------------------------------------------------------------------

    def attach(self, root: nn.Module) -> None:
        """Wrap the forward of every block, and of `root` for the length of a pass."""
        for index, block in enumerate(self.blocks):
            wrap_forward(block.module, functools.partial(self._run_block, index))
        if all(block.module is not root for block in self.blocks):
            wrap_forward(root, self._run_pass)

    def _run_pass(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            start_s = time.perf_counter()
            self.metrics.add(passes=1)
            try:
                return forward(*args, **kwargs)
            finally:
                self.metrics.span("pass", "pass", start_s)

    def _run_block(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._closed:
                raise errors.ClosedError()
            self.before(index)
            try:
                start_s = time.perf_counter()
                try:
                    return forward(*args, **kwargs)
                finally:
                    self.metrics.span(self.blocks[index].name, "run", start_s)
            finally:
                self.after(index)


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Make `module.forward` call `run` with the forward it had and the call's arguments."""
    # forward itself and not a hook: torch's always_call hooks do not run after a KeyboardInterrupt.
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run(forward, *args, **kwargs)

    module.forward = wrapped


class Packing:
    """How one block's weights lie in a slab, and the reads that bring them there."""

    def __init__(self, block: Block, weights: Sequence[Weight], chunk_bytes: int) -> None:
        self.block = block
        self.weights = tuple(weights)
        self.offsets, self.nbytes = layout(weight.nbytes for weight in weights)
        placed = zip(self.weights, self.offsets, strict=True)
        placements = [placement for weight, offset in placed for placement in weight.placements(offset)]
        self.reads: tuple[Read, ...] = coalesce(placements, chunk_bytes)
        self._sites = [(weight, weight.sites_within(block.module)) for weight in weights]

    def parameters(self, slab: Slab) -> list[nn.Parameter]:
        """Parameters that are views of `slab`: built once per slot and block, bound in microseconds."""
        return [
            nn.Parameter(tensor_view(slab.bytes, offset, weight.meta), requires_grad=False)
            for weight, offset in zip(self.weights, self.offsets, strict=True)
        ]

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        for (_, sites), parameter in zip(self._sites, parameters, strict=True):
            for site in sites:
                site.bind(parameter)

    def unbind(self) -> None:
        for weight, sites in self._sites:
            for site in sites:
                site.bind(weight.meta)


class RowTable:
    """An embedding table on disk: the rows a call looks up are read, the others never are.

    The table is laid out in full in memory that is not committed; a call commits the pages of its rows and gives them
    back. So the module itself runs unchanged, with the indices it was called with.
    """

    def __init__(self, weight: Weight, module: nn.Module, reader: DiskReader, metrics: Metrics) -> None:
        assert len(weight.parts) == 1
        assert weight.meta.dim() == 2
        self.weight = weight
        self.module = module
        self.reader = reader
        self.metrics = metrics
        self.row_bytes = weight.nbytes // weight.meta.shape[0]
        self._sites = weight.sites_within(module)
        self._slab = Slab(weight.nbytes, huge_pages=False)
        self._parameter = nn.Parameter(tensor_view(self._slab.bytes, 0, weight.meta), requires_grad=False)
        self._lock = threading.RLock()

    def attach(self) -> None:
        wrap_forward(self.module, self._run)

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            try:
                self._fetch(args[0] if args else next(iter(kwargs.values())))
                for site in self._sites:
                    site.bind(self._parameter)
                return forward(*args, **kwargs)
            finally:
                for site in self._sites:
                    site.bind(self.weight.meta)
                self._slab.discard()

    def _fetch(self, indices: torch.Tensor) -> None:
        rows = torch.unique(indices.detach()).tolist()
        segment = self.weight.parts[0].segment
        placements = []
        for row in rows:
            if not 0 <= row < self.weight.meta.shape[0]:
                continue  # the module itself raises for it, in torch's words
            offset = row * self.row_bytes
            part = type(segment)(segment.file, segment.offset + offset, self.row_bytes)
            placements.append(Placement(part, offset))
        reads = coalesce(placements, self.reader.chunk_bytes)
        ticket = self.reader.submit(reads, self._slab.address, f"{self.weight.name} rows", urgent=True, keep=self._slab)
        start_s = time.perf_counter()
        ticket.wait()
        self.metrics.add(gathered_rows=len(rows), stall_s=time.perf_counter() - start_s)
        self.metrics.span(f"{self.weight.name} rows", "wait", start_s)
