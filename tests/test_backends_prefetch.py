"""Blocks read ahead into a ring: right in any order and after any failure, and cheap in the usual one."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stacks import FailingReader, Streamed, hidden, in_threads, stream

from headrace.copying import disk
from headrace.copying.disk import DiskReader
from headrace.errors import ClosedError, ReadError

Open = Callable[..., Streamed]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens streamed stacks; checks each and closes it at the end."""
    made: list[Streamed] = []

    def open_stack(count: int = 5, slots: int = 2, **options: Any) -> Streamed:
        directory = tmp_path / str(count)
        directory.mkdir(exist_ok=True)
        made.append(stream(directory, "prefetch", count, slots=slots, **options))
        return made[-1]

    yield open_stack
    for streamed in made:
        streamed.check()
        streamed.close()
        assert not any(thread.is_alive() for thread in streamed.reader._threads)


@pytest.mark.parametrize("slots", range(1, 8))
@pytest.mark.parametrize("count", range(1, 8))
def test_every_number_of_blocks_and_slots_gives_the_same_bits(opened: Open, count: int, slots: int) -> None:
    streamed = opened(count, slots)
    for rows in (1, 3, 1):  # prefill and decode have different shapes
        assert not streamed.wrong(rows)
    assert streamed.counters().slot_misses == 0
    assert streamed.counters().blocks_run == 3 * count
    assert streamed.counters().read_bytes >= streamed.offloaded_bytes
    assert len(streamed.backend.ring.slots) == min(slots, count)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "order",
    [
        [0, 2, 3, 4],  # one skipped
        [0, 1, 1, 2, 3, 4],  # one repeated
        [4, 3, 2, 1, 0],
        [0, 1],  # an early exit
        [2],
        [0, 1, 2, 0, 1, 2, 3, 4],  # a loop inside
    ],
)
def test_another_order_is_right_and_the_next_pass_in_order_too(opened: Open, slots: int, order: list[int]) -> None:
    streamed = opened(5, slots)
    in_order = list(range(5))
    assert not streamed.wrong()
    for _ in range(2):
        assert not streamed.wrong(2, order)
        streamed.check()
    assert not streamed.wrong()
    assert not streamed.wrong()
    expected = misses([*in_order, *order, *order, *in_order, *in_order], 5, slots)
    assert streamed.counters().slot_misses == expected


def misses(order: list[int], count: int, slots: int) -> int:
    """Between two blocks the ring holds the `slots` that come after the one that has run, and nothing else."""
    steps = itertools.pairwise([count - 1, *order])
    return sum(((after - before - 1) % count) >= slots for before, after in steps)


def test_what_a_jump_costs() -> None:
    in_order = [0, 1, 2, 3, 4]
    assert misses(in_order * 3, 5, 1) == 0
    assert misses([0, 2, 3, 4], 5, 1) == 1
    assert misses([0, 2, 3, 4], 5, 2) == 0
    assert misses(in_order[::-1], 5, 3) == 5
    assert misses(in_order[::-1], 5, 5) == 0


def test_random_orders_with_failures_are_right(opened: Open) -> None:
    streamed = opened(6, 3)
    dice = random.Random(5)
    ran: list[int] = []
    for _ in range(60):
        order = [dice.randrange(6) for _ in range(dice.randrange(1, 9))]
        failing = dice.choice([None, None, *order])
        if failing is None:
            assert not streamed.wrong(order=order)
            ran += order
        else:
            _fail_once(streamed, failing, dice.choice([ValueError, KeyboardInterrupt]))
            with pytest.raises((ValueError, KeyboardInterrupt)):
                streamed.model(hidden(), order)
            ran += order[: order.index(failing) + 1]
        streamed.check()
    assert streamed.counters().slot_misses == misses(ran, 6, 3)
    assert streamed.counters().read_bytes > streamed.offloaded_bytes


def _fail_once(streamed: Streamed, layer: int, error: type[BaseException]) -> None:
    def fail() -> None:
        streamed.model.layers[layer].inside = lambda: None
        raise error("from inside")

    streamed.model.layers[layer].inside = fail


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_after_an_exception_inside_a_layer_the_next_pass_is_right(opened: Open, layer: int, error: Any) -> None:
    streamed = opened()
    _fail_once(streamed, layer, error)
    with pytest.raises(error, match="from inside"):
        streamed.model(hidden())
    streamed.check()
    assert not streamed.wrong()
    assert streamed.counters().slot_misses == (0 if layer == 4 else 1)  # the next pass begins elsewhere


