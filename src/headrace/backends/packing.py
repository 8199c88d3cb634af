"""How one block's weights lie side by side in a slot, and how its module gets to see them there."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import nn

from headrace import errors
from headrace.blocks import Block, Weight, lie_as_stored
from headrace.store import Read, coalesce, layout

_VERSION = operator.attrgetter("plain._version")


class Packing:
    """A layout for one block, the reads that fill it, and the sites it is bound to.

    A site that no longer holds what was put there was changed by the user, who is right: it is left alone.
    """

    def __init__(
        self,
        block: Block,
        weights: Sequence[Weight],
        chunk_bytes: int,
        in_host: Collection[Weight] = (),
        *,
        as_stored: bool = False,
    ) -> None:
        """`in_host`: weights that are not read from disk; they lie first.

        `as_stored`: all of them lie so that reads can go right into a slot that begins with a page.
        """
        self.block = block
        self.weights = weights = (*(w for w in weights if w in in_host), *(w for w in weights if w not in in_host))
        assert not (as_stored and in_host)
        if as_stored:
            self.offsets, self.nbytes = lie_as_stored(weights)
        else:
            self.offsets, self.nbytes = layout(weight.nbytes for weight in weights)
        placed = list(zip(self.weights, self.offsets, strict=True))
        on_disk = (offset for weight, offset in placed if weight not in in_host)
        self.disk_offset = 0 if as_stored else next(on_disk, self.nbytes)
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
        self.reads: tuple[Read, ...] = coalesce(placements, chunk_bytes, self.nbytes if as_stored else None)
        """Into memory for what follows `disk_offset`."""
        inside = set(block.module.modules())
        forms = [form for weight in weights for form in weight.forms]
        self._names = [form.sites[0].name for form in forms]
        self._places = [  # flat: binding is most of what a hook costs when it has nothing to do
            (site.module, site.attribute, form.meta, number)
            for number, form in enumerate(forms)
            for site in form.sites
            if site.module in inside
        ]

    def parameters(self, memory: torch.Tensor) -> list[nn.Parameter]:
        """One per form of each weight, views of `memory`: built once per slot and block, bound in microseconds."""
        placed = zip(self.weights, self.offsets, strict=True)
        return [parameter for weight, offset in placed for parameter in weight.parameters(memory, offset)]

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        for module, attribute, away, number in self._places:
            held = module._parameters
            if held.get(attribute) is away:
                held[attribute] = parameters[number]

    def unbind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take back what `bind` has put there."""
        for module, attribute, away, number in self._places:
            held = module._parameters
            if held.get(attribute) is parameters[number]:
                held[attribute] = away

    def check_unchanged(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises: WeightChanged, if one was written to in place."""
        versions = list(map(_VERSION, parameters))
        if any(versions):
            names = (name for name, version in zip(self._names, versions, strict=True) if version)
            raise errors.WeightChanged(name=next(names))
