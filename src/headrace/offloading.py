"""offload(module, config): any module of torch with a list of blocks, its weights within a budget.

Wires the rooms together for a module that is in memory, as `engine` does for a checkpoint. What moves goes to host
memory beside an accelerator as long as that lasts, and to a file of its own that is gone with the process.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headrace import live, machine
from headrace.backends import backend_class
from headrace.backends.base import Backend
from headrace.backends.guard import guard, is_guarded, put_away
from headrace.backends.on_device import open_on_device
from headrace.backends.packing import Packing
from headrace.backends.prefetch import PrefetchBackend
from headrace.backends.zero_copy import ZeroCopyBackend
from headrace.backing import Backing, to_device
from headrace.blocks import Block, Weight
from headrace.config import OffloadConfig, parse_size
from headrace.copying.accelerator import open_device
from headrace.copying.device import Device
from headrace.copying.disk import measure_bytes_per_s
from headrace.copying.spill import spilled_size
from headrace.core import (
    CHUNK_BYTES,
    DIRECT_ALIGNMENT,
    READER_THREADS,
    BlockShape,
    Link,
    Machine,
    ModelShape,
    ParamShape,
    Plan,
    Tier,
    align_up,
)
from headrace.cuts import spread
from headrace.errors import BudgetTooSmall, CannotOffload, ModuleBudgetTooSmall, NothingOffloaded, StillRunning
from headrace.metrics import Metrics, Statistics
from headrace.planner import MEMORY_SHARE, Demand, plan
from headrace.reports import Category, Report
from headrace.store import layout

SMALL_CHUNK_BYTES = 64 * 1024


class Handle:
    """An offloaded module: what was done, what has moved, and the way back.

    The module works as before; it may be used without the handle, which only `close` and the reports need. As a context
    manager it closes at the end.
    """

    def __init__(self, opened: _Opened, memory_bytes: int | None) -> None:
        self.module = opened.module
        self.plan = opened.made
        self._backend = opened.backend
        self._metrics = opened.metrics
        self._moved = opened.moved
        self._stayed = opened.stayed
        self._backing = opened.backing
        self._unguard = opened.unguard
        self._memory_bytes = memory_bytes
        self._closed = False

    def report(self) -> Report:
        """What was asked for and what was done, in bytes: by category, tied weights counted once."""
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in self.module.buffers())
        offloaded = 0 if self._closed else sum(item.nbytes for item in self._moved)
        stayed = sum(item.nbytes for item in [*self._stayed, *(self._moved if self._closed else ())])
        ring = 0 if self._closed else self._backend.allocated_bytes
        return Report(
            backend=self.plan.backend,
            requested_bytes=self._memory_bytes,
            resident_bytes=stayed + buffers,
            offloaded_bytes=offloaded,
            looked_up_bytes=0,
            ring_bytes=ring,
            staging_bytes=self._backing.staging_bytes,
            host_bytes=self._backend.host_bytes,
            buffer_bytes=buffers,
            net_saving_bytes=offloaded - ring,
            peak_memory_bytes=machine.peak_resident_bytes(),
            counters=self._metrics.counters(),
            plan=self.plan,
            fallbacks=self._backing.all_fallbacks(),
            categories=() if self._closed else self._categories(stayed + buffers, buffers),
        )

    def _categories(self, resident_bytes: int, buffer_bytes: int) -> tuple[Category, ...]:
        memory, backing = self.plan.memory, self._backing
        in_host = sum(item.nbytes for item in self._moved if backing.in_host(item.weight))
        on_disk = sum(item.nbytes for item in self._moved) - in_host
        ring = self._backend.allocated_bytes
        return (
            Category("resident", memory.resident_bytes, resident_bytes, resident_bytes),
            Category("buffers", buffer_bytes, buffer_bytes, buffer_bytes),
            Category("host", self.plan.offloaded_bytes - on_disk, in_host, backing.host_bytes),
            Category("disk", self.plan.offloaded_bytes - in_host, on_disk, backing.disk_bytes),
            Category("ring", memory.ring_bytes, ring, ring),
            Category("staging", memory.staging_bytes, backing.staging_bytes, backing.staging_bytes),
        )

    def statistics(self) -> Statistics:
        """What has moved since the module was offloaded, how much of it was hidden behind computing, what missed."""
        self._backend.count_time()
        return self._metrics.statistics()

    @torch.inference_mode(False)  # what is made in it could not be used outside
    def close(self) -> None:
        """Give the module its weights back, in memory, where they were. Idempotent.

        Needs memory for all of them. If reading them fails the module stays offloaded. Raises: ReadError.
        """
        with self._backend.exclusive():
            if self._closed:
                return
            self._check_idle("close()")
            restored = [(item, self._backing.bring_back(item.weight)) for item in self._moved]
            self._closed = True
            self._backend.close()
            self._backend.detach()
            self._unguard()
            for item, memory in restored:
                item.restore(memory.to(item.device))
            _return_residents(self.module, self._stayed, self._backing.device)
        self._backing.close()

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """What the module's own gives, with the offloaded weights read back into memory, for saving.

        Raises: ReadError, StillRunning.
        """
        with self._backend.exclusive(), contextlib.ExitStack() as lent:
            if not self._closed:
                self._check_idle("state_dict()")
                for item in self._moved:
                    lent.enter_context(item.lent(self._backing.bring_back(item.weight)))
            made: dict[str, Any] = self.module.state_dict()
            return made

    def _check_idle(self, action: str) -> None:
        if self._backend.running:
            raise StillRunning(action=action)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@torch.inference_mode(False)
def offload(
    module: nn.Module,
    config: OffloadConfig | None = None,
    *,
    blocks: str | Sequence[str | nn.Module] | None = None,
    device: str | torch.device | Device | None = None,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    pin_memory: bool = True,
) -> Handle:
    """Move weights of `module` out of the memory that it computes in; they come back just before each block runs.

    `blocks` says what moves as one: a dotted name of a list of modules, several names, or the modules; without it the
    lists of modules (decoder layers, towers) are found. `memory` ("2GiB", or bytes) is what weights, ring and staging
    may take together where the module computes; what `config` asks for in vLLM's terms comes before it. `device` is
    where it computes: the CPU by default, and then the weights go to a file without a name, which is gone with the
    process. Beside a device they go to host memory, up to `host_memory` (90 % of what is free), and the rest to the
    file; what stays is moved to the device. `pin_memory=False` leaves host memory pageable.

    The result is bit-identical, in any order of blocks. It is for inference: gradients are refused.

    Raises: UserError (CannotOffload, NothingOffloaded, ModuleBudgetTooSmall, InvalidSize), SpillFailed.
    """
    if any(is_guarded(child) for child in module.modules()):
        raise CannotOffload(
            reason="it, or a part of it, is offloaded already",
            suggestion="Close that first, or pass all settings in one call.",
        )
    memory_bytes = parse_size(memory, "memory") if memory is not None else None
    host_bytes = parse_size(host_memory, "host_memory") if host_memory is not None else None
    target = open_device(device)
    found = live.lives(module)
    cut = live.cut(module, blocks, found)
    # Small modules need small pieces: the reader's staging should not be larger than what it saves.
    share = max(block.nbytes for block in cut) // READER_THREADS
    staging = _Staging(min(CHUNK_BYTES, max(SMALL_CHUNK_BYTES, align_up(share, DIRECT_ALIGNMENT))), READER_THREADS)
    made = _plan(module, cut, found, config or OffloadConfig(), memory_bytes, target, staging)
    opening = _Opening(module, made, cut, found, target, staging)
    opened = opening.open(host_bytes, pin_memory=pin_memory)
    return Handle(opened, memory_bytes)


@dataclass(frozen=True)
class _Staging:
    chunk_bytes: int
    threads: int

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * self.threads


# --- planning -----------------------------------------------------------------------------------------------------


def _plan(
    module: nn.Module,
    blocks: Sequence[Block],
    found: Sequence[live.Live],
    config: OffloadConfig,
    memory_bytes: int | None,
    device: Device | None,
    staging: _Staging,
) -> Plan:
    """What stays, within the budget where it computes; staging counts on the CPU, where it is the same memory."""
    if memory_bytes is None and device is None and config.resolved_backend == "auto":
        raise NothingOffloaded(
            request="offload() without a budget and without settings",
            reason="on the CPU everything fits into the memory that it is in already",
            suggestion="memory='2GiB', or an OffloadConfig that says what moves",
        )
    in_blocks = {weight for block in blocks for weight in block.weights}
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    shape = ModelShape(
        blocks=tuple(
            BlockShape(
                block.name, tuple(ParamShape(weight.name, weight.nbytes) for weight in block.weights), block.kind
            )
            for block in blocks
        ),
        fixed_bytes=buffers + sum(item.nbytes for item in found if item.weight not in in_blocks),
        kv_bytes_per_token=0,
        activation_bytes_per_token=0,
        head_bytes=0,
        head_always_copied=False,
        logits_bytes=0,
    )
    if memory_bytes is None and device is not None and config.resolved_backend == "auto":
        memory_bytes = int(device.free_bytes * MEMORY_SHARE)
    all_fits = memory_bytes is not None and shape.weight_bytes <= memory_bytes and config.resolved_backend == "auto"
    staging_bytes = 0 if device is not None or all_fits else staging.nbytes
    demand = Demand(memory_bytes, 0, staging_bytes, context_tokens=0, prefill_tokens=0)
    try:
        return plan(shape, _unmeasured(), demand, config)
    except BudgetTooSmall as error:
        raise ModuleBudgetTooSmall(
            memory_bytes=error.memory_bytes,
            needed_bytes=error.needed_bytes,
            fixed_bytes=error.fixed_bytes,
            ring_bytes=error.ring_bytes,
            staging_bytes=demand.staging_bytes,
        ) from None


def _unmeasured() -> Machine:
    """Rates do not change which bytes move; the link is measured once there is a file to measure it with."""
    return Machine(machine.available_bytes(), machine.cores(), Link(Tier.DISK, Tier.DEVICE, 1e9), 1e10)


# --- moving -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opened:
    module: nn.Module
    made: Plan
    backend: Backend
    metrics: Metrics
    backing: Backing
    moved: list[live.Live]
    stayed: list[live.Live]
    unguard: Callable[[], None]


class _Opening:
    """Carries a plan out. If anything fails the module is as it was."""

    def __init__(
        self,
        module: nn.Module,
        made: Plan,
        blocks: Sequence[Block],
        found: Sequence[live.Live],
        device: Device | None,
        staging: _Staging,
    ) -> None:
        self.module = module
        self.made = made
        self.device = device
        self.metrics = Metrics()
        self.backing = Backing(device, self.metrics, chunk_bytes=staging.chunk_bytes, threads=staging.threads)
        by_name = {block.name: block for block in blocks}
        by_weight = {item.weight: item for item in found}
        self.moving = {
            by_name[name]: [by_weight[weight] for weight in by_name[name].weights if weight.name in set(names)]
            for name, names in made.streamed
        }
        away = {item.weight for items in self.moving.values() for item in items}
        self.stayed = [item for item in found if item.weight not in away]
        self.moved: list[live.Live] = []
        self.compute_device = torch.device("cpu") if device is None else device.torch_device

    def open(self, host_bytes: int | None, *, pin_memory: bool) -> _Opened:
        with contextlib.ExitStack() as undo:
            undo.callback(self._roll_back)
            weights = self._put_away(host_bytes, pin_memory=pin_memory)
            if self.device is not None:
                to_device(self.module, self.stayed, self.device.torch_device)
            made = self._measured()
            self.metrics.reset()  # the measurement is not the user's
            backend = self._backend(weights)
            undo.callback(backend.close)
            undo.callback(backend.detach)
            backend.attach(self.module)
            unguard: Callable[[], None] = contextlib.ExitStack().close
            if self.moved and not isinstance(backend, ZeroCopyBackend):
                put_away((weight for some in weights.values() for weight in some), self.compute_device)
                unguard = guard(self.module)
            undo.pop_all()
        weakref.finalize(self.module, self.backing.held.close)
        return _Opened(self.module, made, backend, self.metrics, self.backing, self.moved, self.stayed, unguard)

    def _put_away(self, host_bytes: int | None, *, pin_memory: bool) -> dict[Block, list[Weight]]:
        packed = {block: layout(item.weight.nbytes for item in items)[1] for block, items in self.moving.items()}
        on_disk = self._on_disk(packed, host_bytes)
        self.backing.reserve(
            sum(nbytes for block, nbytes in packed.items() if block not in on_disk),
            spilled_size([nbytes for block, nbytes in packed.items() if block in on_disk]),
            pin_memory=pin_memory,
        )
        weights = {}
        for block, items in self.moving.items():
            weights[block] = self.backing.put(block, items, on_disk=block in on_disk)
            self.moved += items
            for item in items:  # block by block: the module is never in memory twice
                item.release()
        self.backing.flush()
        return weights

    def _on_disk(self, packed: dict[Block, int], host_bytes: int | None) -> set[Block]:
        """The blocks that host memory has no room for, spread over the pass."""
        if self.device is None:
            return set(packed)
        if host_bytes is None:
            host_bytes = int(machine.available_bytes() * MEMORY_SHARE)
        away = spread(list(packed.values()), host_bytes)
        return {block for block, is_away in zip(packed, away, strict=True) if is_away}

    def _backend(self, weights: dict[Block, list[Weight]]) -> Backend:
        blocks = list(weights)
        if not blocks:
            return backend_class("resident")([], {}, self.metrics)
        if self.device is not None:
            return self._on_device(blocks, weights)
        assert self.backing.reader is not None
        if self.made.backend == "uva":
            return backend_class("uva")(blocks, weights, self.metrics, self.backing.paths)  # type: ignore[call-arg]
        return PrefetchBackend(blocks, weights, self.metrics, self.backing.reader, slots=self.made.slots)

    def _on_device(self, blocks: list[Block], weights: dict[Block, list[Weight]]) -> Backend:
        assert self.device is not None
        packings = [
            Packing(
                block,
                weights[block],
                self.backing.chunk_bytes,
                in_host=weights[block] if block in self.backing.host else (),
            )
            for block in blocks
        ]
        return open_on_device(
            self.made,
            packings,
            self.metrics,
            self.device,
            arena=self.backing.arena,
            host={index: self.backing.host[block] for index, block in enumerate(blocks) if block in self.backing.host},
            reader=self.backing.reader,
            announce=self.backing.announce,
        )

    def _measured(self) -> Plan:
        """The plan with the rate of the link that it has to share."""
        if self.backing.reader is None or not self.moved:
            return self.made
        rate = measure_bytes_per_s(self.backing.reader, dict.fromkeys(self.backing.paths, self.backing.disk_bytes))
        return replace(self.made, bound=replace(self.made.bound, link_bytes_per_s=rate))

    def _roll_back(self) -> None:
        for item in self.moved:
            item.restore(self.backing.bring_back(item.weight).to(item.device))
        _return_residents(self.module, self.stayed, self.device)
        self.backing.close()


def _return_residents(module: nn.Module, stayed: Sequence[live.Live], device: Device | None) -> None:
    if device is not None and stayed:
        to_device(module, stayed, stayed[0].device)
