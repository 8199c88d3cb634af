"""Engine.open -> model, tokenizer, report -> close: wires the rooms together and holds no clever code of its own."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace import drafting, machine, machinefile, model, overheads, residents, sources, store
from headrace.backends import backend_class
from headrace.backends.base import Backend, RowTable
from headrace.backends.guard import guard, put_away
from headrace.backends.zero_copy import ZeroCopyBackend
from headrace.backing import to_device
from headrace.blocks import Block, Weight
from headrace.config import OffloadConfig, parse_size
from headrace.copying.accelerator import open_device
from headrace.copying.ahead import ReadAhead
from headrace.copying.device import Device
from headrace.copying.disk import DiskReader, measure_bytes_per_s
from headrace.copying.rates import measure
from headrace.core import CHUNK_BYTES, READER_THREADS, Link, Machine, ModelShape, Plan, Tier
from headrace.devices import Around
from headrace.errors import BudgetBeyondMemory, BudgetTooSmall, NotEnoughMemory, NotLoadedHere
from headrace.generate import Sampling
from headrace.metrics import Metrics
from headrace.planner import (
    DEFAULT_CONTEXT,
    MARGIN_BYTES,
    MEMORY_SHARE,
    Demand,
    Load,
    choose_load,
    demand_of,
    memory_for_share,
    plan,
)
from headrace.reports import Report
from headrace.residents import Progress
from headrace.settings import require
from headrace.speculation import Drafter

Context = Callable[[Any, int | None], tuple[int, int]]
"""From the tokenizer and the model's longest sequence (if known) to the number of tokens that the KV cache is planned
for and the number of those that are prefilled at once."""

Loads = Callable[[Any, int | None], Sequence[Load]]
"""From the same to the batches that may be chosen, smallest first."""

BASELINE_SPREAD_BYTES = 8 * 2**20
"""Interpreter and libraries take some MiB more in one process than in the next: 3 were seen. A budget that an error
names has to work in the next one."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockTiers:
    """Where the weights of one block lie, in bytes. The last one has those that belong to no block."""

    name: str
    kind: str
    """A block's kind, or "rest"."""
    device_bytes: int
    disk_bytes: int


