"""What a module with weights elsewhere answers when it is treated as if they were here."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from headrace.backends.guard import Away, guard, is_guarded, put_away
from headrace.blocks import Site, Weight
from headrace.errors import OffloadedWeightsError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(3, 3)
        self.there = nn.Linear(3, 3, device="meta")

    @property
    def device(self) -> torch.device:
        return self.there.weight.device


@pytest.fixture
def guarded() -> Model:
    model = Model().requires_grad_(False)
    weights = []
    for name in ("weight", "bias"):
        meta = getattr(model.there, name)
        weights.append(Weight((Site(model.there, name, f"there.{name}"),), meta, ()))
    put_away(weights, torch.device("cpu"))
    guard(model)
    return model


@pytest.mark.parametrize("act", [
    lambda m: m.state_dict(), lambda m: m.load_state_dict({}), lambda m: m.save_pretrained("nowhere"),
    copy.deepcopy, copy.copy, pickle.dumps, lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.float16),
    lambda m: m.to("meta"), lambda m: m.to("cuda"), lambda m: m.to_empty(device="cpu"), lambda m: m.share_memory(),
    lambda m: m.to(memory_format=torch.channels_last),
])  # fmt: skip
def test_what_needs_all_weights_is_refused(guarded: Model, act: Any) -> None:
    before = dict(guarded.named_parameters())
    with pytest.raises(
        OffloadedWeightsError, match=r"the data of there\.weight, there\.bias is offloaded .*\(2 in all"
    ):
        act(guarded)
    assert all(parameter is before[name] for name, parameter in guarded.named_parameters())


@pytest.mark.parametrize("act", [
    lambda p: p + 1, lambda p: p @ p, lambda p: torch.nn.functional.linear(torch.ones(3), p), lambda p: p.clone(),
    lambda p: p.cpu(), lambda p: p.float(), lambda p: p.copy_(p), lambda p: p.data.zero_(), lambda p: p.item(),
    lambda p: p.untyped_storage(), lambda p: p.data_ptr(), lambda p: p.detach(), lambda p: p[0], lambda p: p == p,
    lambda p: bool(p.any()), lambda p: p.to(torch.float64), lambda p: p.to("meta"), lambda p: p.to(p.dtype, copy=True),
    lambda p: p.tolist(), lambda p: p.numpy(), lambda p: p.T, lambda p: list(p), copy.deepcopy, pickle.dumps,
    lambda p: setattr(p, "data", torch.ones(3, 3)), lambda p: nn.init.zeros_(p), lambda p: p.requires_grad_().sum(),
])  # fmt: skip
def test_a_weight_that_is_elsewhere_is_not_computed_with(guarded: Model, act: Any) -> None:
    with pytest.raises(OffloadedWeightsError, match=r"there\.weight"):
        act(guarded.there.weight)


@pytest.mark.parametrize("act", [
    lambda m: m.state_dict(), lambda m: m.half(), lambda m: m.load_state_dict(nn.Linear(3, 3).state_dict()),
    copy.deepcopy, pickle.dumps, lambda m: m(torch.ones(3)), lambda m: m.share_memory(),
])  # fmt: skip
def test_parts_of_it_refuse_for_themselves(guarded: Model, act: Any) -> None:
    with pytest.raises(OffloadedWeightsError, match=r"there\.weight"):
        act(guarded.there)
    act(guarded.here)


def test_what_a_weight_says_of_itself(guarded: Model) -> None:
    away, plain = guarded.there.weight, nn.Linear(3, 3).weight
    assert isinstance(away, Away)
    assert isinstance(away, nn.Parameter)
    for ask in ("shape", "dtype", "device", "ndim", "nbytes", "itemsize", "layout", "is_leaf", "is_cuda", "is_sparse"):
        assert getattr(away, ask) == getattr(plain, ask), ask
    for ask in ("numel", "dim", "size", "stride", "element_size", "is_contiguous", "is_floating_point", "__len__"):
        assert getattr(away, ask)() == getattr(plain, ask)(), ask
    assert away.grad is None
    assert len({away, away}) == 1
    assert "meta" in repr(away)


def test_what_changes_nothing_is_allowed(guarded: Model) -> None:
    assert guarded.to("cpu") is guarded
    assert guarded.to(torch.device("cpu"), torch.float32) is guarded
    assert guarded.to(torch.float32) is guarded
    assert guarded.there.to("cpu", torch.float32) is guarded.there
    assert guarded.eval() is guarded
    assert guarded.requires_grad_(False) is guarded


def test_a_dtype_that_only_some_have_is_a_change(guarded: Model) -> None:
    guarded.here.half()
    with pytest.raises(OffloadedWeightsError):
        guarded.to(torch.float32)


def test_it_looks_as_before(guarded: Model) -> None:
    assert guarded.device == torch.device("cpu")
    assert isinstance(guarded, Model)
    assert type(guarded).__name__ == "Model"
    assert type(guarded).__qualname__ == "Model"
    assert type(guarded).__module__ == Model.__module__
    assert Model().device.type == "meta"  # the class itself is left alone


def test_once_nothing_is_elsewhere_nothing_is_refused(guarded: Model) -> None:
    guarded.load_state_dict(_state(), assign=True)
    assert guarded.state_dict().keys() == _state().keys()
    assert guarded.half().there.weight.dtype == torch.float16
    assert guarded.to(torch.float64).here.weight.dtype == torch.float64


def _state() -> dict[str, torch.Tensor]:
    return {name: torch.ones(parameter.shape) for name, parameter in Model().named_parameters()}


def test_undone_it_is_as_before() -> None:
    model = Model()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    put_away([Weight((Site(model.there, "weight", "there.weight"),), model.there.weight, ())], torch.device("cpu"))
    undo = guard(model)
    assert is_guarded(model)
    assert is_guarded(model.there)
    assert not is_guarded(model.here)
    undo()
    undo()
    assert type(model) is Model
    assert not model.there._state_dict_pre_hooks
    assert not model.there._load_state_dict_pre_hooks
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