# --- blocks inside of blocks --------------------------------------------------------------------------------------


def _call_inside(streamed: Streamed, outer: int, inner: list[int]) -> list[Any]:
    """While `outer` runs, run `inner` one in the other; what the innermost gives is kept."""
    results: list[Any] = []
    layers = streamed.model.layers

    def run(rest: list[int]) -> None:
        if rest:
            layers[rest[0]].inside = lambda: run(rest[1:])
            results.append((rest[0], layers[rest[0]](hidden())))
            layers[rest[0]].inside = lambda: None

    layers[outer].inside = lambda: run(inner)
    return results


@pytest.mark.parametrize("inner", [[3], [1], [2], [2, 3], [2, 3, 4], [2, 3, 4, 0], [0, 4, 3, 2]])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_blocks_run_inside_of_a_block(opened: Open, slots: int, inner: list[int]) -> None:
    streamed = opened(5, slots)
    results = _call_inside(streamed, 1, [index for index in inner if index != 1])
    assert not streamed.wrong()
    for index, value in results:
        assert torch.equal(value, streamed.resident.layers[index](hidden()))
    assert streamed.counters().overflow_slots == max(0, len(results) + 1 - slots)
    streamed.check()
    streamed.model.layers[1].inside = lambda: None
    assert not streamed.wrong()


def test_a_block_is_entered_again_while_it_runs(opened: Open) -> None:
    streamed = opened()
    layer, expected = streamed.model.layers[2], streamed.resident.layers[2](hidden())
    results: list[Any] = []
    depth = itertools.count()

    def again() -> None:
        if next(depth) < 2:
            results.append(layer(hidden()))

    layer.inside = again
    assert not streamed.wrong()
    layer.inside = lambda: None
    assert len(results) == 2
    assert all(torch.equal(value, expected) for value in results)
    assert streamed.counters().slot_misses == 0


def test_an_exception_in_an_inner_block_frees_both(opened: Open) -> None:
    streamed = opened(5, 2)
    _call_inside(streamed, 1, [2, 3])
    _fail_once(streamed, 1, ValueError)
    with pytest.raises(ValueError, match="from inside"):
        streamed.model(hidden())

    def inner() -> None:
        _fail_once(streamed, 3, ValueError)
        streamed.model.layers[3](hidden())

    streamed.model.layers[1].inside = inner
    with pytest.raises(ValueError, match="from inside"):
        streamed.model(hidden())
    streamed.model.layers[1].inside = lambda: None
    streamed.check()
    assert not streamed.wrong()


# --- reads that fail, waits that are interrupted ------------------------------------------------------------------


def test_a_block_whose_read_failed_is_read_ahead_again(opened: Open) -> None:
    """Not on the spot, when it is its turn: only the first block of the next pass is not where it should be."""
    streamed = opened(5, 3, reader=FailingReader)
    streamed.reader.bad_offset = next(w.parts[0].segment.offset for w in streamed.weights if w.name == "layers.2.up")
    with pytest.raises(ReadError):
        streamed.model(hidden(), [*range(5), *range(5)])  # once around, if it was read ahead already
    before = streamed.counters().slot_misses
    assert not streamed.wrong()
    assert streamed.counters().slot_misses == before + 1