class Engine:
    """A loaded model with its weights where the plan puts them."""

    def __init__(
        self,
        skeleton: model.Skeleton,
        tokenizer: Any,
        made: Plan,
        backend: Backend,
        reader: DiskReader,
        metrics: Metrics,
        memory_bytes: int | None,
        around: Around | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._around = around
        self.drafter = drafter
        """What `generate` is given to make several tokens per pass; None if the plan speculates on nothing."""
        self.model: Any = skeleton.model
        self.tokenizer = tokenizer
        self.plan = made
        self.metrics = metrics
        self.memory_bytes = memory_bytes
        self._skeleton = skeleton
        self._backend = backend
        self._reader = reader
        weakref.finalize(self.model, reader.close)  # not of self: a model in use outlives it
        if around is not None:
            weakref.finalize(self.model, around.close)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        memory: str | int | None = None,
        offload: OffloadConfig | None = None,
        context: int | Context = DEFAULT_CONTEXT,
        weights_share: float | None = None,
        kept_free_bytes: int = 0,
        batch: int = 1,
        loads: Loads | None = None,
        device: str | torch.device | Device | None = None,
        host_memory: str | int | None = None,
        pin_memory: bool = True,
        speculate: str | None = None,
        sampling: Sampling | None = None,
        fast: bool = False,
        trust_remote_code: bool = False,
        tracing: bool = False,
        on_progress: Progress | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        ahead: ReadAhead | None = None,
    ) -> Engine:
        """Load the model at `path` so that the whole process stays within `memory`.

        `context` is the number of tokens that the KV cache is planned for, for each of `batch` sequences; with `loads`
        the planner chooses among several batches (`plan.batch` tells which). `weights_share` instead of `memory` sets
        the budget so that this share of the weights, ring included, would fit beside everything else.
        `kept_free_bytes` of the budget are for what the caller will take. `on_plan` sees the plan before any weight is
        read.

        With a `device` (`cuda:0`) `memory` is of the device, and weights that do not fit there wait in up to
        `host_memory` (90 % of what is free), page-locked unless `pin_memory` is False, and beyond that on disk.

        `speculate` ("auto", "off", "lookup" or a smaller model) lets the plan have several tokens per pass, for answers
        that are chosen by `sampling`: then `drafter` is for `generate`. `fast` multiplies single rows in bfloat16 by
        torch's own kernel instead of oneDNN's (`linears`): the logits' last bits are not those of plain transformers.

        `ahead` is what `early.reading` has begun to read of it: what the plan keeps of that is not read again, unless
        a device or a draft model gets the memory. It brings the metrics that count it, traced if it was begun so.

        Raises: UserError, CheckpointError, ReadError, OutOfDeviceMemory.
        """
        target = open_device(device)
        require(target is None or not fast, "fast", True, "False with a device: it is for the processor", "False")
        machine.tune_allocator(return_memory=True)  # before the heap grows
        config = offload or OffloadConfig()
        memory_bytes = parse_size(memory, "memory") if memory is not None else None
        host_bytes = parse_size(host_memory, "host_memory") if host_memory is not None else None
        directory = sources.resolve(path, trust_remote_code=trust_remote_code, on_progress=on_progress)
        if ahead is not None and (
            target is not None or drafting.kind_of(speculate or "off") == "draft" or not ahead.is_of(directory)
        ):
            ahead.close()
            ahead = None
        checkpoint = store.open_checkpoint(directory) if ahead is None else ahead.checkpoint
        tokenizer = model.load_tokenizer(directory, trust_remote_code=trust_remote_code)
        skeleton = model.build(directory, checkpoint, trust_remote_code=trust_remote_code, fast_rows=fast)
        longest = model.max_positions(skeleton.model)
        if loads is not None:
            choices = list(loads(tokenizer, longest))
        else:
            choices = [Load(batch, *(context(tokenizer, longest) if callable(context) else (context, context)))]
        speculating = drafting.Speculating(speculate, skeleton, tokenizer, sampling or Sampling())
        speculating.find_draft(
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
            on_device=target is not None,
            fast_rows=fast,
        )
        metrics = Metrics(tracing=tracing) if ahead is None else ahead.metrics
        paths = {name: checkpoint.path(name) for name in checkpoint.files}
        reader = DiskReader(paths, metrics) if ahead is None else ahead.reader
        around = None if target is None else Around(target, reader, metrics, pin_memory=pin_memory)
        try:
            if ahead is not None:  # before anything is measured: reading takes from disk and cores alike
                ahead.wait(None if on_progress is None else functools.partial(on_progress, residents.LOADING))
            here = _measure(reader, checkpoint, skeleton, target, fast=fast)
            machine.trim_memory()
            baseline_bytes = machine.resident_bytes() - (0 if ahead is None else ahead.committed_bytes)
            demand = Demand(
                memory_bytes=memory_bytes if memory_bytes is not None else int(_room(here) * MEMORY_SHARE),
                baseline_bytes=baseline_bytes if target is None else 0,
                staging_bytes=READER_THREADS * CHUNK_BYTES,
                context_tokens=choices[0].context_tokens,
                prefill_tokens=choices[0].prefill_tokens,
                batch=choices[0].batch,
                margin_bytes=MARGIN_BYTES + kept_free_bytes,
                has_accelerator=target is not None,
                host_bytes=host_bytes if host_bytes is not None else int(here.memory_bytes * MEMORY_SHARE),
                host_baseline_bytes=baseline_bytes,
                fast_rows=fast,
                fast_bytes=skeleton.fast_bytes,
                **speculating.demand(),
            )
            if weights_share is not None:
                memory_bytes = memory_for_share(skeleton.shape, demand, weights_share)
                demand = dataclasses.replace(demand, memory_bytes=memory_bytes)
            load, why = choose_load(skeleton.shape, here, demand, config, choices)
            made = _plan_for_here(skeleton.shape, here, demand_of(demand, load), config)
            if loads is not None:
                made = dataclasses.replace(made, choices=(*made.choices, why))
            if on_plan is not None:
                on_plan(made)
            if made.backend == "resident":  # memory is not scarce: as fast as any other program
                machine.tune_allocator(return_memory=False)
            drafter = speculating.carry_out(made, on_progress)
            backend = _carry_out(made, skeleton, reader, metrics, on_progress, around, ahead)
        except BaseException:
            reader.close()
            if around is not None:
                around.close()
                around.free_residents()
            raise
        metrics.reset()
        return cls(skeleton, tokenizer, made, backend, reader, metrics, memory_bytes, around, drafter)

    def report(self) -> Report:
        """Where the bytes are and what has moved so far."""
        self._backend.count_time()
        tables = [block for block in self._skeleton.blocks.moving if block.kind == "embedding"]
        looked_up = sum(weight.nbytes for block in tables for weight in block.weights if _is_offloaded(weight))
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in self.model.buffers())
        ring = self._backend.allocated_bytes
        offloaded = _offloaded_bytes(self._skeleton)
        if isinstance(self._backend, ZeroCopyBackend):  # weights in host memory that look as if they were on the device
            offloaded += sum(weight.nbytes for weights in self._backend.weights.values() for weight in weights)
        total = sum(weight.nbytes for weight in self._skeleton.blocks.weights())
        return Report(
            backend=self.plan.backend,
            requested_bytes=self.memory_bytes,
            resident_bytes=total - offloaded + buffers,
            offloaded_bytes=offloaded,
            looked_up_bytes=looked_up,
            ring_bytes=ring,
            staging_bytes=self._reader.staging_bytes,
            host_bytes=self._backend.host_bytes,
            buffer_bytes=buffers,
            net_saving_bytes=offloaded - ring,
            peak_memory_bytes=machine.peak_resident_bytes(),
            counters=self.metrics.counters(),
            plan=self.plan,
            fallbacks=(*self._reader.fallbacks, *(self._around.fallbacks if self._around is not None else ())),
        )

    def tiers(self) -> tuple[BlockTiers, ...]:
        """Where each block's weights lie, in the order of a pass. Asked between passes."""
        blocks = self._skeleton.blocks
        named = [(block.name, block.kind, block.weights) for block in blocks.moving]
        return tuple(_tiers(name, kind, weights) for name, kind, weights in [*named, ("rest", "rest", blocks.fixed)])

    def close(self) -> None:
        """Stop reading and end the threads. Offloaded models cannot run any more. Idempotent."""
        self._backend.close()
        self._reader.close()
        if self._around is not None:
            self._around.close()

    def __reduce__(self) -> Any:
        """A copy of a resident model, or a pickled one, is a plain model: there is no engine behind it."""
        return (type(None), ())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _room(here: Machine) -> int:
    """Memory of the device."""
    return here.memory_bytes if here.accelerator is None else here.accelerator.memory_bytes


