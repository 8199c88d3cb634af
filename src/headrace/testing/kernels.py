"""Operators as kernels: which memory each touches, and its place on a stream. Knows no graphs and no seam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.testing.buffers import PageLocks
from headrace.testing.memory import Region, Regions
from headrace.testing.operators import Access, Call, extent
from headrace.testing.order import Moment
from headrace.testing.queues import Operation, Queue
from headrace.testing.simulation import Simulation


class KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Hands every operator that runs on plain tensors of this thread to `launch`."""

    def __init__(self, launch: Callable[[Call], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launch = launch

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(cls not in (torch.Tensor, nn.Parameter) for cls in types):
            return NotImplemented  # a subclass unwraps itself first; the operators that it consists of come here
        call = Call(func, args, kwargs or {})
        if call.consists_of_others:
            with self:
                return func.decompose(*call.args, **call.kwargs)
        return self._launch(call)


@dataclass(frozen=True, slots=True)
class Use:
    """An operator's access to memory that is watched."""

    access: Access
    region: Region
    address: int
    nbytes: int
    by_device: bool


class Kernels:
    """The operators that ran on the device."""

    def __init__(
        self,
        simulation: Simulation,
        buffers: Regions,
        page_locks: PageLocks,
        kernel_s: float | Callable[[str, int], float],
    ) -> None:
        self.kernel_s = kernel_s
        self.count = 0
        self._simulation = simulation
        self._buffers = buffers
        self._page_locks = page_locks

    def put(self, call: Call, uses: list[Use], queue: Queue) -> Operation:
        """Put a kernel on a stream, and let happen what it comes after: it may run now."""
        nbytes = sum(use.nbytes for use in uses if use.by_device)
        cost_s = self.kernel_s(call.name, nbytes) if callable(self.kernel_s) else self.kernel_s * bool(nbytes)
        kernel = self._simulation.put(queue, call.name, cost_s=cost_s)
        self.count += 1
        self.note(kernel, uses)
        self._simulation.scheduler.some()
        self._simulation.scheduler.finish(kernel)
        return kernel

    def uses(self, call: Call) -> list[Use]:
        """What of its arguments lies in memory that is watched."""
        return list(self._find(call))

    def _find(self, call: Call) -> Iterator[Use]:
        for access in call.accesses():
            address, nbytes = extent(access.tensor)
            if not nbytes or access.tensor.device != torch.device("cpu"):
                continue
            if viewed := self._page_locks.viewed(access.tensor):
                yield Use(access, *viewed, nbytes, by_device=True)
            elif region := self._buffers.find(address, nbytes):
                yield Use(access, region, address, nbytes, by_device=True)
            elif region := self._page_locks.regions.find(address, nbytes):
                yield Use(access, region, address, nbytes, by_device=False)

    def note(self, moment: Moment, uses: list[Use]) -> None:
        """`moment` uses all of these."""
        for use in uses:
            self._simulation.access(
                moment, use.region, use.address, use.nbytes, reads=use.access.reads, writes=use.access.writes
            )
