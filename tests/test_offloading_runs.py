"""Passes of an offloaded module: any order, any failure, many threads, and no gradients."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import threading
from typing import Any

import pytest
import torch
from fakes import ScriptedReader
from tiny_modules import WIDTH, kinds, random, randomized, same, snapshot, stack, twin
from tiny_offloads import ALL, MAPPED, X, groups, open_files, proves, resident_bytes
from tiny_stacks import in_threads
from torch import nn

from headrace import backing
from headrace.config import OffloadConfig
from headrace.errors import (
    GradientsNeeded,
    OffloadedWeightsError,
    ReadError,
)
from headrace.offloading import offload

pytestmark = pytest.mark.usefixtures("without_gradients")


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
    threads, descriptors = threading.active_count(), open_files()
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
    rss_after_first = resident_bytes()
    assert outcomes.count("wrong") == 0
    assert outcomes.count("right") + outcomes.count("error") == 1000
    assert 50 <= outcomes.count("error") <= 120, outcomes.count("error")
    assert handle.statistics().read_errors >= outcomes.count("error")
    count = itertools.count()
    in_threads(*[lambda number=number: run(number) for number in range(10)])
    assert resident_bytes() - rss_after_first < 2 * 2**20  # what the first thousand took is all there is
    module.layers[0].inside = None
    reader.last.script = lambda offset: None
    handle.close()
    assert same(snapshot(module), before)
    gc.collect()
    assert (threading.active_count(), open_files()) == (threads, descriptors)