def _measure(
    reader: DiskReader, checkpoint: store.Checkpoint, skeleton: model.Skeleton, device: Device | None, *, fast: bool
) -> Machine:
    name = str(skeleton.dtype).removeprefix("torch.")
    weights_per_s = machine.measure_compute_bytes_per_s(name)  # first: its memory must not be the process's peak
    fast_per_s = machine.measure_fast_row_bytes_per_s() if fast else 0.0
    used = {param.bits for block in skeleton.shape.blocks for param in block.params}
    low_bits = {bits: machine.measure_low_bits_per_s(bits, name) for bits in used if bits}
    operations_per_s = machine.measure_operations_per_s(name)
    per_layer_s, per_pass_s = overheads.measure_overhead_s()
    here = Machine(
        memory_bytes=machine.available_bytes(),
        cores=machine.cores(),
        disk=Link(Tier.DISK, Tier.DEVICE, measure_bytes_per_s(reader, checkpoint.files)),
        compute_bytes_per_s=weights_per_s,
        compute_operations_per_s=operations_per_s,
        layer_overhead_s=per_layer_s,
        pass_overhead_s=per_pass_s,
        int8_bytes_per_s=low_bits.get(8, 0.0),
        int4_bytes_per_s=low_bits.get(4, 0.0),
        fast_row_bytes_per_s=fast_per_s,
        accelerator=None if device is None else measure(device),
    )
    # Measured here in a moment all the same: it loads the code that a pass will run, which belongs to the baseline.
    return _with_what_was_kept(here)


