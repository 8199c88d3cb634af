"""Parameters of a module that move together, wherever they come from. Uses torch; knows no files and no model library.

A weight is one storage: parameters that are tied (the same object under several names) are one weight with several
sites. Ties are found by identity, never by address: every meta tensor has the address 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from headrace.core import BlockKind, StoredTensor
from headrace.store import Placement


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


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter with everything needed to bring it from the checkpoint."""

    sites: tuple[Site, ...]
    meta: nn.Parameter
    """On the meta device: dtype and shape, no data. It is what a site holds while the weight is not there."""
    parts: tuple[StoredTensor, ...]
    """The stored tensors whose bytes, one after the other, are the weight's; empty if it must be converted."""

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def nbytes(self) -> int:
        return self.meta.numel() * self.meta.element_size()

    @property
    def movable(self) -> bool:
        return bool(self.parts)

    def bind(self, parameter: nn.Parameter, within: nn.Module | None = None) -> None:
        """Put `parameter` at every site, or only at those inside of `within`."""
        for site in self.sites if within is None else self.sites_within(within):
            site.bind(parameter)

    def placements(self, target_offset: int) -> Iterator[Placement]:
        """Where the bytes of each part go so that the whole weight lies at `target_offset`."""
        for part in self.parts:
            yield Placement(part.segment, target_offset)
            target_offset += part.nbytes

    def sites_within(self, module: nn.Module) -> list[Site]:
        inside = set(module.modules())
        return [site for site in self.sites if site.module in inside]


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


def tensor_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of `like`'s dtype and shape over the bytes of `buffer` (1-d uint8) from `offset` on."""
    nbytes = like.numel() * like.element_size()
    if like.dim() == 0 or nbytes == 0:
        return buffer[offset : offset + nbytes].view(like.dtype).reshape(like.shape)
    return buffer[offset : offset + nbytes].view(like.dtype).view(like.shape)
