"""The contract of a backend, and the wrapping of modules that holds it. Knows no model library and no planner.

A backend owns the weights of the blocks it was given. Outside of a run those weights are meta tensors, so that code
which forgets to ask for them fails loudly instead of computing with what happens to lie in a slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.utils import _pytree as pytree

from headrace import errors
from headrace.blocks import Block, Weight, tensor_view
from headrace.copying.disk import DiskReader
from headrace.copying.slots import Slab
from headrace.metrics import Metrics
from headrace.store import Placement, coalesce


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
        self._passes = 0
        self._inside = 0
        self._forwards: list[Callable[[], None]] = []

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

    @property
    def host_bytes(self) -> int:
        """Host memory taken on behalf of a device that is not the host."""
        return 0

    @property
    def running(self) -> bool:
        """Whether a pass or a block is under way. Ask it while `exclusive`."""
        return bool(self._passes or self._inside)

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """No other thread is inside of the model while this is held."""
        return self._lock

    def count_time(self) -> None:  # noqa: B027
        """Bring the metrics up to date with what only a device knows."""

    def begin_pass(self) -> None:  # noqa: B027 (most backends have nothing to do)
        """A pass begins; none is under way."""

    def end_pass(self) -> None:  # noqa: B027
        """A pass has ended, well or not."""

    def check_unchanged(self, index: int) -> None:  # noqa: B027
        """Block `index` has run well. Raises: WeightChanged, if it has written to a weight that will be dropped."""

    def lent_memory(self) -> tuple[int, int]:
        """Where the memory begins and ends that the block which runs innermost has to give back."""
        return (0, 0)

    # --- wrapping -------------------------------------------------------------------------------------------------

    def attach(self, root: nn.Module) -> None:
        """Wrap the forward of every block, and of `root` for the length of a pass."""
        for index, block in enumerate(self.blocks):
            self._forwards.append(wrap_forward(block.module, functools.partial(self._run_block, index)))
        if all(block.module is not root for block in self.blocks):
            self._forwards.append(wrap_forward(root, self._run_pass))

    def detach(self) -> None:
        """Give the modules the forward they had."""
        for restore in reversed(self._forwards):
            restore()
        self._forwards.clear()

    def _run_pass(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._passes:  # a model that calls itself
                return forward(*args, **kwargs)
            if self._closed:
                raise errors.ClosedError()
            start_s = time.perf_counter()
            self.metrics.add(passes=1)
            self._passes += 1
            try:
                self.begin_pass()
                return forward(*args, **kwargs)
            finally:
                self._passes -= 1
                self.end_pass()
                self.metrics.span("pass", "pass", start_s)

    def _run_block(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._closed:
                raise errors.ClosedError()
            self._inside += 1
            try:
                self.before(index)
                try:
                    return self._run_in_place(index, forward, *args, **kwargs)
                finally:
                    self.after(index)
            finally:
                self._inside -= 1

    def _run_in_place(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            with contextlib.suppress(errors.WeightChanged):  # the next run has to find the weight as it was, too
                self.check_unchanged(index)
            raise
        finally:
            self.metrics.span(self.blocks[index].name, "run", start_s)
        self.check_unchanged(index)
        if torch.is_grad_enabled():
            self._check_no_graph(index, output)
        return _owned(output, *self.lent_memory())

    def _check_no_graph(self, index: int, output: Any) -> None:
        """Autograd would keep weights for the backward pass that are gone by then, without a way to notice.

        And it would not know of weights that want a gradient: what a block runs with is a copy that does not.
        """
        tensors = list(_tensors(output))
        wanted = any(form.meta.requires_grad for weight in self.weights[self.blocks[index]] for form in weight.forms)
        if any(tensor.grad_fn is not None or (wanted and tensor.is_floating_point()) for tensor in tensors):
            raise errors.GradientsNeeded(block=self.blocks[index].name)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """What a block has given back, whatever it is wrapped in."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])


def _owned(output: Any, begin: int, end: int) -> Any:
    """`output` without views of the memory between `begin` and `end`, which will hold another block's weights."""
    if type(output) is torch.Tensor:
        return output.clone() if _lies_in(output, begin, end) else output
    if not any(_lies_in(tensor, begin, end) for tensor in _tensors(output)):
        return output

    def owned(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if _lies_in(leaf, begin, end) else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for name in (field.name for field in dataclasses.fields(leaf)):
                object.__setattr__(leaf, name, _owned(getattr(leaf, name, None), begin, end))
        return leaf

    return pytree.tree_map(owned, output)


def _lies_in(tensor: torch.Tensor, begin: int, end: int) -> bool:
    return tensor.layout is torch.strided and begin <= tensor.data_ptr() < end


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Make `module.forward` call `run` with the forward it had and the call's arguments; returns what undoes it."""
    # forward itself and not a hook: torch's always_call hooks do not run after a KeyboardInterrupt.
    forward = module.forward
    own = vars(module).get("forward")

    wrapping = True

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not wrapping:
            return forward(*args, **kwargs)
        if "torch._dynamo" in sys.modules:
            return _outside_of_graphs(run, forward, args, kwargs)
        return run(forward, *args, **kwargs)

    # A compiler that meets this function ends its graph, calls it, and begins the next graph in what it calls.
    eval_frame.set_code_exec_strategy(wrapped.__code__, _SKIP)  # type: ignore[attr-defined]

    wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]

    def restore() -> None:
        nonlocal wrapping
        wrapping = False  # somebody may have wrapped it again, and goes on calling us
        if vars(module).get("forward") is wrapped:
            if own is None:
                del module.forward
            else:
                module.forward = own

    module.forward = wrapped
    return restore


def _outside_of_graphs(run: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Let torch.compile compile what blocks compute, and not how they get their weights.

    So a graph ends before each hook and begins again after it. Operators in its place would have to say that they
    write to weights, in memory that blocks share, and torch copies weights of which it is told that.
    """
    compiling = eval_frame.set_eval_frame(None)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        eval_frame.set_eval_frame(compiling)
        try:
            return forward(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(None)

    try:
        return run(compiled, *args, **kwargs)
    finally:
        eval_frame.set_eval_frame(compiling)


_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
eval_frame.set_code_exec_strategy(_outside_of_graphs.__code__, _SKIP)


class RowTable:
    """An embedding table on disk: the rows a call looks up are read, the others never are.

    The table is laid out in full in memory that is not committed; a call commits the pages of its rows and gives them
    back. So the module itself runs unchanged, with the indices it was called with.
    """

    def __init__(
        self,
        weight: Weight,
        module: nn.Module,
        reader: DiskReader,
        metrics: Metrics,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where the result is wanted, if that is not the host."""
        self.device = device
        assert len(weight.parts) == 1
        assert weight.meta.dim() == 2
        self.weight = weight
        self.module = module
        self.reader = reader
        self.metrics = metrics
        self.row_bytes = weight.nbytes // weight.meta.shape[0]
        self._sites = [site for site in weight.sites if site.module is module]
        self._slab = Slab(weight.nbytes, huge_pages=False)
        self._parameter = nn.Parameter(tensor_view(self._slab.bytes, 0, weight.meta), requires_grad=False)
        self._lock = threading.RLock()

    def attach(self) -> None:
        wrap_forward(self.module, self._run)

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            try:
                if self.device is not None:
                    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
                self._fetch(args[0] if args else next(iter(kwargs.values())))
                for site in self._sites:
                    site.bind(self._parameter)
                rows = forward(*args, **kwargs)
                return rows if self.device is None else rows.to(self.device)
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
