"""Weights of a module in memory: what is tied, what stays, what is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_modules import Recurrent, Stack, random, randomized, same, snapshot, stack
from torch import nn

from headrace.live import Live, cut, lives


def module(**parameters: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, tensor in parameters.items():
        setattr(made, name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False))
    return made


def names(found: list[Live]) -> list[list[list[str]]]:
    return [[[site.name for site in form.sites] for form in live.weight.forms] for live in found]


def moved_and_back(root: nn.Module) -> None:
    """Every weight that can is dropped, comes back from other memory, and looks as before."""
    before = snapshot(root)
    for live in lives(root):
        if live.bytes is not None:
            assert live.bytes.numel() == live.weight.nbytes == live.nbytes
            kept = live.bytes.clone()
            live.release()
            assert all(original.numel() == 0 for original in live.originals.values())
            assert all(p.is_meta for form in live.weight.forms for p in [form.meta])
            live.restore(kept)
    assert same(snapshot(root), before)


FLAT = random(64)

TIES: dict[str, tuple[Callable[[], nn.Module], list[list[list[str]]]]] = {
    "the same parameter twice": (lambda: _twice(), [[["a", "b"]]]),
    "two parameters of one storage": (lambda: module(a=FLAT, b=FLAT), [[["a", "b"]]]),
    "a transpose": (lambda: module(a=FLAT.view(8, 8), b=FLAT.view(8, 8).T), [[["a"], ["b"]]]),
    "slices that do not overlap": (lambda: module(a=FLAT[:16], b=FLAT[16:]), [[["a"]], [["b"]]]),
    "slices that overlap": (lambda: module(a=FLAT[8:24], b=FLAT[16:], c=FLAT[:4]), [[["a"], ["b"]], [["c"]]]),
    "a chain of overlaps": (lambda: module(a=FLAT[:20], c=FLAT[40:], b=FLAT[16:48]), [[["a"], ["c"], ["b"]]]),
    "one inside of the other": (lambda: module(a=FLAT, b=FLAT[3:5], c=FLAT[60:]), [[["a"], ["b"], ["c"]]]),
    "another dtype": (lambda: module(a=FLAT, b=FLAT.view(torch.int32), c=FLAT.view(torch.uint8)[4:8]),
                      [[["a"], ["b"], ["c"]]]),
    "columns in turn": (lambda: module(a=FLAT.view(8, 8)[:, ::2], b=FLAT.view(8, 8)[:, 1::2]), [[["a"], ["b"]]]),
    "nothing in common": (lambda: module(a=random(3), b=random(3)), [[["a"]], [["b"]]]),
    "of no size": (lambda: module(a=FLAT[:0], b=FLAT, c=FLAT[10:10], d=torch.empty(0, 3)),
                   [[["a"]], [["b"]], [["c"]], [["d"]]]),
}  # fmt: skip


def _twice() -> nn.Module:
    made = module(a=random(4))
    made.b = made.a
    return made


@pytest.mark.parametrize("kind", TIES)
def test_ties(kind: str) -> None:
    make, expected = TIES[kind]
    root = make()
    assert names(lives(root)) == expected
    moved_and_back(root)


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 3), (2, 5), (1, 1)])
def test_dtypes_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    root = module(a=torch.ones(shape).to(dtype), b=torch.zeros(shape).to(dtype))
    assert all(live.movable for live in lives(root))
    moved_and_back(root)


@pytest.mark.parametrize("seen", [
    lambda t: t.T, lambda t: t[:, ::2], lambda t: t[1:2].expand(5, 8), lambda t: t[3], lambda t: t[3, 5],
    lambda t: t.as_strided((3, 3), (8, 1), 9), lambda t: t.view(2, 4, 2, 4).permute(0, 2, 1, 3),
])  # fmt: skip
def test_strides(seen: Any) -> None:
    root = module(a=seen(FLAT.view(8, 8)))
    assert names(lives(root)) == [[["a"]]]
    moved_and_back(root)


def test_a_form_says_whether_its_own_parameter_needs_a_gradient() -> None:
    root = module(a=nn.Parameter(FLAT), b=nn.Parameter(FLAT, requires_grad=False))
    assert [form.meta.requires_grad for form in lives(root)[0].weight.forms] == [True, False]
    moved_and_back(root)


class Subclass(nn.Parameter):
    """A parameter that knows more than its bytes."""


@pytest.mark.parametrize("parameter", [
    lambda: Subclass(random(3), requires_grad=False),
    lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64).conj(), requires_grad=False),
    lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64).conj().imag, requires_grad=False),
    lambda: nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False),
])  # fmt: skip
def test_what_is_more_than_its_bytes_stays(parameter: Any) -> None:
    root = module(a=parameter(), b=random(3))
    a, b = sorted(lives(root), key=lambda live: live.weight.name)
    assert not a.movable
    assert b.movable
    assert a.nbytes > 0


def test_a_sparse_weight_is_counted_as_it_is_stored() -> None:
    (live,) = lives(module(a=torch.eye(100).to_sparse()))
    assert live.nbytes == 100 * 4 + 2 * 100 * 8


@pytest.mark.parametrize("look", [
    lambda root: root.register_buffer("view", root.a.data[1:]),
    lambda root: setattr(root, "view", root.a.data),
    lambda root: setattr(root, "views", [root.a]),
    lambda root: setattr(root, "by_name", {"a": root.a.data}),
])  # fmt: skip
def test_what_a_buffer_or_an_attribute_looks_at_stays(look: Any) -> None:
    root = module(a=random(8), b=random(8))
    look(root)
    assert {live.weight.name: live.movable for live in lives(root)} == {"a": False, "b": True}


def test_an_lstm_stays_since_it_keeps_a_list_of_its_weights() -> None:
    found = lives(Recurrent())
    assert {live.weight.name.split(".")[0]: live.movable for live in found} == {"layers": False, "more": True}


def test_memory_of_two_storages_stays() -> None:
    """Two tensors over one piece of foreign memory: neither storage holds what both see."""
    memory = bytearray(64)
    one, other = torch.frombuffer(memory, dtype=torch.uint8), torch.frombuffer(memory, dtype=torch.uint8, offset=32)
    root = module(a=one, b=other)
    assert [live.movable for live in lives(root)] == [False, False]


def test_what_the_user_has_put_in_is_left_alone() -> None:
    root = stack()
    found = lives(root)
    data = {id(live): live.bytes.clone() for live in found if live.bytes is not None}
    for live in found:
        live.release()
    mine = nn.Parameter(random(3))
    root.layers[0].up.weight = mine
    del root.layers[1].up.bias
    root.layers[2].up.bias = None
    for live in found:
        live.restore(data[id(live)])
    assert root.layers[0].up.weight is mine
    assert not hasattr(root.layers[1].up, "bias")
    assert root.layers[2].up.bias is None
    assert same(root.layers[3].state_dict(), stack().layers[3].state_dict())


def test_lent_for_a_while() -> None:
    root, expected = stack(), stack().state_dict()
    found = lives(root)
    data = [live.bytes.clone() for live in found if live.bytes is not None]
    for live in found:
        live.release()
    mine = root.norm.bias = nn.Parameter(random(32))
    with pytest.raises(ValueError, match="inside"), pytest.MonkeyPatch.context():
        _lend_and_fail(found, data, root, {**expected, "norm.bias": mine.data})
    assert all(p.is_meta for p in root.parameters() if p is not mine)


def _lend_and_fail(found: list[Live], data: list[torch.Tensor], root: nn.Module, expected: Any) -> None:
    import contextlib

    with contextlib.ExitStack() as lent:
        for live, memory in zip(found, data, strict=True):
            lent.enter_context(live.lent(memory))
        assert same(dict(root.state_dict()), dict(expected))
        raise ValueError("inside")


# --- blocks -------------------------------------------------------------------------------------------------------


def blocks(root: nn.Module, named: Any = None) -> dict[str, str]:
    return {block.name: block.kind for block in cut(root, named, lives(root))}


def test_weights_of_two_blocks_stay() -> None:
    root = Stack(3)
    root.layers[2].up = root.layers[0].up
    root.layers[1].down.weight = root.layers[0].down.weight
    owned = {block.name: [weight.name for weight in block.weights] for block in cut(root, None, lives(root))}
    assert owned["layers.0"] == ["layers.0.down.bias"]
    assert owned["layers.1"] == ["layers.1.up.weight", "layers.1.up.bias", "layers.1.down.bias"]
    assert owned["layers.2"] == ["layers.2.down.weight", "layers.2.down.bias"]


def test_a_block_of_which_nothing_can_move_counts_all_the_same() -> None:
    """Else the group rules would count other layers than the module has."""
    root = Stack(3)
    root.up, root.down = root.layers[0].up, root.layers[0].down
    owned = {block.name: len(block.weights) for block in cut(root, "layers", lives(root))}
    assert owned == {"layers.0": 0, "layers.1": 4, "layers.2": 4}


def test_a_module_in_two_places_belongs_to_neither_but_a_repeated_block_is_one() -> None:
    root = Stack(3)
    root.layers[2] = root.layers[0]
    root.norm = root.layers[1].up
    owned = {block.name: [weight.name for weight in block.weights] for block in cut(root, None, lives(root))}
    assert [name.removeprefix("layers.0.") for name in owned["layers.0"]] == [
        "up.weight", "up.bias", "down.weight", "down.bias"
    ]  # fmt: skip
    assert owned == {"layers.0": owned["layers.0"], "layers.1": ["layers.1.down.weight", "layers.1.down.bias"]}


def test_small_lists_beside_a_stack_are_towers() -> None:
    root = Stack(8)
    root.heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    assert blocks(root) == {**{f"layers.{i}": "layer" for i in range(8)}, **{f"heads.{i}": "tower" for i in range(3)}}


def test_a_list_of_one_is_a_list_if_there_is_no_other() -> None:
    assert blocks(Stack(1)) == {"layers.0": "layer"}
    assert blocks(nn.Sequential(Stack(1), nn.Tanh())) == {"0": "layer"}


def test_a_backbone_and_a_head_in_a_row_are_cut_within_the_backbone() -> None:
    assert list(blocks(nn.Sequential(Stack(3), nn.Tanh(), nn.Linear(4, 4)))) == [
        "0.layers.0",
        "0.layers.1",
        "0.layers.2",
    ]
    assert list(blocks(nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(4, 4)))) == ["0", "2"]


def test_containers_are_opened_until_something_can_be_called() -> None:
    inner = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
    root = nn.Module()
    root.stack = nn.ModuleList([inner, nn.ModuleList([nn.Linear(4, 4)])])
    assert list(blocks(root)) == ["stack.0.one", "stack.0.two", "stack.1.0"]
    assert list(blocks(root, "stack")) == ["stack.0.one", "stack.0.two", "stack.1.0"]
    assert list(blocks(root, ["stack.0"])) == ["stack.0.one", "stack.0.two"]
    assert list(blocks(root, "stack.0.two")) == ["stack.0.two.0"]


def test_names_are_those_of_the_module() -> None:
    from collections import OrderedDict

    row = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
    assert list(blocks(row)) == ["first", "second"]


def test_everything_is_randomized() -> None:
    """What these tests compare would else be zeros."""
    assert all(bool((p != 0).all()) for p in randomized(Stack()).parameters())
