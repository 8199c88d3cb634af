"""The nouns that rooms share: frozen, no torch, no I/O.

Sizes end in `_bytes`, times in `_s`, rates in `_per_s`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Literal

DIRECT_ALIGNMENT = 4096
"""Direct I/O wants file offset, length and memory address at multiples of the logical block size; 4096 suits all."""

HUGE_PAGE_BYTES = 2 * 2**20
"""A direct read into memory of small pages takes twice as long (docs/log.md)."""

CHUNK_BYTES = 4 * 2**20
READER_THREADS = 4
"""How the disk is read: by so many threads, each in pieces of this size that it needs memory for."""

WIDE_LAYER = 2048
"""Hidden size of the layers that `headrace machine` measures the overhead of."""

FAST_DTYPE = "bfloat16"
"""torch's name of the dtype for which fast rows (`linears`) are."""

TENSOR_ALIGNMENT = 64
"""Tensors start at multiples of this in slots and residents alike: kernels pick their path by alignment, and another
path can give other last bits."""


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


class Tier(StrEnum):
    """Where a byte of weight lives."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes in one file of a checkpoint."""

    file: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def is_steady(self, sixteen_bits: bool) -> bool:
        """Whether products have the same bits wherever in memory it begins: 16 bits yes, float32 no (docs/log.md)."""
        return sixteen_bits and self.offset % 2 == 0

    def can_lie_as_stored(self, steady: bool) -> bool:
        """Whether it may have the place in its page that it has in the file, so that nothing has to be copied."""
        return steady or self.offset % TENSOR_ALIGNMENT == 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the checkpoint holds it: row-major bytes in one segment."""

    name: str
    dtype: str
    """safetensors' name of the dtype: "BF16", "F32", "I8" ..."""
    shape: tuple[int, ...]
    segment: Segment

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    @property
    def is_steady(self) -> bool:
        """`Segment.is_steady` of what is computed with as it is stored."""
        return self.segment.is_steady(self.dtype in ("BF16", "F16"))


@dataclass(frozen=True, slots=True)
class ParamShape:
    """One parameter of a block, as the planner sees it."""

    name: str
    nbytes: int
    movable: bool = True
    """False if it must stay in device memory: stored in another dtype than it runs in, or not stored at all."""
    used_share: float = 1.0
    """Part of its bytes that one token's pass reads: of stacked experts only those that the token chooses."""
    bits: int = 0
    """Of each number, for the kernels of 8 and 4 bits; 0 if it is held in a dtype."""


BlockKind = Literal["layer", "tower", "embedding", "head"]
"""A layer belongs to the main stack, to which group rules apply; a tower is a layer of any other stack."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The unit that moves, as the planner sees it: its parameters in declaration order."""

    name: str
    params: tuple[ParamShape, ...]
    kind: BlockKind = "layer"
    gathered: bool = False
    """True if a pass reads only a few rows of it (an embedding table that is not also the head)."""

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.params)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the planner needs to know of a model. Tied weights are counted once."""

    blocks: tuple[BlockShape, ...]
    """In the order in which a pass runs them."""
    fixed_bytes: int
    """Parameters outside of blocks and buffers: always resident."""
    kv_bytes_per_token: int
    """Of one sequence, over all layers that keep every token."""
    activation_bytes_per_token: int
    """Live at once in the widest layer, for one token of a prefill."""
    head_bytes: int
    """Of the head's weight, which torch copies in the prefill of more than one sequence ..."""
    head_always_copied: bool
    """... or, in float16, of any."""
    logits_bytes: int
    """Of one position of one sequence, with the copies that sampling makes."""
    kv_window_bytes_per_token: int = 0
    """Of one sequence, over the layers that keep only the last `kv_window_tokens`."""
    kv_window_tokens: int = 0
    element_bytes: int = 2
    """Of one number in the dtype that the model runs in."""
    dtype: str = ""
    """By torch's name; empty if it does not matter or is not known."""
    score_bytes: int = 0
    """Of one pair of positions over all heads, where attention keeps its scores; 0 where a fused kernel does not."""
    query_groups: int = 1
    """Query heads that look at the keys and values of one key-value head."""
    hidden_size: int = 0
    """Numbers that a layer hands to the next for one token; 0 if it does not matter or is not known."""
    copied_share: float = 0.0
    """Of the bytes that are read from disk: those that do not lie in memory as in the file, so they are copied once."""

    @property
    def weight_bytes(self) -> int:
        return self.fixed_bytes + sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two tiers with its measured rate."""

    source: Tier
    target: Tier
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device of its own, measured or by its data sheet."""

    name: str
    memory_bytes: int
    link: Link
    """From the host's memory."""
    memory_bytes_per_s: float
    operations_per_s: float
    """Of dense products in 16-bit floats."""
    source: str
    """Where these figures come from."""


