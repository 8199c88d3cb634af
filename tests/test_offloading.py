"""offload(): the same bits as in memory, for any module and any order, and the module as it was after close."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import gc
import io
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fakes import ScriptedReader
from tiny_modules import WIDTH, Layer, Stack, kinds, random, randomized, same, snapshot, stack, twin
from tiny_stacks import in_threads
from torch import nn

import headrace
from headrace import backing, offloading
from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.copying.spill import SpillFile
from headrace.errors import (
    CannotOffload,
    GradientsNeeded,
    InvalidSize,
    ModuleBudgetTooSmall,
    NothingOffloaded,
    OffloadedWeightsError,
    ReadError,
    SpillFailed,
    StillRunning,
    WeightChanged,
)
from headrace.offloading import Handle, offload

ALL = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1))
MAPPED = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1.0))
X = random(3, WIDTH)


def groups(size: int, number: int = 1, step: int = 1, params: frozenset[str] = frozenset()) -> OffloadConfig:
    return OffloadConfig(
        prefetch=PrefetchOffloadConfig(
            offload_group_size=size, offload_num_in_group=number, offload_prefetch_step=step, offload_params=params
        )
    )


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def opened() -> Iterator[Callable[..., Handle]]:
    """Offloads, and at the end closes and finds every module as it was."""
    made: list[tuple[Handle, dict[str, Any]]] = []

    def open_module(module: nn.Module, config: OffloadConfig | None = ALL, **options: Any) -> Handle:
        before = snapshot(module)
        made.append((offload(module, config, **options), before))
        return made[-1][0]

    yield open_module
    for handle, before in made:
        handle.close()
        assert same(snapshot(handle.module), before)


def proves(handle: Handle) -> bool:
    """Something was offloaded, and read: else a comparison with the resident module proves nothing."""
    return handle.report().offloaded_bytes > 0 and (handle.plan.backend == "uva" or handle.statistics().read_bytes > 0)


# --- any module ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ALL, MAPPED], ids=["prefetch", "uva"])
@pytest.mark.parametrize("kind", kinds())
def test_the_same_bits_for_every_kind_of_module(opened: Any, kind: str, config: OffloadConfig) -> None:
    make, arguments = kinds()[kind]
    module = randomized(make())
    expected = twin(module)(**arguments)
    handle = opened(module, config)
    for _ in range(3):
        assert same(module(**arguments), expected)
    assert proves(handle)
    handle.close()
    assert same(module(**arguments), expected)


@pytest.mark.parametrize(("kind", "blocks"), [
    ("stack", 4), ("vision", 3), ("diffusion", 8), ("encoder-decoder", 5), ("lists in lists", 6), ("recurrent", 3),
    ("residual", 4), ("sequential", 3), ("backbone and head", 4),
])  # fmt: skip
def test_which_blocks_are_found(opened: Any, kind: str, blocks: int) -> None:
    """An encoder and a decoder, pairs in lists, stages; of the stem only what has weights. Not an LSTM's."""
    module = randomized(kinds()[kind][0]())
    moved = opened(module, MAPPED).plan.streamed
    assert len(moved) == blocks, moved


def test_group_rules_count_the_main_stacks_only(opened: Any) -> None:
    handle = opened(randomized(kinds()["diffusion"][0]()), groups(1))
    assert [name.split(".")[0] for name, _ in handle.plan.streamed] == ["joint"] * 3 + ["single"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "config"), [
    ("gpt2", ALL), ("qwen3-moe", ALL), ("qwen3-moe", MAPPED), ("llama-tied", groups(3, 2, 4)),
])  # fmt: skip
def test_a_model_of_transformers_that_is_in_memory(opened: Any, architecture: str, config: OffloadConfig) -> None:
    model = tiny_models.model(architecture).requires_grad_(False)
    prompt = torch.arange(3, 12)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = twin(model).generate(prompt, **options)
    handle = opened(model, config)
    got = model.generate(prompt, **options)
    assert same(got.sequences, expected.sequences)
    assert same(got.logits, expected.logits)
    assert proves(handle)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("merged", [False, True])
