"""What running a model costs beside its weights, and how long a pass takes at best. Pure; no torch, no choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.core import FAST_DTYPE, READER_THREADS, Bound, Contention, Machine, ModelShape, ParamShape

MARGIN_BYTES = 24 * 2**20
"""Kernels' scratch, allocator slack and code loaded on first use; the probes have loaded most of it (docs/log.md)."""

KEPT_BYTES = 32 * 2**20
"""Measured where everything is resident (docs/log.md)."""

EXPERT_BYTES, EXPERT_BYTES_PER_TOKEN, MOST_EXPERT_BYTES = 64 * 2**20, 2**17, 192 * 2**20
"""What a prefill through routed experts leaves behind on the processor: kernels for each number of rows that an expert
gets, and holes between pieces of the cache. Measured on one shape (docs/log.md)."""

MEMORY_SHARE = 0.9
"""Of what is free, when no budget is given."""

DEFAULT_CONTEXT = 2048
"""Tokens that memory is planned for, when nobody says."""


MOST_DRAFTED = 10
"""Tokens per pass; of more the last ones are hardly ever right."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the user wants to run, and what running costs before any weight is there."""

    memory_bytes: int | None
    """Of the device: without an accelerator for the whole process. None for no limit."""
    baseline_bytes: int
    """Interpreter and libraries, measured; on an accelerator what its context takes there."""
    staging_bytes: int
    context_tokens: int
    """Prompt and answer together."""
    prefill_tokens: int
    batch: int = 1
    margin_bytes: int = 0
    """For what nobody can count: allocator slack, kernels' scratch, code that is loaded on first use."""
    has_accelerator: bool = False
    """Then interpreter, libraries and staging are in the host's memory, and what follows is its budget."""
    host_bytes: int | None = None
    """None for no limit."""
    host_baseline_bytes: int = 0
    speculate: Literal["auto", "off", "lookup", "draft"] | None = None
    """None where it is not a question."""
    greedy: bool = True
    """Whether the likeliest token is taken each time."""
    cannot_speculate: str = ""
    """Why drafts cannot be verified with this model, if so."""
    draft: ModelShape | None = None
    """The smaller model that drafts: all of it is resident."""
    fast_rows: bool = False
    """Whether one row in bfloat16 goes through torch's own kernel (`linears`)."""
    fast_bytes: int | None = None
    """Of the matrices that this is for, if they are known; else all but those that a router chooses among."""

    @property
    def drafted_tokens(self) -> int:
        """That a pass may have to hold logits for."""
        return 0 if self.speculate in (None, "off") or self.cannot_speculate else MOST_DRAFTED


def layer_count(shape: ModelShape) -> int:
    """Layers of the main stack, at least one."""
    return max(1, sum(1 for block in shape.blocks if block.kind == "layer"))


def kv_bytes(shape: ModelShape, demand: Demand) -> int:
    """The cache for the asked length. It grows by concatenation, so one layer's exists twice for a moment.

    A layer that sees a window keeps it as a view of all that was prefilled, until the first token is decoded.
    """
    windowed = max(demand.prefill_tokens, min(demand.context_tokens, shape.kv_window_tokens))
    cache = shape.kv_bytes_per_token * demand.context_tokens
    cache += shape.kv_window_bytes_per_token * min(windowed, demand.context_tokens)
    cache *= demand.batch
    return cache + cache // layer_count(shape)


def working_bytes(shape: ModelShape, demand: Demand) -> int:
    """Activations of the prefill, logits, and the margin."""
    prefill = max(_activation_bytes(each, demand) for each in (shape, demand.draft) if each is not None)
    head = shape.head_bytes if demand.batch > 1 or shape.head_always_copied else 0
    experts = _expert_bytes(shape, demand.prefill_tokens * demand.batch)
    logits = shape.logits_bytes * (demand.batch + demand.drafted_tokens)
    return prefill + head + experts + logits + demand.margin_bytes


