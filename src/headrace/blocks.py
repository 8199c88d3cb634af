"""Parameters of a module that move together, wherever they come from. Uses torch; knows no files and no model library.

A weight is one storage: parameters that are tied (the same object under several names) are one weight with several
sites. Ties are found by identity, never by address: every meta tensor has the address 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headrace.core import BlockKind, StoredTensor
from headrace.errors import WeightChanged
from headrace.store import Placement, layout_as_stored


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place where a weight is used: an attribute of a module."""

    module: nn.Module
    attribute: str
    name: str
    """Dotted name from the model's root."""

    def bind(self, parameter: nn.Parameter) -> None:
        """Put `parameter` here. The module's dictionary is written directly: assignment would cost ten times more."""
        self.module._parameters[self.attribute] = parameter


class Lent(nn.Parameter):
    """A parameter over memory that holds something else afterwards. Whatever is written to it counts in its version."""

    weight_name: str
    plain: torch.Tensor
    """The same memory with the same version counter, which torch tells twice as fast of a plain tensor."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()  # torch's own `data` has a version of its own

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise WeightChanged(name=self.weight_name)


def _lend(data: torch.Tensor, name: str) -> Lent:
    lent = Lent(data, requires_grad=False)
    lent.weight_name, lent.plain = name, data
    return lent


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One way in which sites see the bytes of a weight: a dtype, a shape, strides, a place."""

    sites: tuple[Site, ...]
    meta: nn.Parameter
    """On the meta device: no data. It is what the sites hold while the weight is not there."""
    offset: int = 0
    """In bytes, from where the weight begins."""

    @property
    def end(self) -> int:
        """The byte after the last one that is seen."""
        return self.offset + span_bytes(self.meta)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter with everything needed to bring it from the checkpoint."""

    sites: tuple[Site, ...]
    meta: nn.Parameter
    """On the meta device: dtype and shape, no data. It is what a site holds while the weight is not there."""
    parts: tuple[StoredTensor, ...]
    """The stored tensors whose bytes, one after the other, are the weight's; empty if it must be converted."""
    aliases: tuple[Form, ...] = ()
    """Parameters that lie in the same memory but are seen otherwise: a slice, a transpose, another dtype."""
    offset: int = 0
    """Of the first form in the weight's bytes; not 0 only where an alias begins before it."""

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def forms(self) -> tuple[Form, ...]:
        return (Form(self.sites, self.meta, self.offset), *self.aliases)

    @property
    def nbytes(self) -> int:
        return max(form.end for form in self.forms)

    @property
    def movable(self) -> bool:
        return bool(self.parts)

    def bind(self, parameter: nn.Parameter) -> None:
        """Put `parameter` at every site."""
        for site in self.sites:
            site.bind(parameter)

    def parameters(self, memory: torch.Tensor, offset: int) -> list[nn.Parameter]:
        """One parameter per form, views of `memory` (1-d uint8) in which the weight lies at `offset`.

        They do not share their version counter with `memory`: what is copied there is not seen as a change.
        """
        with torch.inference_mode(False):  # else their versions could not be asked for
            return [
                _lend(tensor_view(memory, offset + form.offset, form.meta).data, form.sites[0].name)
                for form in self.forms
            ]

    def placements(self, target_offset: int) -> Iterator[Placement]:
        """Where the bytes of each part go so that the whole weight lies at `target_offset`."""
        for part in self.parts:
            yield Placement(part.segment, target_offset)
            target_offset += part.nbytes


def lie_as_stored(weights: Sequence[Weight]) -> tuple[list[int], int]:
    """Offsets of `weights` in one buffer, and its size, such that most can be read right into place."""
    segments = [[part.segment for part in weight.parts] for weight in weights]
    return layout_as_stored(segments, [_is_steady(weight) for weight in weights])


def _is_steady(weight: Weight) -> bool:
    sixteen = all(form.meta.dtype in (torch.bfloat16, torch.float16) for form in weight.forms)
    return all(part.segment.is_steady(sixteen) for part in weight.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The unit that moves: usually one decoder layer."""

    name: str
    module: nn.Module
    weights: tuple[Weight, ...]
    kind: BlockKind = "layer"
    table: nn.Module | None = None
    """For an embedding table, and for a head that shares its weight with one: the module that looks rows up."""

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A model cut into what may move and what stays."""

    moving: tuple[Block, ...]
    """In the order in which a pass runs them."""
    fixed: tuple[Weight, ...]

    def weights(self) -> Iterator[Weight]:
        for block in self.moving:
            yield from block.weights
        yield from self.fixed


def find_stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The outermost lists of at least two modules with parameters: decoder stacks, towers. In the model's order."""
    stacks: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer, _ in stacks)
        if not isinstance(module, nn.ModuleList) or inside or len(module) < 2:
            continue
        if all(any(True for _ in child.parameters()) for child in module):
            stacks.append((name, module))
    if not stacks:  # a model with a single layer is still a stack of one
        stacks = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 1][:1]
    return stacks


def named_sites(model: nn.Module) -> dict[int, list[Site]]:
    """By identity of the parameter, every site that holds it."""
    sites: dict[int, list[Site]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                sites.setdefault(id(parameter), []).append(Site(module, attribute, name))
    return sites


def span_bytes(tensor: torch.Tensor) -> int:
    """From the first byte of `tensor` to its last; more than its elements take if it skips some."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def tensor_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of `like`'s dtype, shape and strides over the bytes of `buffer` (1-d uint8) from `offset` on."""
    flat = buffer[offset : offset + span_bytes(like)].view(like.dtype)
    return flat.view(like.shape) if like.is_contiguous() else flat.as_strided(like.shape, like.stride())