def test_lora_adapters_added_before_or_after(opened: Any, when: str, merged: bool) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)

    def adapted(base: Any) -> Any:
        torch.manual_seed(3)  # of the adapters' weights
        return peft.get_peft_model(base, config).eval()

    tokens = torch.arange(3, 12)[None]
    base = tiny_models.model("llama")
    expected_model = adapted(twin(base))
    plain = twin(base)(tokens).logits
    if when == "before":
        model = adapted(base)
        if merged:
            model.merge_adapter()
            expected_model.merge_adapter()
        handle = offload(model, ALL)
    else:
        handle = offload(base, ALL)
        model = adapted(base)
    expected = expected_model(tokens).logits
    assert not torch.equal(expected, plain)
    for _ in range(2):
        assert same(model(tokens).logits, expected)
    assert proves(handle)
    if not merged:
        with model.disable_adapter():
            assert same(model(tokens).logits, plain)
    elif when == "after":
        with pytest.raises(OffloadedWeightsError):
            model.merge_adapter()
    handle.close()
    assert same(model(tokens).logits, expected)


# --- blocks that the user names -----------------------------------------------------------------------------------


def test_blocks_by_name_by_list_and_by_module(opened: Any) -> None:
    for blocks, count in [
        ("layers", 4),
        (["layers.0", "layers.2"], 2),
        (lambda m: [m.layers[1], m.norm], 2),
        (lambda m: [m.layers[1], "layers.1", m.layers], 4),
        (["layers.0.up", "layers"], 5),
        (lambda m: [m], 1),
    ]:
        module, twin_module = stack(), stack()
        handle = opened(module, ALL, blocks=blocks(module) if callable(blocks) else blocks)
        assert len(handle.plan.streamed) == count
        assert same(module(X), twin_module(X))
        assert proves(handle)


@pytest.mark.parametrize(("blocks", "words"), [
    ("layer", r"no module named 'layer'\.\nDid you mean layers"),
    ("zzz", r"Did you mean layers"),
    ([Layer()], "a Layer among the blocks is not part of it"),
    ([], "no weight belongs"),
    ("layers.0.inside", "no module named"),
])  # fmt: skip
def test_blocks_that_are_not_there(blocks: Any, words: str) -> None:
    module = stack()
    before = snapshot(module)
    with pytest.raises(CannotOffload, match=words):
        offload(module, ALL, blocks=blocks)
    assert same(snapshot(module), before)


@pytest.mark.parametrize(("module", "words"), [
    (lambda: nn.Linear(4, 4), "no list of modules"),
    (lambda: nn.Sequential(nn.Tanh(), nn.Tanh()), "no list of modules"),
    (lambda: Stack().to("meta"), "on the meta device"),
    (lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4)), "no shape yet"),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)), "no shape yet"),
])  # fmt: skip
def test_modules_that_cannot_be_offloaded(module: Any, words: str) -> None:
    with pytest.raises(CannotOffload, match=words):
        offload(module(), ALL)


def test_a_scripted_module_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(CannotOffload, match="ScriptModule"):
        offload(scripted, ALL)


def test_layers_that_share_modules_and_a_layer_that_is_there_twice(opened: Any) -> None:
    module = stack(5)
    module.layers[2].up = module.layers[0].up
    module.layers[3].down.weight = module.layers[1].down.weight
    module.layers[4] = module.layers[3]
    resident = twin(module)
    handle = opened(module, groups(1))
    for _ in range(2):
        assert same(module(X), resident(X))
    assert proves(handle)


def test_what_is_offloaded_is_not_offloaded_again(opened: Any) -> None:
    module = stack()
    opened(module)
    for again in (module, nn.ModuleDict({"inner": module}), module.layers[1], module.layers):
        with pytest.raises(CannotOffload, match="offloaded already"):
            offload(again, ALL)


