"""The choices of a plan in words, each with its reason. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core import FAST_DTYPE, Bound, Choice, Machine, ModelShape, Plan, Speculation
from headrace.planner import costs
from headrace.planner.costs import Demand
from headrace.units import format_bytes, format_rate, format_seconds


def explain(made: Plan, shape: ModelShape, demand: Demand) -> list[Choice]:
    """The rows that every plan has, whatever chose it."""
    return [
        *_memory(made, demand),
        *_tiers(made, shape),
        *_ring(made),
        *_speed(made, demand),
    ]


def _memory(made: Plan, demand: Demand) -> Iterator[Choice]:
    memory = made.memory
    if demand.memory_bytes is not None:
        rest = memory.total_bytes - memory.resident_bytes - memory.ring_bytes
        parts = [
            f"libraries {format_bytes(memory.baseline_bytes)}",
            f"KV cache for {demand.context_tokens} tokens {format_bytes(memory.kv_bytes)}",
            *([f"staging {format_bytes(memory.staging_bytes)}"] if memory.staging_bytes else []),
            f"working memory {format_bytes(memory.working_bytes)}",
            *([f"draft model {format_bytes(memory.draft_bytes)}"] if memory.draft_bytes else []),
        ]
        yield Choice(
            "memory",
            format_bytes(demand.memory_bytes),
            f"{format_bytes(memory.total_bytes)} planned; {format_bytes(rest)} of it is not weights: "
            + ", ".join(parts),
        )
    if made.host is not None and demand.host_bytes is not None:
        host = made.host
        yield Choice(
            "host memory",
            format_bytes(demand.host_bytes),
            f"{format_bytes(host.total_bytes)} planned: weights {format_bytes(host.tier_bytes)}, libraries "
            f"{format_bytes(host.baseline_bytes)}, staging {format_bytes(host.staging_bytes)}, ring "
            f"{format_bytes(host.ring_bytes)}",
        )


def _tiers(made: Plan, shape: ModelShape) -> Iterator[Choice]:
    moves = bool(made.streamed or made.gathered)
    yield Choice(
        "resident",
        format_bytes(made.memory.resident_bytes),
        "a pass needs all of it, so what fits is never given up" if moves else "nothing has to move",
    )
    if made.gathered:
        size = sum(block.nbytes for block in shape.blocks if block.name in made.gathered)
        yield Choice("looked up", format_bytes(size), f"{', '.join(made.gathered)}: a token reads one row of it")
    if made.streamed:
        names = {name for _, params in made.streamed for name in params}
        moved = sum(param.nbytes for block in shape.blocks for param in block.params if param.name in names)
        yield Choice(
            "offloaded",
            format_bytes(moved),
            f"out of {len(made.streamed)} blocks, at most {format_bytes(made.slot_bytes or moved)} of each, "
            "spread over the pass",
        )
    if made.host is not None and made.bound.disk_bytes:
        yield Choice(
            "on disk",
            format_bytes(made.bound.disk_bytes),
            "the host's budget does not hold it: it is read from disk on every pass",
        )


def _ring(made: Plan) -> Iterator[Choice]:
    if made.slots:
        ahead = "one block runs while the next is read"
        if made.slots >= len(made.streamed):
            ahead = "every block has its own slot"
        yield Choice("ring", f"{made.slots} x {format_bytes(made.slot_bytes)}", ahead)


def _speed(made: Plan, demand: Demand) -> Iterator[Choice]:
    bound = made.bound
    each = "a pass makes one token" if made.batch == 1 else f"a pass makes {made.batch} tokens"
    yield Choice("bound", f"{1 / bound.seconds:.3g} passes/s", f"{each}: {_limits(bound)}")
    if made.prefill is not None:
        tokens = demand.prefill_tokens * made.batch
        yield Choice(
            "first token",
            f"after {format_seconds(made.seconds_to_first_token)}",
            f"a prompt of {tokens} tokens is one pass: {_limits(made.prefill)}",
        )


def of_speculation(chosen: Speculation, why: str) -> Choice:
    """The row for drafts."""
    if not chosen.tokens:
        return Choice("speculation", chosen.kind, why)
    most = "" if chosen.pass_tokens is None else "up to "
    return Choice("speculation", f"{chosen.kind}, {most}{chosen.tokens} token{'s' if chosen.tokens > 1 else ''}", why)


def of_fast_rows(shape: ModelShape, machine: Machine, demand: Demand) -> Choice:
    """The row for decoding with torch's own kernel."""
    if shape.dtype != FAST_DTYPE:
        return Choice("fast", "no difference", f"it is for weights in {FAST_DTYPE}, and these are in {shape.dtype}")
    if any(param.bits for block in shape.blocks for param in block.params):
        return Choice("fast", "little difference", "weights of few bits have kernels of their own")
    share = costs.fast_share(shape, demand)
    which = "all weights" if share > 0.95 else f"{share:.0%} of the weights"
    why = f"torch's own kernel multiplies {which} where one token is decoded; last bits of the logits can differ"
    if not machine.fast_row_bytes_per_s:
        why += "; its rate is not known here before `headrace machine` has measured it"
    return Choice("fast", "on", why)


def _limits(bound: Bound) -> str:
    """What takes how long."""
    parts = [f"computing takes {format_seconds(bound.compute_s)}"]
    if bound.moved_bytes:
        where = "from disk" if bound.link == "disk" else "over the link"
        parts.insert(0, _taking(bound.moved_bytes, where, bound.link_bytes_per_s, bound.moving_s))
    if bound.disk_bytes:
        parts.insert(0, _taking(bound.disk_bytes, "from disk", bound.disk_bytes_per_s, bound.disk_s))
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts)}; the {'longer of the two' if len(parts) == 2 else 'longest'} counts"


def _taking(nbytes: int, where: str, rate: float, seconds: float) -> str:
    return f"{format_bytes(nbytes)} {where} at {format_rate(rate)} takes {format_seconds(seconds)}"
