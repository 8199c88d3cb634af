"""The simulated accelerator: right programs pass whatever the schedule; each fault is found, and both sides named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from device_programs import PAGE, PROGRAMS, Program, add_up, chain, one_copy, ring, slab_of
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import errors
from headrace.copying.device import Event
from headrace.copying.slots import Slab
from headrace.testing import Hazard, SimulatedAccelerator, SimulatedStream

POLICIES = ("random", "late", "early")
every_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture
def device() -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator() as accelerator:
        yield accelerator


def locked_slab(device: SimulatedAccelerator, value: int = 1, nbytes: int = PAGE) -> Slab:
    slab = slab_of(value, nbytes)
    assert device.page_lock(slab) is None
    return slab


def expect(kind: str, *, earlier: str | None, later: str, within: Callable[[], object]) -> Hazard:
    """Run what is wrong, and see that both sides of it are named, with the lines of this file that asked for them."""
    with pytest.raises(Hazard) as caught:
        within()
    hazard = caught.value
    assert hazard.kind == kind, hazard
    assert later in str(hazard.later), hazard
    assert "test_testing_device.py" in hazard.later.where, hazard
    if earlier is None:
        assert hazard.earlier is None, hazard
    else:
        assert hazard.earlier is not None, hazard
        assert earlier in str(hazard.earlier), hazard
        assert "test_testing_device.py" in hazard.earlier.where, hazard
        assert str(hazard.earlier) in str(hazard)
    assert str(hazard.later) in str(hazard)
    return hazard


# --- right programs -----------------------------------------------------------------------------------------------


def run(program: Program, device: SimulatedAccelerator) -> None:
    with device:
        computed, expected = program(device)
        assert computed == expected
        device.check()


@pytest.mark.slow
@every_policy
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_right_program_is_right_whatever_the_schedule(program: Program, policy: str) -> None:
    for seed in range(150 if policy == "random" else 1):
        run(program, SimulatedAccelerator(seed, policy=policy))  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(POLICIES))
def test_a_ring_of_any_size_is_right(blocks: int, slots: int, passes: int, seed: int, policy: str) -> None:
    device = SimulatedAccelerator(seed, policy=policy)  # type: ignore[arg-type]
    run(lambda device: ring(device, blocks=blocks, slots=slots, passes=passes), device)


# --- wrong programs: right ones that forget something ----------------------------------------------------------------


class Forgetful(SimulatedAccelerator):
    """Forgets one of the waits between streams that mean something."""

    def __init__(self, forgotten: int, seed: int) -> None:
        self.waits = 0
        self.forgotten = forgotten
        super().__init__(seed)

    def new_stream(self) -> SimulatedStream:
        stream, wait = super().new_stream(), SimulatedStream.wait

        def sometimes(event: Event) -> None:
            self.waits += event.point is not None  # type: ignore[attr-defined]
            if self.waits != self.forgotten or event.point is None:  # type: ignore[attr-defined]
                wait(stream, event)

        stream.wait = sometimes  # type: ignore[method-assign]
        return stream


@pytest.mark.slow
@pytest.mark.parametrize("program", [one_copy, ring, chain], ids=lambda program: program.__name__)
@pytest.mark.parametrize("seed", range(5))
def test_no_wait_can_be_forgotten(program: Program, seed: int) -> None:
    whole = Forgetful(0, seed)
    run(program, whole)
    assert whole.waits > 0
    for forgotten in range(1, whole.waits + 1):
        with Forgetful(forgotten, seed) as device, pytest.raises(Hazard) as caught:
            program(device)
        assert caught.value.kind in ("read-before-ready", "write-while-in-use")
        assert caught.value.earlier is not None


# --- each hazard ----------------------------------------------------------------------------------------------------


@every_policy
def test_read_before_ready(policy: str) -> None:
    with SimulatedAccelerator(policy=policy) as device:  # type: ignore[arg-type]
        slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
        device.copy(slot, slab.bytes, copying, page_locked=True)
        expect(
            "read-before-ready",
            earlier="copy of 4096 bytes to device memory 1 (moving weights) [0:4096] on stream 1",
            later="aten.sum.default on stream 0",
            within=lambda: add_up(slot),
        )


def test_an_event_recorded_too_early_orders_nothing(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
    early = device.new_event()
    early.record(copying)
    device.copy(slot, slab.bytes, copying, page_locked=True)
    device.current_stream().wait(early)
    expect("read-before-ready", earlier="copy", later="aten.sum", within=lambda: add_up(slot))


def test_a_stream_waits_for_the_point_that_an_event_had_when_it_was_asked_to(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
    event = device.new_event()
    event.record(copying)
    device.current_stream().wait(event)
    device.copy(slot, slab.bytes, copying, page_locked=True)
    event.record(copying)
    expect("read-before-ready", earlier="copy", later="aten.sum", within=lambda: add_up(slot))


@every_policy
def test_a_kernel_that_has_returned_may_still_be_reading(policy: str) -> None:
    """Python is ahead of the device: a copy over what the kernel read has to wait for an event after it."""
    with SimulatedAccelerator(policy=policy) as device:  # type: ignore[arg-type]
        slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
        device.copy(slot, slab.bytes, copying, page_locked=True)
        device.wait_idle()
        add_up(slot)
        expect(
            "write-while-in-use",
            earlier="aten.sum.default on stream 0",
            later="copy of 4096 bytes to device memory 1 (moving weights) [0:4096] on stream 1",
            within=lambda: device.copy(slot, slab.bytes, copying, page_locked=True),
        )


def test_two_copies_to_one_place(device: SimulatedAccelerator) -> None:
    slab, slot = locked_slab(device), device.allocate(PAGE)
    device.copy(slot[:100], slab.bytes[:100], device.new_stream(), page_locked=True)
    expect(
        "write-while-in-use",
        earlier="[0:100] on stream 1",
        later="[99:199] on stream 2",
        within=lambda: device.copy(slot[99:199], slab.bytes[:100], device.new_stream(), page_locked=True),
    )


def test_a_kernel_on_another_stream(device: SimulatedAccelerator) -> None:
    slot = device.allocate(PAGE)
    slot.fill_(1)
    with device.stream(device.new_stream()):
        expect("read-before-ready", earlier="aten.fill_", later="aten.sum.default on stream 1", within=slot.sum)


def test_never_written(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
    device.copy(slot[:100], slab.bytes[:100], copying, page_locked=True)
    device.wait_idle()
    assert slot[:100].sum().item() == 100
    expect("never-written", earlier=None, later="aten.sum", within=lambda: slot[:101].sum())


def test_what_was_not_written_is_poison(device: SimulatedAccelerator) -> None:
    memory = device.allocate(64)
    assert memory.data_ptr() % 128 == 64, "aligned as promised, and no better"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert all(value != value for value in memory.view(dtype).tolist())


def test_use_after_free(device: SimulatedAccelerator) -> None:
    slot = device.allocate(PAGE, "a slot")
    slot.fill_(1)
    device.wait_idle()
    device.free(slot)
    assert set(slot.tolist()) == {255}
    expect("use-after-free", earlier="free of device memory 1 (a slot)", later="aten.sum", within=slot.sum)
    expect("use-after-free", earlier="free", later="free", within=lambda: device.free(slot))


def test_free_while_a_copy_is_under_way(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
    device.copy(slot, slab.bytes, copying, page_locked=True)
    expect("use-after-free", earlier="copy", later="free of", within=lambda: device.free(slot))


def test_free_while_a_kernel_may_be_reading(device: SimulatedAccelerator) -> None:
    slot = device.allocate(PAGE)
    slot.fill_(1)
    expect("use-after-free", earlier="aten.fill_", later="free of", within=lambda: device.free(slot))


def test_unlock_while_a_copy_is_under_way(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
    device.copy(slot, slab.bytes, copying, page_locked=True)
    expect("use-after-free", earlier="copy", later="unlock of", within=lambda: device.unlock(slab))


@every_policy
def test_an_operator_that_changes_what_is_being_copied(policy: str) -> None:
    with SimulatedAccelerator(policy=policy) as device:  # type: ignore[arg-type]
        slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
        device.copy(slot, slab.bytes, copying, page_locked=True)
        kind = "source-changed-while-copied"
        expect(kind, earlier="copy", later="aten.fill_", within=lambda: slab.bytes.fill_(2))


def test_a_write_that_was_told_of(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(64), device.new_stream()
    device.copy(slot, slab.bytes[64:128], copying, page_locked=True)
    device.host_write(slab, 0, 64)
    device.host_write(slab, 128)
    within = lambda: device.host_write(slab, 100, 1)  # noqa: E731
    expect("source-changed-while-copied", earlier="copy", later="write of 1 bytes to", within=within)


@every_policy
def test_a_write_that_nobody_told_of(policy: str) -> None:
    """The bytes are compared when the host learns that the copy is done, however early it really happened."""
    with SimulatedAccelerator(policy=policy) as device:  # type: ignore[arg-type]
        slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
        device.copy(slot, slab.bytes, copying, page_locked=True)
        slab.view()[7] = 9
        kind = "source-changed-while-copied"
        expect(kind, earlier="copy", later="look at what was copied", within=device.wait_idle)


def test_a_kernel_that_reads_in_place_while_the_host_writes(device: SimulatedAccelerator) -> None:
    slab = locked_slab(device)
    view = device.view(slab)
    add_up(view)
    within = lambda: slab.bytes.fill_(1)  # noqa: E731
    expect("source-changed-while-copied", earlier="aten.sum", later="aten.fill_", within=within)


def test_a_view_of_what_was_unlocked(device: SimulatedAccelerator) -> None:
    slab = locked_slab(device)
    view = device.view(slab)
    device.unlock(slab)
    expect("use-after-free", earlier="unlock", later="aten.sum", within=view.sum)


def test_a_copy_that_takes_memory_for_page_locked(device: SimulatedAccelerator) -> None:
    slab, slot, copying = slab_of(1), device.allocate(PAGE), device.new_stream()
    within = lambda: device.copy(slot, slab.bytes, copying, page_locked=True)  # noqa: E731
    expect("not-page-locked", earlier=None, later="copy", within=within)
    assert device.page_lock(slab) is None
    device.unlock(slab)
    expect("not-page-locked", earlier="unlock", later="copy", within=within)


def test_a_copy_to_nowhere(device: SimulatedAccelerator) -> None:
    slab, copying = locked_slab(device), device.new_stream()
    target = torch.zeros(PAGE, dtype=torch.uint8)
    within = lambda: device.copy(target, slab.bytes, copying, page_locked=True)  # noqa: E731
    expect("out-of-bounds", earlier=None, later="copy of 4096 bytes to elsewhere", within=within)


def test_a_copy_that_nobody_waited_for(device: SimulatedAccelerator) -> None:
    slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
    device.copy(slot, slab.bytes, copying, page_locked=True)
    expect("never-waited-for", earlier="copy", later="the end", within=device.check)


def test_memory_that_was_not_freed(device: SimulatedAccelerator) -> None:
    slot = device.allocate(PAGE)
    expect("leak", earlier="allocation of 4096 bytes", later="the end", within=device.check)
    device.free(slot)


def test_memory_that_is_still_page_locked(device: SimulatedAccelerator) -> None:
    slab = locked_slab(device)
    expect("leak", earlier="page-lock of 4096 bytes", later="the end", within=device.check)
    device.unlock(slab)


def test_what_was_swallowed_comes_back(device: SimulatedAccelerator) -> None:
    slot = device.allocate(PAGE)
    with pytest.raises(Hazard) as first:
        slot.sum()
    device.wait_idle()
    device.free(slot)
    with pytest.raises(Hazard) as again:
        device.check()
    assert again.value is first.value


@pytest.mark.parametrize(("policy", "total"), [("early", PAGE), ("late", 255 * PAGE)])
def test_hazards_can_be_collected_and_luck_decides_what_is_computed(policy: str, total: int) -> None:
    with SimulatedAccelerator(policy=policy, raise_at_once=False) as device:  # type: ignore[arg-type]
        slab, slot, copying = locked_slab(device), device.allocate(PAGE), device.new_stream()
        device.copy(slot, slab.bytes, copying, page_locked=True)
        assert add_up(slot).item() == total
        assert add_up(slot).item() == total
    assert [hazard.kind for hazard in device.hazards] == ["read-before-ready"] * 2
    assert isinstance(device.hazards[0], AssertionError)


def test_a_seed_is_a_schedule() -> None:
    """Also for programs that are wrong: what is computed is the same again."""

    def wrong(seed: int) -> list[float]:
        with SimulatedAccelerator(seed, raise_at_once=False) as device:
            slabs = [locked_slab(device, number + 1) for number in range(4)]
            slots, copying = [device.allocate(PAGE) for _ in slabs], [device.new_stream() for _ in slabs]
            for slab, slot, stream in zip(slabs, slots, copying, strict=True):
                device.copy(slot, slab.bytes, stream, page_locked=True)
            return [add_up(slot).item() for slot in slots]

    outcomes = [wrong(seed) for seed in range(20)]
    assert outcomes == [wrong(seed) for seed in range(20)]
    assert len({tuple(outcome) for outcome in outcomes}) > 5, "seeds differ"


# --- events, streams, threads ---------------------------------------------------------------------------------------


def test_an_event_that_was_never_recorded_is_done(device: SimulatedAccelerator) -> None:
    event = device.new_event()
    event.wait_done()
    device.current_stream().wait(event)
    assert event.done


def test_who_polls_an_event_gets_there_and_not_at_once() -> None:
    with SimulatedAccelerator(policy="late") as device:
        slab, slot, copying, arrived = (
            locked_slab(device),
            device.allocate(PAGE),
            device.new_stream(),
            device.new_event(),
        )
        device.copy(slot, slab.bytes, copying, page_locked=True)
        arrived.record(copying)
        assert not arrived.done
        polls = 1
        while not arrived.done:
            polls += 1
        assert 1 < polls < 10
        assert slot.eq(1).all()


def test_a_result_that_the_host_looks_at_has_been_waited_for(device: SimulatedAccelerator) -> None:
    slab, slot, copying, arrived = locked_slab(device), device.allocate(PAGE), device.new_stream(), device.new_event()
    device.copy(slot, slab.bytes, copying, page_locked=True)
    arrived.record(copying)
    device.current_stream().wait(arrived)
    assert slot.sum().item() == PAGE
    device.free(slot)  # no wait besides `item`
    device.unlock(slab)
    device.check()


def test_each_thread_has_its_own_operators_and_its_own_current_stream(device: SimulatedAccelerator) -> None:
    found: list[str] = []

    def elsewhere() -> None:
        with device, device.stream(other):
            found.append(device.current_stream().name)
            try:
                slot.sum()
            except Hazard as hazard:
                found.append(hazard.later.timeline.name)

    slot, other = device.allocate(PAGE), device.new_stream()
    slot.fill_(1)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["stream 1", "stream 1"]
    assert device.current_stream().name == "stream 0"


def test_operators_outside_of_the_context_are_nobodys(device: SimulatedAccelerator) -> None:
    with SimulatedAccelerator() as other:
        memory = other.allocate(8)
    kernels = other.kernels
    memory.fill_(1)
    assert other.kernels == kernels


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_has_a_limit() -> None:
    device = SimulatedAccelerator(memory_bytes=1000)
    first = device.allocate(600)
    with pytest.raises(errors.OutOfDeviceMemory) as caught:
        device.allocate(500, "a slot")
    assert caught.value.facts == {"purpose": "a slot", "requested_bytes": 500, "free_bytes": 400, "total_bytes": 1000}
    device.free(first)
    second = device.allocate(1000)
    assert (device.allocated_bytes, device.peak_allocated_bytes) == (1000, 1000)
    assert device.allocate(0).shape == (0,)
    device.free(second)
    device.free(torch.empty(0, dtype=torch.uint8))
    device.check()


def test_page_locks_are_counted_to_the_byte_and_can_be_refused() -> None:
    device = SimulatedAccelerator()
    slab = Slab(3 * PAGE)
    assert device.page_lock(slab) is None
    assert device.page_locked_bytes == slab.nbytes
    assert device.page_lock(slab) == "it is page-locked already"
    device.refuse_page_lock = "RLIMIT_MEMLOCK is 64 KiB"
    assert device.page_lock(Slab(PAGE)) == "RLIMIT_MEMLOCK is 64 KiB"
    device.unlock(slab)
    assert device.page_locked_bytes == 0
    device.check()


def test_a_view_shows_the_slab_or_what_it_was() -> None:
    for coherent in (True, False):
        with SimulatedAccelerator(coherent=coherent) as device:
            slab = locked_slab(device, 1)
            view = device.view(slab)
            slab.bytes.fill_(2)
            assert view[PAGE // 2 :].sum().item() == (2 if coherent else 1) * PAGE // 2
    with pytest.raises(errors.Reason):
        SimulatedAccelerator(unified=False).view(slab)


# --- time -----------------------------------------------------------------------------------------------------------


def test_copies_take_their_time_one_after_the_other_over_all_streams() -> None:
    device = SimulatedAccelerator(copy_latency_s=1.0, copy_bytes_per_s=PAGE)
    slab, slot = locked_slab(device), device.allocate(2 * PAGE)
    for begin in (0, PAGE):
        device.copy(slot[begin : begin + PAGE], slab.bytes, device.new_stream(), page_locked=True)
    assert device.makespan_s == 4.0
    assert (device.copies, device.copied_bytes) == (2, 2 * PAGE)


@pytest.mark.parametrize(("kernel_s", "copy_s"), [(1.0, 0.5), (1.0, 1.0), (0.25, 1.0)])
def test_a_ring_hides_the_shorter_of_copying_and_computing(kernel_s: float, copy_s: float) -> None:
    blocks, passes = 10, 4
    steps, hidden, not_hidden = blocks * passes, max(kernel_s, copy_s), kernel_s + copy_s
    for slots, step_s in ((3, hidden), (1, not_hidden)):
        with SimulatedAccelerator(copy_latency_s=0, copy_bytes_per_s=PAGE / copy_s, kernel_s=kernel_s) as device:
            ring(device, blocks=blocks, slots=slots, passes=passes)
            assert steps * step_s <= device.makespan_s <= 1.05 * steps * step_s
            assert device.current_stream().busy_s == steps * kernel_s


def test_kernels_cost_what_a_function_says_and_events_tell_the_time() -> None:
    with SimulatedAccelerator(kernel_s=lambda name, nbytes: nbytes if name == "aten.sum.default" else 0) as device:
        slot, begin, end = device.allocate(8), device.new_event(), device.new_event()
        slot.fill_(1)
        begin.record(device.current_stream())
        slot.sum()
        slot[:4].sum()
        end.record(device.current_stream())
        assert end.seconds_since(begin) == 12