# --- any order, any failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [groups(1), groups(1, 1, 3), groups(1, 1, 9), groups(2), MAPPED])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3], [0, 0, 1, 2, 3, 3], [3, 2, 1, 0], [], [2]])
def test_any_order(opened: Any, order: list[int], config: OffloadConfig) -> None:
    module, resident = stack(), stack()
    handle = opened(module, config)
    for _ in range(2):
        assert same(module(X, order), resident(X, order))
        assert same(module(X), resident(X))
    assert proves(handle)


@pytest.mark.parametrize("config", [groups(1), groups(1, 1, 2), MAPPED])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OffloadedWeightsError])
@pytest.mark.parametrize("where", range(4))
def test_an_exception_in_the_middle(opened: Any, where: int, error: Any, config: OffloadConfig) -> None:
    module, resident = stack(), stack()
    handle = opened(module, config)

    def fail(_: nn.Module) -> None:
        module.layers[where].inside = None
        raise error("from inside") if error is not OffloadedWeightsError else error(action="a", count=1, names=[])

    module.layers[where].inside = fail
    with pytest.raises(error):
        module(X)
    assert same(module(X), resident(X))
    assert proves(handle)


def test_blocks_call_blocks_and_the_model_itself(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module, groups(1))
    got: list[Any] = []

    def nested(layer: nn.Module) -> None:
        module.layers[1].inside = None
        got.extend([module.layers[3](X), module.layers[1](X), module(X)])

    module.layers[1].inside = nested
    assert same(module(X), resident(X))
    assert same(got, [resident.layers[3](X), resident.layers[1](X), resident(X)])
    assert handle.statistics().passes == 1


def test_two_models_interleaved(opened: Any) -> None:
    one, other = stack(4), stack(3, seed=1)
    expected = [twin(one)(X), twin(other)(X)]
    opened(one, groups(1)), opened(other, groups(1, 1, 2))
    left = right = X
    for index in range(4):
        left = one.layers[index](left)
        right = other.layers[index](right) if index < 3 else right
    assert same([one.norm(left), other.norm(right)], expected)


def test_a_model_inside_of_another_that_is_offloaded_later(opened: Any) -> None:
    """A draft beside its target: each with a handle of its own."""
    draft, target = stack(2, seed=1), stack(4)
    expected = twin(target)(twin(draft)(X))
    first, second = opened(draft), opened(target)
    assert same(target(draft(X)), expected)
    first.close()
    assert same(target(draft(X)), expected)
    assert proves(second)


def test_threads_on_one_model(opened: Any) -> None:
    module, resident = stack(), stack()
    inputs = [random(rows, WIDTH) for rows in range(1, 6)]
    expected = [resident(rows) for rows in inputs]
    opened(module, groups(1))

    def run(number: int) -> bool:
        with torch.inference_mode():
            return all(same(module(inputs[number]), expected[number]) for _ in range(20))

    assert in_threads(*[lambda number=number: run(number) for number in range(5)]) == [True] * 5


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_runs(opened: Any, mode: Any) -> None:
    module = stack().requires_grad_(True)
    resident = twin(module)
    opened(module)
    with mode():
        assert same(module(X), resident(X))


@pytest.mark.parametrize("opened_in", [True, False])
@pytest.mark.parametrize("built_in", [True, False])
def test_inference_mode_while_a_module_is_built_or_offloaded(built_in: bool, opened_in: bool) -> None:
    with torch.inference_mode(built_in):
        module, resident = stack(), stack()
    before = snapshot(module)
    with torch.inference_mode(opened_in):
        handle = offload(module, ALL)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert same(module(X), resident(X))
    with torch.inference_mode(opened_in):
        handle.close()
    assert same(snapshot(module), before)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert same(module(X), resident(X))
    assert module.layers[0].up.weight.is_inference() == built_in


@pytest.mark.parametrize("kind", ["stack", "diffusion", "vision"])
def test_gradients_that_would_be_missing_are_refused(opened: Any, kind: str) -> None:
    make, arguments = kinds()[kind]
    module = randomized(make()).requires_grad_(True)
    opened(module)
    with torch.enable_grad():
        with pytest.raises(GradientsNeeded, match=r"torch\.inference_mode\(\)"):
            module(**{name: value.clone() for name, value in arguments.items()})
        module.requires_grad_(False)
        module(**{name: value.clone() for name, value in arguments.items()})
        module.requires_grad_(True)  # is it again after close


