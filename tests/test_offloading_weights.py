"""Weights of an offloaded module: those that are not there are refused, those that the user changes are seen."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_modules import WIDTH, Layer, Stack, kinds, random, randomized, same, stack, twin
from tiny_offloads import ALL, MAPPED, X, groups, proves
from torch import nn

from headrace.config import OffloadConfig
from headrace.errors import (
    OffloadedWeightsError,
    WeightChanged,
)
from headrace.offloading import offload

pytestmark = pytest.mark.usefixtures("without_gradients")


# --- what needs weights that are elsewhere ------------------------------------------------------------------------

ACTS: dict[str, Callable[[Any], Any]] = {
    "state_dict()": lambda m: m.state_dict(),
    "deepcopy()": copy.deepcopy,
    "pickling": pickle.dumps,
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "half()": lambda m: m.half(),
    "to(dtype)": lambda m: m.to(torch.bfloat16),
    "to(device)": lambda m: m.to("meta"),
    "load_state_dict()": lambda m: m.load_state_dict(twin_state(m)),
    "share_memory()": lambda m: m.share_memory(),
    "to_empty()": lambda m: m.to_empty(device="cpu"),
}


def twin_state(module: nn.Module) -> dict[str, torch.Tensor]:
    names = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    return {name: torch.zeros(shape) for name, shape in names.items()}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("part", ["", "layers", "layers.1", "layers.1.up"])
def test_data_that_is_not_there_is_refused_clearly(opened: Any, part: str, act: str) -> None:
    module, resident = stack(), stack()
    opened(module)
    with pytest.raises(OffloadedWeightsError, match=r"is not possible: the data of layers\.\d\.\w+\.") as raised:
        ACTS[act](module.get_submodule(part))
    assert "state_dict() of what offload() gave" in str(raised.value)
    assert same(module(X), resident(X))


@pytest.mark.parametrize("part", ["norm", "layers.1.inner"])
def test_parts_that_are_here_can_be_used(opened: Any, part: str) -> None:
    module = stack()
    module.layers[1].inner = nn.Linear(2, 2)
    opened(module, groups(1, 1, 1, frozenset({"up", "down"})))
    here = module.get_submodule(part)
    assert same(here.state_dict(), copy.deepcopy(here).state_dict())
    torch.save(here, io.BytesIO())


def test_what_changes_nothing_is_allowed(opened: Any) -> None:
    module = stack()
    opened(module)
    assert module.to("cpu") is module
    assert module.to(torch.device("cpu"), torch.float32) is module
    assert module.layers[0].to("cpu") is module.layers[0]
    assert module.eval().requires_grad_(False) is module
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in stack().parameters())
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert isinstance(module, Stack)
    assert type(module).__name__ == "Stack"
    assert repr(module) == repr(stack())


def test_the_handle_gives_a_state_dict_with_data(opened: Any) -> None:
    make, arguments = kinds()["encoder-decoder"]
    module = randomized(make())
    module.register_buffer("scratch", torch.ones(3), persistent=False)
    expected = copy.deepcopy(module.state_dict())
    handle = opened(module)
    for _ in range(2):
        saved = handle.state_dict()
        assert same(dict(saved), dict(expected))
        assert saved["head.weight"].data_ptr() == saved["table.weight"].data_ptr()
    file = io.BytesIO()
    torch.save(saved, file)
    fresh, resident = make().eval(), make().eval()
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    resident.load_state_dict(expected)  # not the module itself: a copy may take another kernel, with other last bits
    assert same(fresh(**arguments), resident(**arguments))
    with pytest.raises(OffloadedWeightsError):
        module.state_dict()
    handle.close()
    assert same(dict(handle.state_dict()), dict(expected))


# --- weights that the user changes --------------------------------------------------------------------------------


def test_a_weight_that_is_put_in_is_used_from_then_on(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = offload(module, groups(1, 1, 2))
    assert same(module(X), resident(X))
    for model in (module, resident):
        model.layers[1].up.weight = nn.Parameter(random(2 * WIDTH, WIDTH, seed=5), requires_grad=False)
        model.layers[2].down = randomized(nn.Linear(2 * WIDTH, WIDTH), 6)
        model.layers[3] = randomized(Layer(), 7)
    for _ in range(2):
        assert same(module(X), resident(X))
    kept = module.layers[1].up.weight
    assert same(dict(handle.state_dict()), dict(resident.state_dict()))
    handle.close()
    assert module.layers[1].up.weight is kept
    assert same(module(X), resident(X))


def test_weights_that_are_loaded_in_place_of_others_are_used(opened: Any) -> None:
    module, resident = stack(), stack(seed=4)
    handle = offload(module, ALL)
    module.layers[0].load_state_dict(copy.deepcopy(resident.layers[0].state_dict()), assign=True)
    module.load_state_dict(copy.deepcopy(resident.state_dict()), assign=True)
    assert same(module(X), resident(X))
    assert same(dict(module.state_dict()), dict(resident.state_dict()))
    handle.close()
    assert same(module(X), resident(X))


def test_a_weight_that_is_deleted_stays_deleted() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.scale = nn.Parameter(random(WIDTH, WIDTH)), nn.Parameter(random(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = getattr(self, "scale", None)
            return x @ self.w if scale is None else x @ self.w * scale

    module = nn.Sequential(Optional(), Optional(), Optional())
    resident = twin(module)
    handle = offload(module, ALL)
    assert same(module(X), resident(X))
    for model in (module, resident):
        del model[0].scale
        model[1].scale = None
    for _ in range(2):
        assert same(module(X), resident(X))
    handle.close()
    assert not hasattr(module[0], "scale")
    assert module[1].scale is None
    assert same(module(X), resident(X))


@pytest.mark.parametrize("write", [
    lambda p: p.data.copy_(torch.zeros(1)),
    lambda p: p.copy_(torch.zeros(1)),
    lambda p: p.zero_(),
    lambda p: p.__setattr__("data", torch.zeros(1)),
    lambda p: p.detach().zero_(),
    lambda p: p[0],
    lambda p: p.numpy(),
    lambda p: p.tolist(),
    lambda p: p + 1,
])  # fmt: skip
def test_between_runs_a_weight_is_neither_written_nor_read(opened: Any, write: Any) -> None:
    module, resident = stack(), stack()
    opened(module)
    with pytest.raises(OffloadedWeightsError, match=r"layers\.2\.up\.weight"):
        write(module.layers[2].up.weight)
    assert same(module(X), resident(X))


@pytest.mark.parametrize("config", [groups(1), groups(1, 1, 9), MAPPED])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails_too", [False, True])
@pytest.mark.parametrize("write", [
    lambda p: p.mul_(2),
    lambda p: p.data.mul_(2),
    lambda p: p.detach().zero_(),
    lambda p: p.data.__setitem__(0, 0.0),
    lambda p: p.__setattr__("data", torch.zeros_like(p)),
])  # fmt: skip
def test_a_write_from_inside_is_refused_and_has_no_effect(
    opened: Any, config: OffloadConfig, fails_too: bool, mode: Any, write: Any
) -> None:
    module, resident = stack(), stack()
    opened(module, config)

    def inside(layer: Any) -> None:
        layer.inside = None
        write(layer.down.weight)
        if fails_too:
            raise ValueError("from inside")

    module.layers[1].inside = inside
    with mode(), pytest.raises((ValueError, WeightChanged), match=r"from inside|layers\.1\.down\.weight") as raised:
        module(X)
    assert fails_too or raised.type is WeightChanged
    for _ in range(2):
        assert same(module(X), resident(X))


def test_reading_from_inside_is_allowed(opened: Any) -> None:
    module, resident = stack(), stack()
    opened(module)
    seen: list[Any] = []
    module.layers[1].inside = lambda layer: seen.append((layer.up.weight.data.clone(), layer.up.bias.data.sum()))
    assert same(module(X), resident(X))
    assert same(seen[0], (resident.layers[1].up.weight.data, resident.layers[1].up.bias.data.sum()))


def test_what_is_only_lent_is_not_saved_from_inside(opened: Any) -> None:
    """It would be memory that later holds another layer's weights."""
    module = stack()
    opened(module)
    for part in ("", ".up"):
        module.layers[1].inside = lambda layer, part=part: layer.get_submodule(part.lstrip(".")).state_dict()
        with pytest.raises(OffloadedWeightsError, match=r"layers\.1\.up\.weight"):
            module(X)