BUSY_RATIO = 2.5
"""A rate that is measured in a moment, partly out of caches, is not by more above one that was measured in quiet."""


def _with_what_was_kept(here: Machine) -> Machine:
    """The processor's rates as `headrace machine` measured them in more time, if it did: plans are made with those.

    Not if this moment is much faster: others were at work when they were measured.
    """
    kept = machinefile.read_cached()
    if kept is None or kept.cores != here.cores or here.compute_bytes_per_s > BUSY_RATIO * kept.compute_bytes_per_s:
        return here
    return dataclasses.replace(
        here,
        compute_bytes_per_s=kept.compute_bytes_per_s,
        compute_operations_per_s=kept.compute_operations_per_s,
        layer_overhead_s=kept.layer_overhead_s,
        pass_overhead_s=kept.pass_overhead_s,
        expert_overhead_s=kept.expert_overhead_s,
        contention=kept.contention,
        copy_bytes_per_s=kept.copy_bytes_per_s,
        products=kept.products,
        fast_row_bytes_per_s=kept.fast_row_bytes_per_s or here.fast_row_bytes_per_s,
    )


def _plan_for_here(shape: ModelShape, here: Machine, demand: Demand, config: OffloadConfig) -> Plan:
    """The plan, if this process can have what it takes.

    Raises: BudgetTooSmall, BudgetBeyondMemory, NotEnoughMemory, NothingOffloaded.
    """
    room_bytes = _room(here)
    try:
        made = plan(shape, here, demand, config)
        planned_bytes = made.memory.total_bytes
        if planned_bytes <= room_bytes:
            return made
        works_bytes = int(room_bytes * MEMORY_SHARE)
        plan(shape, here, dataclasses.replace(demand, memory_bytes=works_bytes), config)
    except BudgetTooSmall as error:
        needed_bytes = error.needed_bytes + BASELINE_SPREAD_BYTES
        if needed_bytes > room_bytes:
            raise NotEnoughMemory(needed_bytes=needed_bytes, free_bytes=room_bytes) from None
        facts = {**error.facts, "needed_bytes": needed_bytes}
        facts["baseline_bytes"] += BASELINE_SPREAD_BYTES
        raise BudgetTooSmall(**facts) from None
    raise BudgetBeyondMemory(planned_bytes=planned_bytes, free_bytes=room_bytes, works_bytes=works_bytes)


def _offloaded_bytes(skeleton: model.Skeleton) -> int:
    return sum(weight.nbytes for weight in skeleton.blocks.weights() if _is_offloaded(weight))


def _tiers(name: str, kind: str, weights: Sequence[Weight]) -> BlockTiers:
    total = sum(weight.nbytes for weight in weights)
    disk = sum(weight.nbytes for weight in weights if _is_offloaded(weight))
    return BlockTiers(name, kind, total - disk, disk)


def _is_offloaded(weight: Weight) -> bool:
    """Asked of the model itself, not of the plan: a weight is offloaded if its sites hold no data."""
    return all(site.module._parameters[site.attribute] is weight.meta for site in weight.sites)