def _activation_bytes(shape: ModelShape, demand: Demand) -> int:
    """The larger of what is live in the MLP and in attention, where about a third as much is, beside the scores."""
    in_mlp = shape.activation_bytes_per_token * demand.prefill_tokens * demand.batch
    return max(in_mlp, in_mlp // 3 + _scores_bytes(shape, demand))


def _scores_bytes(shape: ModelShape, demand: Demand) -> int:
    """Of one layer in the prefill, where attention keeps its scores."""
    return shape.score_bytes * demand.prefill_tokens**2 * demand.batch


def draft_bytes(demand: Demand) -> int:
    """Of the smaller model that drafts: its weights, its cache, and the logits that it leaves with each draft."""
    if demand.draft is None:
        return 0
    alone = dataclasses.replace(demand, draft=None, batch=1)
    logits = demand.draft.logits_bytes * (1 + demand.drafted_tokens)
    return demand.draft.weight_bytes + kv_bytes(demand.draft, alone) + logits


def kept_bytes(shape: ModelShape, demand: Demand, total_bytes: int) -> int:
    """What the C library keeps of freed memory where memory is not scarce, and it is told not to give it back.

    Between the pieces of the cache also holes as large as one layer's scores, where attention keeps those.
    """
    kept = KEPT_BYTES + _scores_bytes(shape, demand)
    return 0 if demand.memory_bytes is None else max(0, min(kept, demand.memory_bytes - total_bytes))


def _expert_bytes(shape: ModelShape, tokens: int) -> int:
    if all(param.used_share == 1 for block in shape.blocks for param in block.params):
        return 0
    return min(EXPERT_BYTES + EXPERT_BYTES_PER_TOKEN * tokens, MOST_EXPERT_BYTES)


def overhead_bytes(shape: ModelShape, demand: Demand) -> int:
    """Everything on the device that is neither a resident weight nor the ring."""
    staging = 0 if demand.has_accelerator else demand.staging_bytes
    running = kv_bytes(shape, demand) + working_bytes(shape, demand)
    return demand.baseline_bytes + staging + running + draft_bytes(demand)


# --- time -----------------------------------------------------------------------------------------------------------


def _used(shape: ModelShape, tokens: int) -> Iterator[tuple[ParamShape, float]]:
    """Parameters that a pass over so many tokens computes with, and the bytes of each: no tables, chosen experts."""
    for block in shape.blocks:
        if not block.gathered:
            for param in block.params:
                yield param, param.nbytes * _reached(param.used_share, tokens)


def _weights_s(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """What all of them take to go through the cores once, each by the kernel for its bits."""
    moved_s = sum(nbytes / machine.weight_bytes_per_s(param.bits) for param, nbytes in _used(shape, tokens))
    return shape.fixed_bytes / machine.weight_bytes_per_s() + moved_s


def _reached(share: float, tokens: int) -> float:
    """Part of the experts that at least one of so many tokens chooses, if they choose independently."""
    return 1.0 if share >= 1 else 1 - (1 - share) ** tokens


def multiplied_numbers(shape: ModelShape) -> float:
    """Numbers that one token is multiplied with: what it costs to compute, at two operations each."""
    fixed = shape.fixed_bytes / shape.element_bytes
    return fixed + sum(nbytes * 8 / (param.bits or 8 * shape.element_bytes) for param, nbytes in _used(shape, 1))


def decode_compute_s(shape: ModelShape, machine: Machine, demand: Demand) -> float:
    """Of one pass that makes a token for each sequence: its weights and its cache go through the cores."""
    return _product_s(shape, machine, demand.batch) + _attending_to_cache_s(shape, machine, demand)


def _attending_to_cache_s(shape: ModelShape, machine: Machine, demand: Demand) -> float:
    """Of a token in the middle of an answer: the cache is copied to become longer, and every query looks at it."""
    tokens = (min(demand.prefill_tokens, demand.context_tokens) + demand.context_tokens) / 2
    windowed = shape.kv_window_bytes_per_token * min(tokens, shape.kv_window_tokens)
    cached = (shape.kv_bytes_per_token * tokens + windowed) * demand.batch
    products = None if machine.accelerator is not None else machine.products.get(shape.dtype)
    if products is None or not products.attention_bytes_per_s:
        return cached / machine.weight_bytes_per_s()
    copied_s = 2 * cached / machine.weight_bytes_per_s()
    return copied_s + cached * shape.query_groups / products.attention_bytes_per_s


def prefill_compute_s(shape: ModelShape, machine: Machine, demand: Demand) -> float:
    """Of the pass over the prompt."""
    return _product_s(shape, machine, demand.prefill_tokens * demand.batch) + _attending_s(shape, machine, demand)


def _product_s(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Of all weights with so many rows: of those that must be gone through, or of those that each row needs."""
    products = None if machine.accelerator is not None else machine.products.get(shape.dtype)
    if products is None:
        return max(_weights_s(shape, machine, tokens), _multiplying_s(shape, machine, tokens))
    all_rows, one_row = _plain_bytes(shape, tokens), _plain_bytes(shape, 1)
    plain_s = max(products.seconds(all_rows, 1), products.seconds(one_row, tokens))
    few_bits = [(param, nbytes) for param, nbytes in _used(shape, tokens) if param.bits]
    moved_s = sum(nbytes / machine.weight_bytes_per_s(param.bits) for param, nbytes in few_bits)
    share = sum(nbytes * 8 / param.bits for param, nbytes in few_bits) / max(1.0, multiplied_numbers(shape))
    return plain_s + max(moved_s, min(1.0, share) * _multiplying_s(shape, machine, tokens) if few_bits else 0.0)


def _plain_bytes(shape: ModelShape, tokens: int) -> float:
    """Of the weights that are held in a dtype."""
    return shape.fixed_bytes + sum(nbytes for param, nbytes in _used(shape, tokens) if not param.bits)


def fast_share(shape: ModelShape, demand: Demand) -> float:
    """Part of the bytes that a token is multiplied with for which fast rows are."""
    used = _plain_bytes(shape, 1)
    if not demand.fast_rows or shape.dtype != FAST_DTYPE or not used:
        return 0.0
    always = sum(nbytes for param, nbytes in _used(shape, 1) if not param.bits and param.used_share == 1)
    return min(1.0, (shape.fixed_bytes + always if demand.fast_bytes is None else demand.fast_bytes) / used)


def _multiplying_s(shape: ModelShape, machine: Machine, tokens: int) -> float:
    rate = machine.operations_per_s
    return 2 * multiplied_numbers(shape) * tokens / rate if rate > 0 else 0.0


def overhead_s(shape: ModelShape, machine: Machine) -> float:
    """What a pass takes beside its products: the interpreter, and starting kernels."""
    routed = sum(1 for block in shape.blocks if any(param.used_share < 1 for param in block.params))
    layers = machine.layer_s(shape.dtype, shape.hidden_size) * layer_count(shape)
    return machine.pass_overhead_s + layers + machine.expert_overhead_s * routed


def _attending_s(shape: ModelShape, machine: Machine, demand: Demand) -> float:
    """Every position of a prefill looks at those before it; a key-value head counts once, which is the least."""
    rate = machine.operations_per_s
    cached = (shape.kv_bytes_per_token + shape.kv_window_bytes_per_token) / shape.element_bytes
    return cached * demand.prefill_tokens**2 * demand.batch / rate if rate > 0 else 0.0


def pass_s(shape: ModelShape, machine: Machine, demand: Demand, reached: Bound) -> float:
    """What one pass is expected to take: longer than its bound, by all that is done beside the products."""
    working_s = reached.compute_s + overhead_s(shape, machine)
    if machine.accelerator is not None or not reached.moved_bytes:
        return max(working_s, reached.moving_s, reached.disk_s)
    # What is read to one place and belongs to another: a core that copies keeps the others waiting, and one reader.
    rate = machine.copy_bytes_per_s
    copying_s = reached.moved_bytes * shape.copied_share / rate if rate else 0.0
    reading_s = reached.moving_s + copying_s / READER_THREADS
    return _at_once_s(working_s + copying_s, reading_s, machine.contention)


def _at_once_s(working_s: float, reading_s: float, left: Contention | None) -> float:
    """Of two things that take so long alone and hold each other up; what is left of the longer then goes on alone."""
    if left is None or left.disk_share == left.compute_share == 1:
        return max(working_s, reading_s)  # exactly: more memory must not plan slower by a rounding
    worked_s, read_s = working_s / left.compute_share, reading_s / left.disk_share
    if worked_s < read_s:
        return worked_s + reading_s - left.disk_share * worked_s
    return read_s + working_s - left.compute_share * read_s


def bound(compute_s: float, machine: Machine, moved_bytes: int, disk_bytes: int) -> Bound:
    """The least that one pass takes: computing, the link to the device, and the disk all run at once."""
    link = machine.link
    if machine.accelerator is None:
        return Bound(compute_s, moved_bytes, link.bytes_per_s)
    return Bound(compute_s, moved_bytes, link.bytes_per_s, "link", disk_bytes, machine.disk.bytes_per_s)