@pytest.mark.parametrize("name", ["layers.0.up", "layers.2.bias", "layers.4.eighth"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_read_error_fails_the_pass_and_the_next_is_right(opened: Open, slots: int, name: str) -> None:
    streamed = opened(5, slots, reader=FailingReader)
    assert not streamed.wrong()
    streamed.wait_idle()
    segment = next(weight.parts[0].segment for weight in streamed.weights if weight.name == name)
    streamed.reader.bad_offset = segment.offset
    raised: ReadError | None = None
    for _ in range(2):  # the first block may have been read already
        try:
            streamed.model(hidden())
        except ReadError as error:
            raised = error
            break
    assert raised is not None
    assert raised.file == str(streamed.path)
    assert raised.offset <= segment.offset + segment.nbytes  # of the read: it may begin before and end within
    assert segment.offset < raised.offset + raised.nbytes + 4096
    assert "Input/output error" in str(raised)
    assert str(raised.offset) in str(raised)
    streamed.check()
    for _ in range(2):
        assert not streamed.wrong()
    assert streamed.counters().read_errors == 1


def test_a_read_error_outside_of_the_ring_takes_nothing(opened: Open) -> None:
    streamed = opened(5, 1, reader=FailingReader)
    assert not streamed.wrong()
    streamed.wait_idle()
    segment = next(weight.parts[0].segment for weight in streamed.weights if weight.name == "layers.3.up")

    def inner() -> None:
        streamed.reader.bad_offset = segment.offset
        streamed.model.layers[3](hidden())

    streamed.model.layers[1].inside = inner
    with pytest.raises(ReadError):
        streamed.model(hidden())
    streamed.model.layers[1].inside = lambda: None
    streamed.check()
    assert not streamed.wrong()


def _interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, after: int = 0) -> list[str]:
    """The call number `after` raises KeyboardInterrupt, as Ctrl-C during the wait would."""
    real = getattr(owner, method)
    calls = itertools.count()
    raised: list[str] = []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and next(calls) == after:
            raised.append(method)
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, interrupted)
    return raised


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("method", ["wait", "wait_idle"])
def test_an_interrupt_while_a_block_is_waited_for(
    opened: Open, monkeypatch: pytest.MonkeyPatch, method: str, after: int
) -> None:
    """Backwards, each block is a miss: reads under way are cancelled and waited for, new ones are waited for."""
    streamed = opened(5, 2, reader=SlowReader)
    raised = _interrupt_once(monkeypatch, disk.Ticket, method, after)
    with pytest.raises(KeyboardInterrupt):
        streamed.model(hidden(), [4, 3, 2, 1, 0] * 50)
    assert raised
    streamed.check()
    for _ in range(2):
        assert not streamed.wrong()
        assert not streamed.wrong(order=[4, 3, 2, 1, 0])


@pytest.mark.parametrize("after", range(8))
def test_an_interrupt_before_a_read_is_submitted(opened: Open, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    streamed = opened(5, 3)
    assert not streamed.wrong()
    _interrupt_once(monkeypatch, DiskReader, "submit", after)
    with pytest.raises(KeyboardInterrupt):
        streamed.model(hidden(), [0, 1, 2, 3, 4] * 3)
    for _ in range(2):
        assert not streamed.wrong()
    streamed.check()


class SlowReader(DiskReader):
    """Gives other threads every chance to be first, without a clock."""

    def _pread(self, file: Any, into: memoryview, offset: int) -> int:
        for _ in range(20):
            threading.Event().wait(0)
        return super()._pread(file, into, offset)


# --- threads, models, closing -------------------------------------------------------------------------------------


def test_two_models_interleaved(opened: Open) -> None:
    one, other = opened(5, 2), opened(4, 3)
    expected_one, expected_other = one.resident(hidden()), other.resident(hidden())
    left, right = hidden(), hidden()
    for index in range(5):
        left = one.model.layers[index](left)
        if index < 4:
            right = other.model.layers[index](right)
    assert torch.equal(left, expected_one)
    assert torch.equal(right, expected_other)
    assert one.counters().slot_misses == other.counters().slot_misses == 0


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_two_threads_on_one_model(opened: Open, slots: int) -> None:
    streamed = opened(5, slots)
    results = in_threads(*[lambda rows=rows: [streamed.wrong(rows) for _ in range(20)] for rows in (1, 2)])
    assert results == [[False] * 20] * 2
    assert streamed.counters().slot_misses == 0  # passes wait for each other, so each is in order


def test_two_threads_that_call_blocks_themselves(opened: Open) -> None:
    streamed = opened(5, 2)

    def walk(order: list[int]) -> bool:
        value, expected = hidden(), hidden()
        for index in order:
            value = streamed.model.layers[index](value)
            expected = streamed.resident.layers[index](expected)
        return torch.equal(value, expected)

    assert in_threads(lambda: walk([0, 1, 2, 3, 4] * 8), lambda: walk([4, 2, 0, 3, 1] * 8)) == [True, True]


def test_closed_is_closed(opened: Open) -> None:
    streamed = opened()
    assert not streamed.wrong()
    for _ in range(2):
        streamed.close()
        with pytest.raises(ClosedError):
            streamed.model(hidden())
        with pytest.raises(ClosedError):
            streamed.model.layers[3](hidden())


def test_close_from_inside_of_a_layer_ends_the_pass_after_it(opened: Open) -> None:
    streamed = opened()
    reached: list[int] = []

    def close() -> None:
        reached.append(2)
        streamed.backend.close()

    streamed.model.layers[2].inside = close
    with pytest.raises(ClosedError):
        streamed.model(hidden())
    assert reached == [2]


def test_close_from_another_thread_waits_for_the_pass(opened: Open) -> None:
    streamed = opened()
    inside, closing = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert closing.wait(60)

    streamed.model.layers[2].inside = pause

    def close() -> None:
        assert inside.wait(60)
        closing.set()
        streamed.close()

    wrong, _ = in_threads(streamed.wrong, close)
    assert wrong is False
    with pytest.raises(ClosedError):
        streamed.model(hidden())


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "slots"), [(5, 2), (7, 3), (6, 1)])
def test_a_pass_reads_what_is_offloaded_and_writes_nothing(opened: Open, count: int, slots: int) -> None:
    streamed = opened(count, slots)
    before = _files(streamed.path.parent)
    assert not streamed.wrong()
    streamed.wait_idle()
    start = streamed.counters().read_bytes
    for _ in range(4):
        assert not streamed.wrong()
    streamed.wait_idle()
    read = (streamed.counters().read_bytes - start) / 4
    assert streamed.offloaded_bytes <= read <= 1.02 * streamed.offloaded_bytes + 2 * 4096 * count
    assert _files(streamed.path.parent) == before


