"""What an operator does to its arguments: which it reads, which it writes. Knows no streams and no device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# In place, and yet what was there before makes no difference.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "set_", "resize_"}
# Of these only the shape counts, or where they lie.
_METADATA = {"set_", "resize_", "is_same_size", "is_pinned", "record_stream"}


@dataclass(frozen=True, slots=True)
class Access:
    """An operator's use of one tensor."""

    tensor: torch.Tensor
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with its arguments."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        return self.operator(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        return str(self.operator)

    @property
    def touches_no_data(self) -> bool:
        """A view, or one of those that look at the shape alone: nothing that a device would do."""
        return _traits(self.operator).touches_no_data

    @property
    def waits(self) -> bool:
        """Whether the host needs the result at once: `item`, `equal`, `nonzero`."""
        return _traits(self.operator).waits

    @property
    def consists_of_others(self) -> bool:
        """Whether it is written in terms of other operators; in inference mode torch does not take these apart."""
        return _traits(self.operator).consists_of_others

    def accesses(self) -> Iterator[Access]:
        traits = _traits(self.operator)
        for value, (reads, writes) in zip(self.args, traits.positional, strict=False):
            yield from (Access(tensor, reads, writes) for tensor in tensors_in(value))
        for name, value in self.kwargs.items():
            reads, writes = traits.by_name[name]
            yield from (Access(tensor, reads, writes) for tensor in tensors_in(value))


@dataclass(frozen=True, slots=True)
class _Traits:
    touches_no_data: bool
    waits: bool
    consists_of_others: bool
    positional: tuple[tuple[bool, bool], ...]
    by_name: Mapping[str, tuple[bool, bool]]


@functools.cache
def _traits(operator: Any) -> _Traits:
    schema = operator._schema
    name = schema.name.partition("::")[2]
    uses = {}
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = writes and (argument.kwarg_only or name in _OVERWRITES)
        uses[argument.name] = (not overwritten, writes)
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return _Traits(
        touches_no_data=is_view or name in _METADATA or name.startswith("new_") or name.endswith("_like"),
        waits=any(tag in operator.tags for tag in tags),
        consists_of_others=operator._can_decompose(),
        positional=tuple(uses.values()),
        by_name=uses,
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, which may be lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element; what strides leave out in between counts too."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    strides: Sequence[int] = tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