def test_an_input_that_needs_a_gradient_is_refused(opened: Any) -> None:
    module = stack()
    opened(module)
    with torch.enable_grad():
        with pytest.raises(GradientsNeeded, match=r"layers\.0"):
            module(X.clone().requires_grad_())
        assert not module(X.clone()).requires_grad


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
    fresh = make().eval()
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert same(module(**arguments), fresh(**arguments))
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


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 5)])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_groups(opened: Any, count: int, size: int, number: int, step: int) -> None:
    module = randomized(nn.Sequential(*[Layer() for _ in range(count)], nn.Identity()))
    expected = [index for index in range(count) if index % size >= size - number]
    if not expected:
        with pytest.raises(NothingOffloaded, match=f"--offload-group-size {count}"):
            offload(module, groups(size, number, step))
        return
    resident = twin(module)
    handle = opened(module, groups(size, number, step))
    assert [name for name, _ in handle.plan.streamed] == [str(index) for index in expected]
    assert handle.plan.slots == min(step + 1, len(expected))
    for _ in range(3):
        assert same(module(X), resident(X))
    assert proves(handle)
    assert handle.statistics().slot_misses == 0


def test_a_selector_takes_whole_words(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module, groups(1, params=frozenset({"down.weight"})))
    assert {name.split(".", 2)[2] for _, names in handle.plan.streamed for name in names} == {"down.weight"}
    assert same(module(X), resident(X))
    with pytest.raises(NothingOffloaded, match="down"):
        offload(stack(), groups(1, params=frozenset({"dow"})))


def test_mapped_up_to_a_budget_with_a_selector(opened: Any) -> None:
    module, resident = stack(), stack()
    budget = 3 * module.layers[0].up.weight.nbytes
    config = OffloadConfig(
        uva=UVAOffloadConfig(cpu_offload_gb=budget / 2**30, cpu_offload_params=frozenset({"up.weight"}))
    )
    handle = opened(module, config)
    assert handle.report().offloaded_bytes == budget
    assert handle.plan.backend == "uva"
    assert same(module(X), resident(X))
    too_little = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1e-8))
    with pytest.raises(NothingOffloaded, match="the smallest parameter"):
        offload(stack(), too_little)


def test_nothing_asked_for() -> None:
    with pytest.raises(NothingOffloaded, match="memory='2GiB'"):
        offload(stack())
    with pytest.raises(InvalidSize):
        offload(stack(), memory="two")


BIG = 160  # each weight is worth a read, so that some can move and others stay


def test_a_budget_is_kept_and_another_one_moves_less(opened: Any) -> None:
    module, x = stack(6, BIG), random(2, BIG)
    expected = twin(module)(x)
    total = sum(p.nbytes for p in module.parameters())
    resident = []
    for share in (0.95, 0.85):
        handle = opened(module, None, memory=int(share * total))
        report = handle.report()
        assert report.requested_bytes == int(share * total)
        assert report.resident_bytes + report.ring_bytes + report.staging_bytes <= int(share * total)
        assert report.offloaded_bytes == total - report.resident_bytes > 0
        assert same(module(x), expected)
        assert proves(handle)
        resident.append(report.resident_bytes)
        handle.close()
    assert sorted(set(resident), reverse=True) == resident


@pytest.mark.parametrize("more", [0, 1, 2**30])
def test_a_budget_that_holds_all_moves_nothing(opened: Any, more: int) -> None:
    module = stack(6, BIG)
    module.register_buffer("cache", torch.ones(100))
    total = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    threads = threading.active_count()
    handle = opened(module, None, memory=total + more)
    assert handle.plan.backend == "resident"
    assert handle.report().offloaded_bytes == 0
    assert handle.report().resident_bytes == total
    assert threading.active_count() == threads
    module.state_dict()
    handle.close()