def _carry_out(
    made: Plan,
    skeleton: model.Skeleton,
    reader: DiskReader,
    metrics: Metrics,
    on_progress: Progress | None,
    around: Around | None,
    ahead: ReadAhead | None,
) -> Backend:
    moving = _moving(made, skeleton)
    elsewhere = {weight for weights in moving.values() for weight in weights}
    elsewhere |= {weight for block in skeleton.blocks.moving if block.name in made.gathered for weight in block.weights}
    resident = [weight for weight in skeleton.blocks.weights() if weight not in elsewhere]
    if around is None:
        residents.load(resident, skeleton.converters, reader, on_progress, ahead=ahead)
    else:
        around.load_residents(resident, skeleton.converters, on_progress)
        to_device(skeleton.model, [], around.device.torch_device)
    # Whatever the backend, a table is looked up by rows: not even mapped is it worth to be touched as a whole.
    moving = {block: weights for block, weights in moving.items() if block.kind != "embedding"}
    if around is not None and moving:
        backend = around.backend(made, moving, on_progress)
    else:
        backend = _backend(made, moving, reader, metrics)
    device = None if around is None else around.device.torch_device
    try:
        for block in skeleton.blocks.moving:
            if block.table is not None and block.weights[0] in elsewhere:
                RowTable(block.weights[0], block.table, reader, metrics, device).attach()
        backend.attach(skeleton.model)
        if elsewhere:
            put_away((weight for weight in elsewhere if _is_offloaded(weight)), device or torch.device("cpu"))
            guard(skeleton.model)
    except BaseException:
        backend.close()
        raise
    return backend


def _moving(made: Plan, skeleton: model.Skeleton) -> dict[Block, Sequence[Weight]]:
    by_name = {block.name: block for block in skeleton.blocks.moving}
    return {
        by_name[name]: [weight for weight in by_name[name].weights if weight.name in set(names)]
        for name, names in made.streamed
    }


def _backend(made: Plan, moving: Mapping[Block, Sequence[Weight]], reader: DiskReader, metrics: Metrics) -> Backend:
    name = made.backend if moving or made.backend == "uva" else "resident"
    arguments: dict[str, Any] = {}
    if name == "prefetch":
        arguments = {"reader": reader, "slots": made.slots}
    if name == "uva":
        arguments = {"paths": reader.paths}
    if name == "resident":
        arguments = {"tables": bool(made.gathered)}
    return backend_class(name)(list(moving), moving, metrics, **arguments)


# --- the two functions for Python ----------------------------------------------------------------------------------


def load(
    path: str | Path,
    *,
    memory: str | int | None = None,
    offload: OffloadConfig | None = None,
    context: int = DEFAULT_CONTEXT,
    batch: int = 1,
    device: str | torch.device | Device | None = None,
    host_memory: str | int | None = None,
    pin_memory: bool = True,
    fast: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """The transformers model at `path`, its weights within `memory`, and its tokenizer.

    `memory` ("3GiB", or bytes) covers the whole process, KV cache for `context` tokens of `batch` sequences included;
    without it the budget is 90 % of what is free. `model.generate` works as always. `fast` multiplies single rows in
    bfloat16 by torch's own kernel (`linears`): the logits' last bits are not those of plain transformers, and models
    without it should not run in another thread meanwhile.

    With a `device` ("cuda:0") the model computes there, `memory` is of the device, and weights that do not fit wait in
    up to `host_memory`, page-locked unless `pin_memory` is False, and beyond that on disk.

    Raises: UserError, CheckpointError, ReadError, OutOfDeviceMemory.
    """
    engine = Engine.open(
        path,
        memory=memory,
        offload=offload,
        context=context,
        batch=batch,
        device=device,
        host_memory=host_memory,
        pin_memory=pin_memory,
        fast=fast,
        trust_remote_code=trust_remote_code,
    )
    engine.model.headrace_engine = engine
    return engine.model, engine.tokenizer


def report(loaded: Any) -> Report:
    """Where the bytes of a model from `load` are and what has moved so far. Raises: NotLoadedHere."""
    engine = getattr(loaded, "headrace_engine", None)
    if not isinstance(engine, Engine):
        raise NotLoadedHere(given=type(loaded).__name__)
    return engine.report()
