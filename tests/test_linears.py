"""Fast rows: which kernel multiplies what, that streamed stays resident bit for bit, and what the plan says of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import demand, layers, machine, model, small_matrices
from tiny_models import ARCHITECTURES, differing, ids, logits, plain_logits, shared
from tiny_stacks import in_threads
from torch import nn
from torch.overrides import TorchFunctionMode

from headrace.config import OffloadConfig
from headrace.core import BlockShape, Machine, ParamShape, Products
from headrace.engine import Engine
from headrace.errors import InvalidSetting
from headrace.generate import Sampling, generate
from headrace.linears import FoldedLinear, OneRowFoldedLinear, OneRowLinear, own_kernel, use_fast_rows
from headrace.planner import plan
from headrace.planner.costs import fast_share
from headrace.testing import SimulatedAccelerator

GREEDY = Sampling(12, 0)
MIB = 2**20


@pytest.fixture(autouse=True)
def _small_matrices() -> Iterator[None]:
    with small_matrices():
        yield


class Kernels(TorchFunctionMode):
    """Notes of each product how many rows it had, and whether oneDNN might have made it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.seen.append((args[0].numel() // args[0].shape[-1], torch.backends.mkldnn.enabled))
        return func(*args, **(kwargs or {}))


def names_of(engine: Engine) -> set[str]:
    return {type(module).__name__ for module in engine.model.modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("kind", [nn.Linear, FoldedLinear])
def test_one_row_goes_through_torch_s_kernel_and_several_do_not(kind: type[nn.Linear]) -> None:
    layer = kind(64, 96, bias=False, dtype=torch.bfloat16)
    assert use_fast_rows(nn.Sequential(layer)) == 64 * 96 * 2
    assert type(layer) in (OneRowLinear, OneRowFoldedLinear)
    hidden = torch.randn(1, 3, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), Kernels() as kernels:
        several = layer(hidden)
        one = layer(hidden[:, :1])
    assert kernels.seen == [(3, True), (1, False)]
    assert several.shape == (1, 3, 96)
    assert one.shape == (1, 1, 96)
    exact = hidden.double() @ layer.weight.double().T
    for made, length in ((several, 3), (one, 1)):
        assert torch.allclose(made.double(), exact[:, :length], rtol=2**-7, atol=2**-9)


def test_a_bias_is_added_and_the_switch_is_as_before_whatever_happens() -> None:
    layer = nn.Linear(8, 4, dtype=torch.bfloat16)
    use_fast_rows(nn.Sequential(layer))
    with torch.inference_mode():
        zero = layer(torch.zeros(1, 8, dtype=torch.bfloat16))
        assert torch.equal(zero[0], layer.bias)
        with pytest.raises(RuntimeError):
            layer(torch.zeros(2, 4, dtype=torch.bfloat16))  # as many numbers, another shape
    assert torch.backends.mkldnn.enabled
    with own_kernel():
        with own_kernel():
            pass
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled


def test_two_threads_switch_it_off_together() -> None:
    """The one that is done first must not switch it on for the other, nor the other leave it off."""
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen: list[bool] = []

    def first() -> None:
        with own_kernel():
            first_is_in.set()
            assert second_is_in.wait(60)
        first_is_out.set()

    def second() -> None:
        assert first_is_in.wait(60)
        with own_kernel():
            second_is_in.set()
            assert first_is_out.wait(60)
            seen.append(torch.backends.mkldnn.enabled)

    in_threads(first, second)
    assert seen == [False]
    assert torch.backends.mkldnn.enabled


def test_only_plain_layers_in_bfloat16_are_changed() -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float16), Scaled(4, 4, dtype=torch.bfloat16))
    assert use_fast_rows(model) == 0
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, Scaled]
    tied = nn.Sequential(*[nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2)])
    tied[1].weight = tied[0].weight
    assert use_fast_rows(tied) == 32, "a tied matrix counts once"