@dataclasses.dataclass
class Kept:
    inner: Any
    number: int = 3


@pytest.mark.parametrize("config", [groups(1), groups(1, 1, 2), MAPPED])
@pytest.mark.parametrize("wrap", [
    lambda w: w, lambda w: w[1:, :3], lambda w: w.T, lambda w: w.data, lambda w: {"a": (w, None)}, lambda w: [w + 0, w],
    lambda w: Kept((w[2], "x")), lambda w: Kept(Kept(w)),
])  # fmt: skip
def test_weights_that_a_block_gives_out_stay_what_they_are(opened: Any, wrap: Any, config: OffloadConfig) -> None:
    """A table of positions of which a block returns some, say."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(9, WIDTH))

        def forward(self) -> Any:
            return wrap(self.table)

    module = randomized(nn.ModuleList([Table() for _ in range(4)]))
    resident = twin(module)
    opened(module, config)
    for _ in range(2):
        given = [table() for table in module]
        assert same(given, [table() for table in resident])


def test_an_output_without_weights_is_the_very_object(opened: Any) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return x

    module = nn.Sequential(Same(), Same()).requires_grad_(False)
    opened(module)
    for value in (X, [X, {"a": X}], Kept(X), None, torch.eye(3).to_sparse()):
        assert module(value) is value


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_that_asks_its_first_layer_which_way_to_go(opened: Any, padded: bool) -> None:
    """torch's TransformerEncoder takes nested tensors for what is padded, if that layer's weights are plain."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    module = randomized(nn.TransformerEncoder(layer, 3))
    resident, x = twin(module), random(2, 5, WIDTH)
    mask = torch.tensor([[False, False, False, True, True], [False] * 5]) if padded else None
    handle = opened(module, groups(1))
    with pytest.warns(UserWarning, match="nested tensors is in prototype") if padded else contextlib.nullcontext():
        assert same(module(x, src_key_padding_mask=mask), resident(x, src_key_padding_mask=mask))
    assert proves(handle)
    assert [name for name, _ in handle.plan.streamed] == ["layers.1", "layers.2"]


def test_hooks_of_the_user(opened: Any) -> None:
    module, resident = stack(), stack()
    for model in (module, resident):
        model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    opened(module)
    for model in (module, resident):
        model.layers[2].register_forward_hook(lambda layer, args, output: output * 2)
    assert same(module(X), resident(X))


def test_parametrized_weights(opened: Any) -> None:
    module = stack()
    for layer in module.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.up)
    resident = twin(module)
    handle = opened(module)
    assert same(module(X), resident(X))
    assert proves(handle)