@dataclass(frozen=True, slots=True)
class Products:
    """How fast a processor multiplies rows with weights of one dtype.

    By the number of rows, since kernels differ: float16 weights may go through the cores at 42 GB/s for one row and at
    9 GB/s for four (docs/log.md).
    """

    rates: tuple[tuple[int, float], ...]
    """Number of rows and weight bytes per second, measured; rows ascend from 1."""
    layer_overhead_s: float = 0.0
    """What a layer WIDE_LAYER numbers wide takes beside its products in this dtype; 0 if it was not measured."""
    attention_bytes_per_s: float = 0.0
    """Keys and values that the query heads of one token go through in a second; 0 if it was not measured."""

    def seconds(self, nbytes: float, rows: int) -> float:
        """For so many bytes of weights: between what was measured in proportion, beyond it as the rows are more."""
        for (low, rate), (high, next_rate) in itertools.pairwise(self.rates):
            if rows < high:
                part = (max(rows, low) - low) / (high - low)
                return nbytes * ((1 - part) / rate + part / next_rate)
        most, rate = self.rates[-1]
        return nbytes / rate * max(1.0, rows / most)


@dataclass(frozen=True, slots=True)
class Contention:
    """What is left of two rates while the disk is read and products run: both want memory and cores."""

    disk_share: float
    """Of what the disk reaches alone; above 0, at most 1."""
    compute_share: float
    """Of what products reach alone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has, measured."""

    memory_bytes: int
    """That this process could use now: the smallest of what is free and what its control group allows."""
    cores: int
    disk: Link
    compute_bytes_per_s: float
    """Weight bytes that a matrix-vector product gets through in a second, on the processor."""
    compute_operations_per_s: float = 0.0
    """Of a product of two matrices on the processor; 0 if it was not measured."""
    layer_overhead_s: float = 0.0
    """What running the smallest layer takes beside its weights: the interpreter, and starting kernels."""
    pass_overhead_s: float = 0.0
    """What a pass takes beside its layers: choosing the token, and the loop around it."""
    expert_overhead_s: float = 0.0
    """What a layer that routes tokens to experts takes more than one that does not."""
    contention: Contention | None = None
    """Measured; None where reading and computing do not hold each other up."""
    copy_bytes_per_s: float = 0.0
    """What one thread copies in a second while every core does; 0 if it was not measured."""
    products: Mapping[str, Products] = field(default_factory=dict)
    """Of the processor, by dtype (torch's name); the two rates above stand in for a dtype that is not here."""
    int8_bytes_per_s: float = 0.0
    int4_bytes_per_s: float = 0.0
    """The same as `compute_bytes_per_s`, of weights of 8 and of 4 bits; 0 if it was not measured."""
    fast_row_bytes_per_s: float = 0.0
    """The same of weights in bfloat16, by torch's own kernel for one row (`linears`) instead of its default."""
    accelerator: Accelerator | None = None
    """None: the processor is the device, and its memory holds the residents."""

    @property
    def link(self) -> Link:
        """The way of a weight that is not on the device: from the host if there is an accelerator, else from disk."""
        return self.disk if self.accelerator is None else self.accelerator.link

    def weight_bytes_per_s(self, bits: int = 0) -> float:
        """Weight bytes that decoding gets through on the device; `bits` as in `ParamShape`."""
        if self.accelerator is not None:
            return self.accelerator.memory_bytes_per_s
        return {8: self.int8_bytes_per_s, 4: self.int4_bytes_per_s}.get(bits) or self.compute_bytes_per_s

    def with_fast_rows(self, share: float) -> Machine:
        """The same where one row of this share of a bfloat16 model's bytes goes through torch's own kernel."""
        fast = self.fast_row_bytes_per_s
        if not fast or not share:
            return self
        kept = self.products.get(FAST_DTYPE)
        rest = kept.rates[0][1] if kept else self.compute_bytes_per_s
        rate = 1 / (share / fast + (1 - share) / rest)
        if kept is None:
            return replace(self, compute_bytes_per_s=rate)
        return replace(self, products={**self.products, FAST_DTYPE: replace(kept, rates=((1, rate), *kept.rates[1:]))})

    def layer_s(self, dtype: str, hidden_size: int) -> float:
        """What one layer takes beside its weights: in proportion to its width, beyond what the smallest one takes."""
        products = self.products.get(dtype)
        if products is None or not products.layer_overhead_s:
            return self.layer_overhead_s
        wider = max(0.0, products.layer_overhead_s - self.layer_overhead_s)
        return self.layer_overhead_s + wider * (hidden_size or WIDE_LAYER) / WIDE_LAYER

    @property
    def operations_per_s(self) -> float:
        """Of the device, multiplying matrices; 0 if unknown."""
        return self.compute_operations_per_s if self.accelerator is None else self.accelerator.operations_per_s