@pytest.mark.parametrize("memory", [1, "1KiB", 100_000])
def test_a_budget_that_is_too_small_names_one_that_works(opened: Any, memory: Any) -> None:
    module, x = stack(6, BIG), random(2, BIG)
    expected, before = twin(module)(x), snapshot(module)
    with pytest.raises(ModuleBudgetTooSmall) as raised:
        offload(module, memory=memory)
    assert same(snapshot(module), before)
    needed = re.search(r"memory='(\S+)' or more", str(raised.value))
    assert needed is not None
    assert opened(module, None, memory=needed[1]).report().offloaded_bytes >= 0
    assert same(module(x), expected)


# --- reports ------------------------------------------------------------------------------------------------------


def test_the_report_adds_up(opened: Any) -> None:
    module = stack()
    module.layers[1].register_buffer("packed", torch.zeros(100, dtype=torch.int32))  # as GPTQ keeps its weights
    module.register_buffer("scratch", torch.zeros(10), persistent=False)
    weights = sum(p.nbytes for p in module.parameters())
    moving = sum(p.nbytes for layer in module.layers for p in layer.parameters())
    handle = opened(module, groups(1))
    report = handle.report()
    assert report.buffer_bytes == 440
    assert report.offloaded_bytes == moving
    assert report.resident_bytes == weights - moving + 440
    assert report.net_saving_bytes == moving - report.ring_bytes
    assert report.ring_bytes == 2 * handle.plan.slot_bytes
    by_name = {category.name: category for category in report.categories}
    assert by_name["disk"].requested_bytes == by_name["disk"].applied_bytes == moving
    assert moving <= by_name["disk"].allocated_bytes <= moving + 4096 * 5
    assert by_name["resident"].applied_bytes == by_name["resident"].requested_bytes == weights - moving + 440
    assert by_name["ring"].applied_bytes == by_name["ring"].allocated_bytes == report.ring_bytes
    assert by_name["staging"].allocated_bytes == report.staging_bytes
    assert by_name["buffers"].applied_bytes == 440
    handle.close()
    after = handle.report()
    assert (after.offloaded_bytes, after.ring_bytes, after.resident_bytes) == (0, 0, weights + 440)


def test_ties_are_counted_once(opened: Any) -> None:
    module = stack()
    module.layers[1].down.weight = nn.Parameter(module.layers[1].up.weight.data.T, requires_grad=False)
    resident = twin(module)
    handle = opened(module)
    parameters = [p for name, p in resident.named_parameters() if name != "layers.1.down.weight"]
    report = handle.report()
    assert report.offloaded_bytes + report.resident_bytes == sum(p.nbytes for p in parameters)
    assert same(module(X), resident(X))
    handle.close()
    assert module.layers[1].down.weight.data_ptr() == module.layers[1].up.weight.data_ptr()


def test_statistics(opened: Any) -> None:
    module = stack()
    handle = opened(module, groups(1))
    module(X)
    module(X, [3, 0])
    now = handle.statistics()
    assert (now.passes, now.blocks_run) == (2, 6)
    assert now.slot_misses > 0
    assert now.moved_bytes == now.read_bytes >= handle.report().offloaded_bytes
    assert now.stall_s > 0
    assert 0 <= now.hidden_fraction <= 1
    assert now.moving_s > 0


def test_a_ring_for_all_is_read_once(opened: Any) -> None:
    module = stack()
    handle = opened(module, groups(1, 1, 4))
    module(X)
    read = handle.statistics().read_bytes
    module(X)
    assert handle.statistics().read_bytes == read > 0


# --- close --------------------------------------------------------------------------------------------------------


def test_close_gives_everything_back_again_and_again() -> None:
    module, resident = stack(), stack()
    before, threads, descriptors = snapshot(module), threading.active_count(), _descriptors()
    for config in (ALL, MAPPED, groups(2, 1, 3), ALL):
        with offload(module, config) as handle:
            assert same(module(X), resident(X))
        handle.close()
        assert same(snapshot(module), before)
        assert same(module(X), resident(X))
        assert threading.active_count() == threads
    gc.collect()
    assert _descriptors() == descriptors
    copy.deepcopy(module).half()
    pickle.loads(pickle.dumps(module))


