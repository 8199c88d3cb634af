"""One block's weights side by side in a slot, and what its module sees of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headrace.backends.packing import Packing
from headrace.blocks import Block, Site, Weight
from headrace.copying.slots import Slab
from headrace.core import Segment, StoredTensor
from headrace.errors import WeightChanged


class Packed:
    """A block of a matrix, a tied pair and a weight that another module sees too."""

    def __init__(self) -> None:
        self.module, self.other = nn.Module(), nn.Module()
        self.weights: list[Weight] = []
        offset = 100
        for name, shape, sites in [
            ("matrix", (3, 5), [(self.module, "matrix")]),
            ("pair", (7,), [(self.module, "left"), (self.module, "right")]),
            ("shared", (2,), [(self.module, "shared"), (self.other, "shared")]),
        ]:
            meta = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            stored = StoredTensor(name, "F32", shape, Segment("file", offset, meta.nbytes))
            weight = Weight(tuple(Site(*site, f"block.{site[1]}") for site in sites), meta, (stored,))
            weight.bind(meta)
            self.weights.append(weight)
            offset += meta.nbytes
        self.block = Block("block", self.module, tuple(self.weights))
        self.packing = Packing(self.block, self.weights, 4096)
        self.slab = Slab(self.packing.nbytes)
        self.parameters = self.packing.parameters(self.slab.bytes)

    def held(self) -> dict[str, Any]:
        return dict(self.module._parameters)


@pytest.fixture
def packed() -> Packed:
    return Packed()


def test_tensors_are_aligned_and_what_is_read_is_what_is_needed(packed: Packed) -> None:
    assert packed.packing.offsets == [0, 64, 128]
    assert packed.packing.nbytes == 4096
    assert sum(copy.nbytes for read in packed.packing.reads for copy in read.copies) == (15 + 7 + 2) * 4
    assert [parameter.data_ptr() - packed.slab.address for parameter in packed.parameters] == [0, 64, 128]


def test_bound_and_taken_back(packed: Packed) -> None:
    before = packed.held()
    packed.packing.bind(packed.parameters)
    held = packed.held()
    assert held["left"] is held["right"] is packed.parameters[1]
    assert held["matrix"].shape == (3, 5)
    assert packed.other.shared is packed.weights[2].meta  # another module's is not this block's to bind
    packed.packing.unbind(packed.parameters)
    assert all(packed.held()[name] is before[name] for name in before)


def test_what_the_user_has_put_in_is_left_alone(packed: Packed) -> None:
    mine = packed.module.left = nn.Parameter(torch.ones(7))
    del packed.module.matrix
    packed.packing.bind(packed.parameters)
    assert packed.module.left is mine
    assert packed.module.right is packed.parameters[1]
    assert "matrix" not in packed.held()
    during = packed.module.right = nn.Parameter(torch.ones(7))
    packed.packing.unbind(packed.parameters)
    assert packed.module.left is mine
    assert packed.module.right is during
    assert packed.module.shared is packed.weights[2].meta


def test_memory_that_is_filled_is_no_change(packed: Packed) -> None:
    packed.slab.bytes.fill_(1)
    packed.packing.check_unchanged(packed.parameters)
    assert packed.parameters[0].view(torch.int32).unique().tolist() == [0x01010101]


@pytest.mark.parametrize("write", [
    lambda p: p.zero_(), lambda p: p.data.zero_(), lambda p: p.detach()[1:].fill_(3), lambda p: p.view(-1).mul_(2),
])  # fmt: skip
@pytest.mark.parametrize(("index", "name"), [(0, "block.matrix"), (1, "block.left"), (2, "block.shared")])
def test_a_write_is_noticed_and_named(packed: Packed, index: int, name: str, write: Any) -> None:
    with torch.no_grad():
        write(packed.parameters[index])
    with pytest.raises(WeightChanged, match=rf"^{name} was changed in place"):
        packed.packing.check_unchanged(packed.parameters)
    packed.packing.check_unchanged(packed.packing.parameters(packed.slab.bytes))  # new views count anew


def test_other_data_is_refused_at_once(packed: Packed) -> None:
    with pytest.raises(WeightChanged, match=r"block\.matrix"):
        packed.parameters[0].data = torch.zeros(3, 5)


def test_made_in_inference_mode_their_versions_can_be_asked_for(packed: Packed) -> None:
    with torch.inference_mode():
        parameters = packed.packing.parameters(packed.slab.bytes)
    packed.packing.check_unchanged(parameters)
    assert not parameters[0].is_inference()
