"""How one block's weights lie side by side in a slot, and how its module gets to see them there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from headrace import errors
from headrace.blocks import Block, Site, Weight
from headrace.store import Read, coalesce, layout


class Packing:
    """A layout for one block, the reads that fill it, and the sites it is bound to.

    A site that no longer holds what was put there was changed by the user, who is right: it is left alone.
    """

    def __init__(
        self, block: Block, weights: Sequence[Weight], chunk_bytes: int, in_host: Collection[Weight] = ()
    ) -> None:
        """`in_host`: weights that are not read from disk; they lie first."""
        self.block = block
        self.weights = weights = (*(w for w in weights if w in in_host), *(w for w in weights if w not in in_host))
        self.offsets, self.nbytes = layout(weight.nbytes for weight in weights)
        placed = list(zip(self.weights, self.offsets, strict=True))
        self.disk_offset = next((offset for weight, offset in placed if weight not in in_host), self.nbytes)
        """Where the weights that are read from disk begin."""
        self.host_placements = [
            placement for weight, offset in placed if weight in in_host for placement in weight.placements(offset)
        ]
        """Where the others come from in the first place."""
        placements = [
            placement
            for weight, offset in placed
            if weight not in in_host
            for placement in weight.placements(offset - self.disk_offset)
        ]
        self.reads: tuple[Read, ...] = coalesce(placements, chunk_bytes)
        """Into memory for what follows `disk_offset`."""
        inside = set(block.module.modules())
        self._sites: list[list[tuple[Site, nn.Parameter]]] = [
            [(site, form.meta) for site in form.sites if site.module in inside]
            for weight in weights
            for form in weight.forms
        ]

    def parameters(self, memory: torch.Tensor) -> list[nn.Parameter]:
        """One per form of each weight, views of `memory`: built once per slot and block, bound in microseconds."""
        placed = zip(self.weights, self.offsets, strict=True)
        return [parameter for weight, offset in placed for parameter in weight.parameters(memory, offset)]

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        for sites, parameter in zip(self._sites, parameters, strict=True):
            for site, away in sites:
                if site.module._parameters.get(site.attribute) is away:
                    site.bind(parameter)

    def unbind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take back what `bind` has put there."""
        for sites, parameter in zip(self._sites, parameters, strict=True):
            for site, away in sites:
                if site.module._parameters.get(site.attribute) is parameter:
                    site.bind(away)

    def check_unchanged(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises: WeightChanged, if one was written to in place."""
        for sites, parameter in zip(self._sites, parameters, strict=True):
            if parameter._version:
                raise errors.WeightChanged(name=sites[0][0].name)