def test_close_from_inside_is_refused(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module)
    refused: list[str] = []

    def inside(layer: Any) -> None:
        layer.inside = None
        for act in (handle.close, handle.state_dict):
            with pytest.raises(StillRunning) as raised:
                act()
            refused.append(str(raised.value))

    module.layers[2].inside = inside
    assert same(module(X), resident(X))
    assert refused[0].startswith("close() was called from inside")
    assert refused[1].startswith("state_dict() was called from inside")


def test_close_waits_for_a_pass_of_another_thread(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module)
    inside, closing = threading.Event(), threading.Event()

    def pause(layer: Any) -> None:
        layer.inside = None
        inside.set()
        assert closing.wait(60)

    def close() -> None:
        assert inside.wait(60)
        closing.set()
        handle.close()

    def run() -> bool:
        with torch.inference_mode():
            return same(module(X), resident(X))

    module.layers[2].inside = pause
    assert in_threads(run, close) == [True, None]
    assert same(module(X), resident(X))


def test_who_has_wrapped_a_forward_meanwhile_still_works_after_close(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = offload(module, ALL)
    for wrapped in (module, module.layers[1]):
        inner = wrapped.forward
        wrapped.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)
    assert same(module(X), resident(X))
    handle.close()
    assert same(module(X), resident(X))


# --- reads that fail ----------------------------------------------------------------------------------------------


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedReader]:
    """The last reader that was opened is its `last`."""

    class Reader(ScriptedReader):
        last: ScriptedReader

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            Reader.last = self

    monkeypatch.setattr(backing, "DiskReader", Reader)
    return Reader


