"""The tensors of a model by name, shape and dtype, in the order in which modules declare them. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Matrices:
    """What a tensor consists of, for those who store matrices in fewer bits: `count` of `rows` x `columns`."""

    count: int
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter as the model holds it."""

    name: str
    shape: tuple[int, ...]
    matrices: Matrices | None = None
    """None for what is never quantized: norms, biases, tables, convolutions."""
    dtype: str = ""
    """torch's name; empty for the model's own."""
    pieces: tuple[int, ...] = ()
    """Where it is stored in another form than shape and dtype make: the bytes of each tensor that it is stored as."""
    bits: int = 0
    """Of each number, where the kernels of 8 and 4 bits read it; 0 if it is held in a dtype."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def bytes_in(self, dtype: str) -> int:
        """In a model of this dtype."""
        return sum(self.pieces) if self.pieces else self.numel * ELEMENT_BYTES[self.dtype or dtype]


@dataclass(slots=True)
class Outline:
    """A model's tensors, and which of them are looked up and which make logits. Tied ones are listed once."""

    table: str = ""
    """Name of the embedding module."""
    head: str = ""
    """Name of the head module; it has no tensor of its own if it is tied."""
    tied: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    """Persistent ones, that a checkpoint holds."""

    def add(self, name: str, *shape: int, matrices: Matrices | None = None, dtype: str = "") -> None:
        self.tensors.append(Tensor(name, shape, matrices, dtype))

    def buffer(self, name: str, *shape: int, dtype: str) -> None:
        self.buffers.append(Tensor(name, shape, dtype=dtype))

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", outputs, inputs, matrices=Matrices(1, outputs, inputs))
        if bias:
            self.add(f"{name}.bias", outputs)

    def norm(self, name: str, size: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", size)
        if bias:
            self.add(f"{name}.bias", size)

    def nbytes(self, dtype: str) -> int:
        """Of all parameters, in a model of this dtype; buffers are not counted."""
        return total_bytes(self.tensors, dtype)


def total_bytes(tensors: Iterable[Tensor], dtype: str) -> int:
    """In a model of this dtype."""
    return sum(tensor.bytes_in(dtype) for tensor in tensors)
