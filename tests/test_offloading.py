"""offload(): the same bits as in memory for any module, settings kept, reports that add up."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import tiny_models
import torch
from tiny_modules import Layer, Stack, kinds, random, randomized, same, snapshot, stack, twin
from tiny_offloads import ALL, MAPPED, X, groups, proves
from torch import nn

from headrace.config import OffloadConfig, UVAOffloadConfig
from headrace.errors import (
    CannotOffload,
    InvalidSize,
    ModuleBudgetTooSmall,
    NothingOffloaded,
    OffloadedWeightsError,
)
from headrace.offloading import offload

pytestmark = pytest.mark.usefixtures("without_gradients")


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