def _failing(offset: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_close_after_a_read_error(opened: Any, reader: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module)
    reader.last.script = _failing
    with pytest.raises(ReadError, match="Input/output error"):
        module(X, [3, 2, 1, 0])
    with pytest.raises(ReadError):
        handle.close()
    with pytest.raises(ReadError):
        handle.state_dict()
    reader.last.script = lambda offset: None
    for _ in range(handle.plan.slots):  # what had been read ahead by then has failed, too
        with contextlib.suppress(ReadError):
            module(X)
    assert same(module(X), resident(X))
    handle.close()
    assert same(module(X), resident(X))


@pytest.mark.slow
def test_ten_threads_and_a_failing_read_in_every_tenth_pass(reader: Any) -> None:
    module = stack(4)
    inputs = [random(1 + number % 3, WIDTH, seed=number) for number in range(10)]
    expected = [twin(module)(x) for x in inputs]
    before = snapshot(module)
    threads, descriptors = threading.active_count(), _descriptors()
    handle = offload(module, groups(1))
    started = itertools.count()
    bad = threading.Event()
    count = itertools.count()

    def script(offset: int) -> None:
        if bad.is_set():
            bad.clear()
            raise OSError(errno.EIO, "Input/output error")

    def inject(layer: Any) -> None:
        if next(started) % 10 == 9:
            bad.set()

    module.layers[0].inside = inject
    reader.last.script = script
    outcomes: list[str] = []

    def run(number: int) -> None:
        with torch.inference_mode():
            while next(count) < 1000:
                try:
                    right = same(module(inputs[number]), expected[number])
                    outcomes.append("right" if right else "wrong")
                except ReadError:
                    outcomes.append("error")

    in_threads(*[lambda number=number: run(number) for number in range(10)])
    rss_after_first = _resident_bytes()
    assert outcomes.count("wrong") == 0
    assert outcomes.count("right") + outcomes.count("error") == 1000
    assert 50 <= outcomes.count("error") <= 120, outcomes.count("error")
    assert handle.statistics().read_errors >= outcomes.count("error")
    count = itertools.count()
    in_threads(*[lambda number=number: run(number) for number in range(10)])
    assert _resident_bytes() - rss_after_first < 2 * 2**20  # what the first thousand took is all there is
    module.layers[0].inside = None
    reader.last.script = lambda offset: None
    handle.close()
    assert same(snapshot(module), before)
    gc.collect()
    assert (threading.active_count(), _descriptors()) == (threads, descriptors)


# --- an opening that fails ----------------------------------------------------------------------------------------

STEPS = ["SpillFile", "DiskReader", "append", "flush", "measure_bytes_per_s", "PrefetchBackend", "attach", "put_away",
         "guard"]  # fmt: skip


@pytest.mark.parametrize("error", [SpillFailed, KeyboardInterrupt])
@pytest.mark.parametrize("step", STEPS)
def test_an_opening_that_fails_leaves_the_module_as_it_was(
    monkeypatch: pytest.MonkeyPatch, step: str, error: Any
) -> None:
    module, resident = stack(), stack()
    before, threads, descriptors = snapshot(module), threading.active_count(), _descriptors()
    calls = itertools.count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if step == "append" and next(calls) < 5:
            return real(*args, **kwargs)
        if step in ("attach", "put_away"):
            real(*args, **kwargs)
        raise error(**SpillFailed.example) if error is SpillFailed else error

    owner, name = {
        "SpillFile": (backing, step), "DiskReader": (backing, step), "append": (SpillFile, step),
        "flush": (backing.Backing, step), "attach": (offloading.PrefetchBackend, step),
    }.get(step, (offloading, step))  # fmt: skip
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(error):
        offload(module, ALL)
    monkeypatch.undo()
    assert same(snapshot(module), before)
    assert same(module(X), resident(X))
    gc.collect()
    assert (threading.active_count(), _descriptors()) == (threads, descriptors)
    with offload(module, ALL):
        assert same(module(X), resident(X))


# --- what is left behind ------------------------------------------------------------------------------------------


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_module_works_without_its_handle() -> None:
    module, resident = stack(), stack()
    handle = weakref.ref(offload(module, ALL))
    gc.collect()
    assert handle() is None
    for _ in range(2):
        assert same(module(X), resident(X))


@pytest.mark.parametrize("config", [ALL, MAPPED])
@pytest.mark.parametrize("keep_handle", [False, True])
@pytest.mark.parametrize("make", [stack, lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])])
def test_a_module_that_is_dropped_takes_its_threads_and_its_file_along(
    make: Any, config: Any, keep_handle: bool
) -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), _descriptors()
    module = make()
    handle: Any = offload(module, config)
    module(X)
    assert _descriptors() > descriptors
    gone = weakref.ref(module)
    del module
    if keep_handle:
        assert gone() is handle.module
    del handle
    gc.collect()
    assert gone() is None
    assert (threading.active_count(), _descriptors()) == (threads, descriptors)


_CHILD = """
    import os, signal, sys, torch, headrace
    from torch import nn
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    handle = headrace.offload(module, headrace.OffloadConfig(prefetch={"offload_group_size": 1}))
    with torch.inference_mode():
        module(torch.ones(1, 64))
    assert handle.report().offloaded_bytes > 0
    print(handle._backing.disk_bytes, os.listdir(os.environ["TMPDIR"]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split(maxsplit=1)[1].strip() == "[]"  # it had no name while it was there, either
    assert list(tmp_path.iterdir()) == []


_FULL = """
    import resource, torch, headrace
    from torch import nn
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    before = [parameter.clone() for parameter in module.parameters()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        headrace.offload(module, headrace.OffloadConfig(prefetch={"offload_group_size": 1}))
    except headrace.HeadraceError as error:
        print(type(error).__name__, error)
    assert all(map(torch.equal, before, module.parameters()))
"""


@pytest.mark.slow
def test_no_space_for_the_file() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_FULL)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("SpillFailed Weights could not be spilled to"), done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert "TMPDIR=" in done.stdout


def test_the_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("### Any PyTorch module")[1]
    example = section.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    shape, figures = capsys.readouterr().out.splitlines()
    assert shape == "torch.Size([1, 1024])"
    assert int(figures.split()[0]) > 0
    assert len(torch.load("model.pt")) == 16


def test_public_names() -> None:
    assert headrace.offload is offload
    assert headrace.Handle is Handle