@pytest.fixture(params=sorted(ARCHITECTURES))
def directory(request: pytest.FixtureRequest, root: Path) -> Path:
    return shared(root, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.9, 0.5])
def test_streamed_stays_resident_bit_for_bit(directory: Path, memory: float) -> None:
    with Engine.open(directory, fast=True) as engine:
        assert engine.report().offloaded_bytes == 0
        resident = logits(engine.model)
        kinds = names_of(engine)
        assert kinds <= {"OneRowLinear", "OneRowFoldedLinear"}
    with Engine.open(directory, weights_share=memory, fast=True) as engine:
        report = engine.report()
        assert report.offloaded_bytes > 0
        assert names_of(engine) == kinds
        assert differing(logits(engine.model), resident) == []
        assert engine.report().counters.slot_misses == 0
    plain = plain_logits(directory)
    several = [name for name in plain if name.startswith(("whole", "padded"))]  # of a prefill the head gets one row
    assert differing({name: plain[name] for name in several}, {name: resident[name] for name in several}) == []
    exact = plain_logits(directory, torch.float32)["decode 0"]
    errors = [(made["decode 0"].float() - exact).abs().mean() for made in (resident, plain)]
    assert errors[0] <= 1.2 * errors[1], "rounded elsewhere, not worse"


@pytest.mark.slow
def test_the_process_is_as_it_was_and_a_plain_engine_beside_it_too(root: Path) -> None:
    directory = shared(root, "llama")
    with Engine.open(directory, fast=True) as fast, Engine.open(directory, weights_share=0.5) as exact:
        logits(fast.model)
        assert torch.backends.mkldnn.enabled
        assert exact.report().offloaded_bytes > 0
        assert differing(logits(exact.model), plain_logits(directory)) == []


