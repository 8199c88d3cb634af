"""plan(shape, machine, demand, config) -> Plan: which bytes stay on the device, which move. Pure; no torch.

A pass over the layers is a cyclic scan, and a cyclic scan defeats a least-recently-used cache. So what fits stays for
good and the rest streams. What streams is chosen per parameter, the same cut from every layer where it can be: the ring
holds only what moves of a layer, so small cuts need small slots, and the reads are spread over the whole pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from headrace import errors
from headrace.config import OffloadConfig, matches, selected_layers
from headrace.core import (
    BlockShape,
    Choice,
    Machine,
    MemoryPlan,
    ModelShape,
    ParamShape,
    Plan,
    align_up,
)
from headrace.cuts import Cut, best_cut, least_rest, moved_bytes, slot_bytes
from headrace.planner import costs, reasons
from headrace.planner.costs import Demand
from headrace.planner.placing import Placement, place
from headrace.planner.speculating import speculation
from headrace.units import format_bytes


def plan(shape: ModelShape, machine: Machine, demand: Demand, config: OffloadConfig) -> Plan:
    """The choices for this model on this machine, with the reason for each.

    Raises: BudgetTooSmall, HostBudgetTooSmall, NothingOffloaded.
    """
    if demand.batch == 1:
        machine = machine.with_fast_rows(costs.fast_share(shape, demand))
    backend = config.resolved_backend
    if backend == "prefetch":
        return _plan_groups(shape, machine, demand, config)
    if backend == "uva":
        return _plan_mapped(shape, machine, demand, config)
    return _plan_for_memory(shape, machine, demand)


def memory_for_share(shape: ModelShape, demand: Demand, share: float) -> int:
    """The budget in which `share` of the weights, ring included, fit beside everything else."""
    return costs.overhead_bytes(shape, demand) + int(share * shape.weight_bytes)


def resident_memory_bytes(shape: ModelShape, demand: Demand) -> int:
    """The smallest budget in which nothing has to move."""
    return costs.overhead_bytes(shape, demand) + shape.weight_bytes


def least_memory_bytes(shape: ModelShape, demand: Demand) -> int:
    """The smallest budget in which everything that can move streams, in whole MiB."""
    tables = [block for block in shape.blocks if block.gathered and _all_movable(block)]
    streams = [block for block in shape.blocks if block not in tables]
    stays, ring = least_rest(streams, slots=2)
    fixed = shape.weight_bytes - sum(block.nbytes for block in shape.blocks) + stays
    return align_up(costs.overhead_bytes(shape, demand) + fixed + ring, 2**20)


# --- auto: what fits stays, the rest streams -----------------------------------------------------------------------


def _plan_for_memory(shape: ModelShape, machine: Machine, demand: Demand) -> Plan:
    room = None if demand.memory_bytes is None else demand.memory_bytes - costs.overhead_bytes(shape, demand)
    if room is None or shape.weight_bytes <= room:
        reason = (
            "no memory budget was given"
            if room is None
            else f"all {format_bytes(shape.weight_bytes)} of weights fit into the {format_bytes(room)} left for them"
        )
        return _assemble(shape, machine, demand, "resident", {}, (), 0, [Choice("backend", "resident", reason)])
    gathered = tuple(block.name for block in shape.blocks if block.gathered and _all_movable(block))
    table_bytes = sum(block.nbytes for block in shape.blocks if block.name in gathered)
    streams = [block for block in shape.blocks if block.name not in gathered]
    excess = shape.weight_bytes - table_bytes - room
    cut = {} if excess <= 0 else best_cut(streams, excess, slots=2)
    if cut is None:
        raise _too_small(shape, demand, streams, table_bytes)
    choices = [
        Choice(
            "backend",
            "prefetch",
            f"{format_bytes(shape.weight_bytes)} of weights do not fit into {format_bytes(room)}: "
            "what fits stays for good, the rest "
            + (
                "is read from disk on every pass"
                if machine.accelerator is None
                else "comes over the link on every pass"
            ),
        )
    ]
    return _assemble(shape, machine, demand, "prefetch", cut, gathered, 2, choices)


def _all_movable(block: BlockShape) -> bool:
    return all(param.movable for param in block.params)


def _too_small(
    shape: ModelShape, demand: Demand, streams: Sequence[BlockShape], table_bytes: int
) -> errors.BudgetTooSmall:
    """The error with the smallest budget that works, found by the same search."""
    stays, ring = least_rest(streams, slots=2)
    fixed = shape.weight_bytes - table_bytes - sum(block.nbytes for block in streams) + stays
    overhead = costs.overhead_bytes(shape, demand)
    kv_bytes = costs.kv_bytes(shape, demand)
    draft_bytes = costs.draft_bytes(demand)
    return errors.BudgetTooSmall(
        memory_bytes=demand.memory_bytes or 0,
        needed_bytes=align_up(overhead + fixed + ring, 2**20),
        baseline_bytes=demand.baseline_bytes,
        fixed_bytes=fixed + draft_bytes,
        ring_bytes=ring,
        kv_bytes=kv_bytes,
        working_bytes=overhead - demand.baseline_bytes - kv_bytes - draft_bytes,
    )


# --- the settings that carry over from vLLM ------------------------------------------------------------------------


def _plan_groups(shape: ModelShape, machine: Machine, demand: Demand, config: OffloadConfig) -> Plan:
    prefetch = config.prefetch
    layers = [block for block in shape.blocks if block.kind == "layer"]
    group, number = prefetch.offload_group_size, prefetch.offload_num_in_group
    chosen = [layers[index] for index in selected_layers(len(layers), group, number)]
    if not chosen:
        raise errors.NothingOffloaded(
            request=f"--offload-group-size {group} --offload-num-in-group {number}",
            reason=f"layer i is offloaded if i % {group} >= {group - number}, and the model has {len(layers)} layers",
            suggestion=f"--offload-group-size {len(layers)} --offload-num-in-group {min(number, len(layers))}",
        )
    cut = _selected(chosen, lambda param: not prefetch.offload_params or matches(prefetch.offload_params, param.name))
    if not cut:
        request = f"--offload-group-size {group} --offload-num-in-group {number}"
        raise _no_match(request, "--offload-params", prefetch.offload_params, chosen)
    slots = min(prefetch.offload_prefetch_step + 1, len(cut))
    choices = [
        Choice("backend", "prefetch", "asked for by its settings"),
        Choice("offloaded layers", f"{len(cut)} of {len(layers)}", f"the last {number} of every {group}"),
    ]
    made = _assemble(shape, machine, demand, "prefetch", cut, (), slots, choices)
    return _within_budget(shape, demand, made)


def _plan_mapped(shape: ModelShape, machine: Machine, demand: Demand, config: OffloadConfig) -> Plan:
    """Whole parameters out of device memory, never more than asked: tables first, then layers from the last one on."""
    selector = config.uva.cpu_offload_params
    tables = [block for block in shape.blocks if block.gathered]
    others = [block for block in reversed(shape.blocks) if not block.gathered]
    cut: Cut = {}
    left = config.uva.budget_bytes
    matched = [
        (block, param)
        for block in (*tables, *others)
        for param in block.params
        if _can_move(param) and (not selector or matches(selector, param.name))
    ]
    if not matched:
        request = f"--cpu-offload-gb {config.uva.cpu_offload_gb:g}"
        raise _no_match(request, "--cpu-offload-params", selector, shape.blocks)
    for block, param in matched:
        if param.nbytes <= left:
            left -= param.nbytes
            cut[block.name] = (*cut.get(block.name, ()), param.name)
    if not cut:
        smallest = min(param.nbytes for _, param in matched)
        raise errors.NothingOffloaded(
            request=f"--cpu-offload-gb {config.uva.cpu_offload_gb:g}",
            reason=f"the smallest parameter that could move has {format_bytes(smallest)}",
            suggestion=f"--cpu-offload-gb {-(-smallest * 1000 // 2**30) / 1000} or more",
        )
    choices = [
        Choice(
            "backend", "uva", f"asked for: up to {config.uva.cpu_offload_gb:g} GiB are used where the file is mapped"
        )
    ]
    ordered = {block.name: cut[block.name] for block in shape.blocks if block.name in cut}
    made = _assemble(shape, machine, demand, "uva", ordered, (), 0, choices)
    return _within_budget(shape, demand, made)


def _can_move(param: ParamShape) -> bool:
    return param.movable and param.nbytes > 0


def _selected(blocks: Sequence[BlockShape], wanted: Callable[[ParamShape], bool]) -> Cut:
    cut = {
        block.name: tuple(param.name for param in block.params if _can_move(param) and wanted(param))
        for block in blocks
    }
    return {name: params for name, params in cut.items() if params}


def _no_match(
    request: str, flag: str, selector: frozenset[str], blocks: Sequence[BlockShape]
) -> errors.NothingOffloaded:
    import difflib

    segments = sorted(
        {
            segment
            for block in blocks
            for param in block.params
            if _can_move(param)
            for segment in param.name.split(".")
            if not segment.isdigit()
        }
    )
    if not segments:
        return errors.NothingOffloaded(
            request=request,
            reason="every weight that it asks for is converted while it is loaded, and such weights cannot move",
            suggestion="a checkpoint that is stored in the dtype that it runs in",
        )
    asked = sorted(selector)
    words = (word.split(".")[-1] for word in asked)
    near = dict.fromkeys(near for word in words for near in difflib.get_close_matches(word, segments, n=2, cutoff=0.4))
    return errors.NothingOffloaded(
        request=f"{flag} {','.join(asked)}",
        reason="no parameter that can move has these words as whole dotted segments of its name",
        suggestion=f"{flag} with one of: {', '.join(near or segments)}",
    )


def _within_budget(shape: ModelShape, demand: Demand, made: Plan) -> Plan:
    if demand.memory_bytes is not None and made.memory.total_bytes > demand.memory_bytes:
        raise errors.BudgetTooSmall(
            memory_bytes=demand.memory_bytes,
            needed_bytes=align_up(made.memory.total_bytes, 2**20),
            baseline_bytes=demand.baseline_bytes,
            fixed_bytes=made.memory.resident_bytes + made.memory.draft_bytes,
            ring_bytes=made.memory.ring_bytes,
            kv_bytes=made.memory.kv_bytes,
            working_bytes=made.memory.staging_bytes + made.memory.working_bytes,
        )
    return made


# --- putting it together ------------------------------------------------------------------------------------------


def _assemble(
    shape: ModelShape,
    machine: Machine,
    demand: Demand,
    backend: Literal["resident", "prefetch", "uva"],
    cut: Cut,
    gathered: tuple[str, ...],
    slots: int,
    choices: list[Choice],
) -> Plan:
    slots = min(slots, len(cut))
    streaming = [block for block in shape.blocks if not block.gathered]
    stream_cut = {block.name: cut[block.name] for block in streaming if block.name in cut}
    slot = slot_bytes(streaming, stream_cut)
    tables = [block for block in shape.blocks if block.name in gathered]
    moved = moved_bytes(shape.blocks, cut)
    table_bytes = sum(block.nbytes for block in tables)
    # A ring with a slot for every block is filled once and never read again; of a table only rows are read.
    is_kept = 0 < len(cut) <= slots
    per_pass = 0 if is_kept else moved_bytes(streaming, stream_cut)
    below = _below(shape, machine, demand, cut, tables)
    from_disk = 0 if is_kept or below is None else below.disk_bytes
    memory = MemoryPlan(
        baseline_bytes=demand.baseline_bytes,
        resident_bytes=shape.weight_bytes - table_bytes - moved,
        ring_bytes=max(1, slots) * slot,  # without a ring: the mapped pages of the block that runs
        staging_bytes=0 if below is not None else demand.staging_bytes,
        kv_bytes=costs.kv_bytes(shape, demand),
        working_bytes=costs.working_bytes(shape, demand),
        draft_bytes=costs.draft_bytes(demand),
    )
    if backend == "resident" and not demand.has_accelerator:
        kept = costs.kept_bytes(shape, demand, memory.total_bytes)
        memory = dataclasses.replace(memory, working_bytes=memory.working_bytes + kept)
    reached = costs.bound(costs.decode_compute_s(shape, machine, demand), machine, per_pass, from_disk)
    made = Plan(
        backend=backend,
        choices=(),
        streamed=tuple((block.name, cut[block.name]) for block in shape.blocks if block.name in cut),
        gathered=gathered,
        slots=slots,
        slot_bytes=slot,
        offloaded_bytes=moved + table_bytes,
        memory=memory,
        bound=reached,
        prefill=costs.bound(costs.prefill_compute_s(shape, machine, demand), machine, per_pass, from_disk),
        overhead_s=costs.pass_s(shape, machine, demand, reached) - reached.seconds,
        batch=demand.batch,
        host=None if below is None else below.host,
        on_host=() if below is None else tuple(below.on_host.items()),
    )
    choices = [*choices, *reasons.explain(made, shape, demand)]
    if demand.speculate is not None:
        chosen, why = speculation(shape, machine, demand, made.bound)
        made = dataclasses.replace(made, speculation=chosen)
        choices.append(reasons.of_speculation(chosen, why))
    if demand.fast_rows:
        choices.append(reasons.of_fast_rows(shape, machine, demand))
    return dataclasses.replace(made, choices=tuple(choices))


def _below(
    shape: ModelShape, machine: Machine, demand: Demand, cut: Cut, tables: Sequence[BlockShape]
) -> Placement | None:
    """Where what leaves an accelerator goes; None without one, where it stays in the checkpoint."""
    assert demand.has_accelerator == (machine.accelerator is not None)
    return None if machine.accelerator is None else place(shape.blocks, cut, tables, demand)