@dataclass(frozen=True, slots=True)
class Choice:
    """A name, a value and the reason, as shown to the user."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Bound:
    """The physical limit of one pass: max(compute time, bytes moved / link rate, bytes from disk / disk rate)."""

    compute_s: float
    moved_bytes: int
    """Over the link to the device."""
    link_bytes_per_s: float
    link: Literal["disk", "link"] = "disk"
    """What that link is: the disk, or with an accelerator the one between host and device."""
    disk_bytes: int = 0
    """Part of the moved bytes that the host does not hold either; 0 where the disk is the link itself."""
    disk_bytes_per_s: float = 0.0

    @property
    def moving_s(self) -> float:
        return self.moved_bytes / self.link_bytes_per_s if self.moved_bytes else 0.0

    @property
    def disk_s(self) -> float:
        return self.disk_bytes / self.disk_bytes_per_s if self.disk_bytes else 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.moving_s, self.disk_s)

    @property
    def limited_by(self) -> Literal["compute", "disk", "link"]:
        if self.disk_s > max(self.compute_s, self.moving_s):
            return "disk"
        return self.link if self.moving_s > self.compute_s else "compute"

    def to_json(self) -> dict[str, float | str]:
        """The fields and what follows from them."""
        return asdict(self) | {"seconds": self.seconds, "limited_by": self.limited_by}


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a pass can make several tokens: by verifying some that were drafted."""

    kind: Literal["off", "lookup", "draft"] = "off"
    """lookup: what followed the same words earlier in the text; draft: what a smaller model writes."""
    tokens: int = 0
    """Drafted for each pass, at most."""
    pass_tokens: float | None = None
    """Tokens that are computed while a pass's weights arrive: as many are drafted as pays. None: always all of them."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted bytes of device memory by category; they add up to `total_bytes`."""

    baseline_bytes: int
    resident_bytes: int
    ring_bytes: int
    staging_bytes: int
    kv_bytes: int
    working_bytes: int
    draft_bytes: int = 0
    """A draft model: its weights and its KV cache."""

    @property
    def total_bytes(self) -> int:
        return (
            self.baseline_bytes
            + self.draft_bytes
            + self.resident_bytes
            + self.ring_bytes
            + self.staging_bytes
            + self.kv_bytes
            + self.working_bytes
        )


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Predicted bytes of host memory beside an accelerator, by category; they add up to `total_bytes`."""

    baseline_bytes: int
    tier_bytes: int
    """Weights that live there."""
    ring_bytes: int
    """For what is read from disk on its way to the device."""
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.baseline_bytes + self.tier_bytes + self.ring_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """All choices, the tier of every parameter, predicted bytes and predicted speed with its bound."""

    backend: Literal["resident", "prefetch", "uva"]
    choices: tuple[Choice, ...]
    streamed: tuple[tuple[str, tuple[str, ...]], ...]
    """Per block that moves, in the order of a pass: its name and the names of the parameters that move."""
    gathered: tuple[str, ...]
    """Blocks whose rows are read from the file as they are looked up."""
    slots: int
    slot_bytes: int
    """Without the page by which each run of neighbours in a file may begin later, so that it is read right into place:
    that is in the margin."""
    offloaded_bytes: int
    memory: MemoryPlan
    """Of the device."""
    bound: Bound
    """Of a pass that decodes one token per sequence."""
    notes: tuple[str, ...] = field(default=())
    prefill: Bound | None = None
    """Of the pass over the prompt."""
    overhead_s: float = 0.0
    """What a pass takes beside its bound: the interpreter, starting kernels, and that computing and reading hold each
    other up."""
    batch: int = 1
    host: HostPlan | None = None
    """None without an accelerator."""
    on_host: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Of what is streamed: the parameters that live in host memory, by block; the others live on disk."""
    speculation: Speculation = Speculation()

    @property
    def seconds_per_pass(self) -> float:
        """Predicted, of decoding one token per sequence."""
        return self.bound.seconds + self.overhead_s

    @property
    def tokens_per_s(self) -> float:
        """Predicted, over all sequences."""
        return self.batch / self.seconds_per_pass

    @property
    def seconds_to_first_token(self) -> float:
        """Predicted, once everything is loaded."""
        return (self.prefill or self.bound).seconds + self.overhead_s
