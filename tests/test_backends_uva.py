"""Weights used where the file is mapped: the same bits, none of it in memory afterwards, whatever happens."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stacks import Streamed, hidden, in_threads, stream

from headrace.backends import uva
from headrace.backends.uva import IN_PLACE_ALIGNMENT, MappedFile
from headrace.errors import ClosedError, ReadError, WeightChanged

Open = Callable[..., Streamed]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[Streamed] = []

    def open_stack(count: int = 5) -> Streamed:
        directory = tmp_path / str(count)
        directory.mkdir(exist_ok=True)
        made.append(stream(directory, "uva", count))
        return made[-1]

    yield open_stack
    for streamed in made:
        streamed.check()
        assert not streamed.backend._bound
        streamed.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_same_bits(opened: Open, count: int) -> None:
    streamed = opened(count)
    for rows in (1, 3, 1):
        assert not streamed.wrong(rows)
    assert streamed.counters().blocks_run == 3 * count
    assert streamed.offloaded_bytes > 0
    assert streamed.counters().read_bytes == 0  # the mapping reads, not we


def test_some_is_used_in_place_and_the_rest_is_copied(opened: Open) -> None:
    """The file of the stacks holds tensors at all kinds of offsets."""
    streamed = opened()
    aligned = [w for w in streamed.weights if w.parts[0].segment.offset % IN_PLACE_ALIGNMENT == 0]
    assert 0 < len(aligned) < len(streamed.weights)
    copied = sum(weight.nbytes for weight in streamed.weights if weight not in aligned)
    assert streamed.backend.copied_bytes == copied > 0
    assert 0 < streamed.backend.allocated_bytes < streamed.offloaded_bytes
    mapping = streamed.backend._files["model.safetensors"]
    inside: list[bool] = []

    def look() -> None:
        for name, parameter in streamed.model.layers[2].named_parameters():
            weight = next((w for w in streamed.weights if w.name == f"layers.2.{name}"), None)
            if weight is not None and weight.nbytes:
                in_file = 0 <= parameter.data_ptr() - mapping.address < len(mapping.bytes)
                assert in_file == (weight in aligned)
                assert parameter.data_ptr() % (IN_PLACE_ALIGNMENT if in_file else 64) == 0
                inside.append(in_file)

    streamed.model.layers[2].inside = look
    assert not streamed.wrong()
    assert len(inside) == 6


@pytest.mark.parametrize("order", [[0, 2, 4], [1, 1, 1], [4, 3, 2, 1, 0], [2]])
def test_any_order(opened: Open, order: list[int]) -> None:
    streamed = opened()
    assert not streamed.wrong(order=order)
    assert not streamed.wrong()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_inside_a_layer(opened: Open, error: Any) -> None:
    streamed = opened()

    def fail() -> None:
        raise error("from inside")

    streamed.model.layers[2].inside = fail
    with pytest.raises(error, match="from inside"):
        streamed.model(hidden())
    streamed.check()
    streamed.model.layers[2].inside = lambda: None
    assert not streamed.wrong()


def test_an_interrupt_while_a_block_is_copied(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = opened()
    real, calls = uva.UvaBackend._copy, itertools.count()

    def interrupted(self: Any, *args: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(uva.UvaBackend, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        streamed.model(hidden())
    streamed.check()
    assert not streamed.wrong()


@pytest.mark.parametrize("inner", [[3], [2, 3], [2, 3, 4, 0]])
def test_blocks_run_inside_of_a_block(opened: Open, inner: list[int]) -> None:
    streamed = opened()
    layers, results = streamed.model.layers, []

    def run(rest: list[int]) -> None:
        if rest:
            layers[rest[0]].inside = lambda: run(rest[1:])
            results.append((rest[0], layers[rest[0]](hidden())))
            layers[rest[0]].inside = lambda: None

    layers[1].inside = lambda: run(inner)
    assert not streamed.wrong()
    assert len(results) == len(inner)
    assert all(torch.equal(value, streamed.resident.layers[index](hidden())) for index, value in results)
    assert streamed.counters().overflow_slots == len(inner)


def test_a_block_is_entered_again_while_it_runs(opened: Open) -> None:
    streamed = opened()
    layer, depth, results = streamed.model.layers[2], itertools.count(), []

    def again() -> None:
        if next(depth) < 2:
            results.append(layer(hidden()))

    layer.inside = again
    assert not streamed.wrong()
    assert len(results) == 2
    assert all(torch.equal(value, streamed.resident.layers[2](hidden())) for value in results)


def test_two_threads_and_two_models(opened: Open) -> None:
    one, other = opened(5), opened(4)
    jobs = [lambda s=s, rows=rows: [s.wrong(rows) for _ in range(10)] for s in (one, other) for rows in (1, 2)]
    assert in_threads(*jobs) == [[False] * 10] * 4


def test_pages_are_given_back_after_each_block(opened: Open) -> None:
    streamed = opened()
    advice: list[int] = []
    mapping = streamed.backend._files["model.safetensors"]
    real = mapping.advise
    mapping.advise = lambda what, offset, nbytes: (advice.append(what), real(what, offset, nbytes))
    assert not streamed.wrong()
    assert advice.count(mmap.MADV_DONTNEED) == advice.count(mmap.MADV_WILLNEED) == len(streamed.weights)


def test_nothing_is_written_to_the_file_even_if_a_model_writes_to_its_weights(opened: Open) -> None:
    streamed = opened()
    before = (streamed.path.read_bytes(), streamed.path.stat().st_mtime_ns)
    layer = streamed.model.layers[1]
    layer.inside = lambda: [parameter.data.zero_() for parameter in (layer.up, layer.bias, layer.down)]
    with pytest.raises(WeightChanged):
        streamed.model(hidden())
    layer.inside = lambda: None
    assert (streamed.path.read_bytes(), streamed.path.stat().st_mtime_ns) == before
    assert not streamed.wrong()


def test_closed_is_closed(opened: Open) -> None:
    streamed = opened()
    assert not streamed.wrong()
    for _ in range(2):
        streamed.close()
        with pytest.raises(ClosedError):
            streamed.model(hidden())


def test_close_from_inside_of_a_layer(opened: Open) -> None:
    streamed = opened()
    streamed.model.layers[2].inside = streamed.backend.close
    with pytest.raises(ClosedError):
        streamed.model(hidden())
    streamed.check()


def test_close_from_another_thread_waits_for_the_pass(opened: Open) -> None:
    streamed = opened()
    inside, closing = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert closing.wait(60)

    def close() -> None:
        assert inside.wait(60)
        closing.set()
        streamed.backend.close()

    streamed.model.layers[2].inside = pause
    assert in_threads(streamed.wrong, close)[0] is False


def test_a_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    whole.write_bytes(b"x")
    empty.write_bytes(b"")
    assert bytes(MappedFile(whole).bytes.tolist()) == b"x"
    with pytest.raises(ReadError) as caught:
        MappedFile(empty)
    assert caught.value.file == str(empty)