@pytest.mark.slow
def test_two_models_from_two_threads(root: Path) -> None:
    """While one is in the middle of a pass, the other's has not begun: what it switches off would change the bits."""
    directory = shared(root, "qwen3-moe")
    with Engine.open(directory, fast=True) as one, Engine.open(directory, weights_share=0.5, fast=True) as other:
        assert other.report().offloaded_bytes > 0
        known = logits(one.model)
        inside, seen = threading.Event(), []

        def in_the_middle(*_: object) -> None:
            inside.set()
            calling.wait(60)
            seen.append(begun.is_set())

        calling, begun = threading.Event(), threading.Event()
        hooks = [
            one.model.model.layers[2].register_forward_pre_hook(in_the_middle),
            other.model.model.layers[0].register_forward_pre_hook(lambda *_: begun.set()),
        ]

        def second() -> dict[str, torch.Tensor]:
            assert inside.wait(60)
            calling.set()
            return logits(other.model)

        made = in_threads(lambda: one.model(input_ids=ids(1, 13)).logits, second)
        assert seen == [False]
        assert torch.equal(made[0], known["whole"])
        assert differing(made[1], known) == []
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_pass_that_ends_early_keeps_nobody_waiting(root: Path, error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error

    with Engine.open(shared(root, "llama"), fast=True) as engine:
        known = logits(engine.model)
        hook = engine.model.model.layers[1].mlp.act_fn.register_forward_hook(fail)
        with pytest.raises(error):
            engine.model(input_ids=ids(1, 1))
        hook.remove()
        (made,) = in_threads(lambda: logits(engine.model))
        assert differing(made, known) == []
        assert torch.backends.mkldnn.enabled


@pytest.mark.slow
def test_a_copy_and_a_pickled_one_compute_the_same(root: Path) -> None:
    with Engine.open(shared(root, "llama-tied"), fast=True) as engine:
        known = logits(engine.model)
        for made in (copy.deepcopy(engine.model), pickle.loads(pickle.dumps(engine.model))):
            assert type(made) is type(engine.model)
            assert differing(logits(made), known) == []


@pytest.mark.slow
def test_drafts_are_verified_with_the_same_bits(root: Path) -> None:
    directory = shared(root, "llama")
    answers = []
    for speculate in ("off", "lookup", str(directory)):
        with Engine.open(directory, weights_share=0.5, speculate=speculate, sampling=GREEDY, fast=True) as engine:
            assert engine.report().offloaded_bytes > 0
            made = generate(engine.model, engine.tokenizer, ids(1, 20), GREEDY, drafter=engine.drafter)
            answers.append(made.token_ids)
            if speculate == str(directory):
                assert made.drafted_tokens > 0
    assert answers[0] == answers[1] == answers[2]


# --- the plan -------------------------------------------------------------------------------------------------------


def measured(**fields: Any) -> Machine:
    products = {"bfloat16": Products(((1, 1e10), (4, 8e9))), "float32": Products(((1, 1e10),))}
    return dataclasses.replace(machine(), compute_bytes_per_s=1e10, products=products, **fields)


def compute_s(here: Machine, dtype: str = "bfloat16", **wanted: Any) -> tuple[float, list[tuple[str, str]]]:
    shape = dataclasses.replace(model(*layers(*[[MIB]] * 4)), dtype=dtype)
    made = plan(shape, here, dataclasses.replace(demand(None), **wanted), OffloadConfig())
    return made.bound.compute_s, [(row.name, row.value) for row in made.choices if row.name == "fast"]


def test_the_plan_counts_with_the_rate_of_one_row() -> None:
    here = measured(fast_row_bytes_per_s=2e10)
    slow_s, told = compute_s(here)
    assert told == []
    assert compute_s(here, fast_rows=True) == (pytest.approx(slow_s / 2, rel=0.02), [("fast", "on")])
    assert compute_s(here, batch=4, fast_rows=True)[0] == compute_s(here, batch=4)[0]
    assert compute_s(measured(), fast_rows=True)[0] == slow_s
    unmeasured = dataclasses.replace(here, products={})
    assert compute_s(unmeasured, fast_rows=True)[0] == pytest.approx(compute_s(unmeasured)[0] / 2)
    for same in ({"batch": 4}, {"dtype": "float32"}, {"dtype": "float16"}):
        assert compute_s(unmeasured, fast_rows=True, **same)[0] == compute_s(unmeasured, **same)[0]


def test_it_counts_only_for_the_matrices_that_it_is_for() -> None:
    here = measured(fast_row_bytes_per_s=2e10)
    slow_s = compute_s(here)[0]
    half = compute_s(here, fast_rows=True, fast_bytes=2 * MIB)[0]
    assert half == pytest.approx(slow_s * 0.75, rel=0.02)
    assert compute_s(here, fast_rows=True, fast_bytes=0)[0] == slow_s
    block = BlockShape("layer", (ParamShape("always", MIB), ParamShape("experts", 8 * MIB, used_share=0.125)))
    routed = dataclasses.replace(model(block), dtype="bfloat16")
    assert fast_share(routed, dataclasses.replace(demand(None), fast_rows=True)) == 0.5


@pytest.mark.slow
def test_the_engine_tells_the_plan_how_many_bytes_they_have(root: Path) -> None:
    directory = shared(root, "qwen3-moe")
    with Engine.open(directory, fast=True) as engine:
        (told,) = [row.reason for row in engine.plan.choices if row.name == "fast"]
    assert "% of the weights" in told, "experts go another way"


def test_where_it_changes_nothing_the_plan_says_so() -> None:
    here = measured(fast_row_bytes_per_s=2e10)
    assert compute_s(here, "float32", fast_rows=True) == (compute_s(here, "float32")[0], [("fast", "no difference")])


def test_it_is_for_the_processor() -> None:
    with pytest.raises(InvalidSetting, match="fast"):
        Engine.open("nowhere", device=SimulatedAccelerator(), fast=True)