def _files(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


def test_a_ring_with_a_slot_for_every_block_is_read_once(opened: Open) -> None:
    streamed = opened(4, 4)
    assert not streamed.wrong()
    streamed.wait_idle()
    start = streamed.counters().read_bytes
    for _ in range(3):
        assert not streamed.wrong()
    assert streamed.counters().read_bytes == start >= streamed.offloaded_bytes


def test_tensors_in_slots_are_aligned(opened: Open) -> None:
    streamed = opened()
    seen: list[int] = []

    def look() -> None:
        for layer in streamed.model.layers:
            seen.extend(p.data_ptr() for p in layer.parameters() if not p.is_meta and p.numel() and p.dtype.itemsize)

    shared = streamed.model.layers[0].shared.data_ptr()
    for layer in streamed.model.layers:
        layer.inside = look
    streamed.model(hidden())
    in_slots = [address for address in seen if address != shared]
    assert len(in_slots) >= 6 * 5
    assert not [address for address in in_slots if address % 64]


def test_outside_of_a_pass_no_layer_holds_data(opened: Open) -> None:
    streamed = opened()
    assert not streamed.wrong()
    for weight in streamed.weights:
        for site in weight.sites:
            assert site.module._parameters[site.attribute] is weight.meta


@pytest.mark.slow
def test_memory_that_is_read_into_outlives_a_model_that_is_forgotten(tmp_path: Path) -> None:
    """The collector may run on a reader's thread, in the middle of a read into the slot of a model that is gone."""
    import gc
    import weakref

    go, collected = threading.Event(), threading.Event()
    slab_ref: list[Any] = []
    alive: list[bool] = []

    class Reader(DiskReader):
        def _pread(self, file: Any, into: memoryview, offset: int) -> int:
            assert go.wait(60)
            gc.collect()
            alive.append(slab_ref[0]() is not None)
            collected.set()
            return super()._pread(file, into, offset)

    gc.disable()
    try:
        streamed = stream(tmp_path, "prefetch", 1, slots=1, reader=Reader)
        slab_ref.append(weakref.ref(streamed.backend.ring.slots[0]))
        reader = streamed.reader
        del streamed
        go.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    reader.close()
    assert alive[0]
    gc.collect()
    assert slab_ref[0]() is None
