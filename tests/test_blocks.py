"""Ties are found by identity, stacks by their shape, and every kind of tensor is a view of bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.blocks import Block, Blocks, Weight, find_stacks, named_sites, tensor_view
from headrace.core import Segment, StoredTensor


class Inner(nn.Module):
    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(experts)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList([Inner() for _ in range(2)])
        self.layers = nn.ModuleList([Inner() for _ in range(3)])
        self.dropouts = nn.ModuleList([nn.Dropout() for _ in range(3)])
        self.single = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_stacks(model)]


def test_stacks_are_the_outermost_lists_of_modules_with_parameters() -> None:
    assert names(Model()) == ["tower", "layers"]


def test_lists_that_only_begin_with_the_same_name_are_stacks_too() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Inner(), Inner()])
    model.layers_more = nn.ModuleList([Inner(), Inner()])
    assert names(model) == ["layers", "layers_more"]


def test_a_single_layer_is_a_stack_and_no_layer_is_none() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    assert names(model) == ["layers"]
    assert names(nn.Linear(2, 2)) == []


def test_sites_are_found_by_identity_also_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    model.head.weight = model.layers[0].linear.weight
    model.layers[1].linear.weight = model.layers[0].linear.weight
    sites = named_sites(model)
    shared = sites[id(model.head.weight)]
    assert [site.name for site in shared] == ["layers.0.linear.weight", "layers.1.linear.weight", "head.weight"]
    assert len(sites) == len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    others = [found for found in sites.values() if found is not shared]
    assert all(len(found) == 1 for found in others)  # all have the address 0, and are not one weight


def test_a_module_listed_twice_has_one_site() -> None:
    model = nn.Module()
    model.one = nn.Linear(2, 2, bias=False)
    model.again = model.one
    assert [[site.name for site in found] for found in named_sites(model).values()] == [["one.weight"]]


def test_a_missing_bias_is_no_site() -> None:
    assert len(named_sites(nn.Linear(2, 2, bias=False))) == 1


def weight_of(model: nn.Module, name: str) -> Weight:
    meta = nn.Parameter(model.get_parameter(name).to("meta"), requires_grad=False)
    stored = StoredTensor(name, "F32", (2, 2), Segment("f", 0, 16))
    return Weight(tuple(named_sites(model)[id(model.get_parameter(name))]), meta, (stored,))


def test_a_weight_is_bound_at_all_its_sites_or_at_those_inside_of_a_module() -> None:
    model = Model()
    model.head.weight = model.layers[0].linear.weight
    weight = weight_of(model, "head.weight")
    assert weight.name == "layers.0.linear.weight"
    assert weight.nbytes == 16
    assert weight.movable
    assert not Weight(weight.sites, weight.meta, ()).movable
    new = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    weight.bind(new)
    assert model.layers[0].linear.weight is new
    assert model.head.weight is new


def test_blocks_list_every_weight_once_and_add_up() -> None:
    model = Model()
    linear, head = weight_of(model, "layers.0.linear.weight"), weight_of(model, "head.weight")
    block = Block("layers.0", model.layers[0], (linear,))
    blocks = Blocks((block,), (head,))
    assert block.nbytes == 16
    assert list(blocks.weights()) == [linear, head]


@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 3), (0,), (2, 1, 2)])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
)
def test_a_view_has_the_bytes_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    like = torch.empty(shape, dtype=dtype)
    nbytes = like.numel() * like.element_size()
    buffer = torch.randint(0, 2, (64 + nbytes + 64,), generator=generator, dtype=torch.uint8)
    view = tensor_view(buffer, 64, like.to("meta"))
    assert (view.dtype, view.shape, view.is_contiguous()) == (dtype, torch.Size(shape), True)
    assert bytes(view.reshape(-1).view(torch.uint8).tolist()) == bytes(buffer[64 : 64 + nbytes].tolist())
    if nbytes:
        assert view.data_ptr() == buffer.data_ptr() + 64  # a view, not a copy
