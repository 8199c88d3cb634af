"""Graphs: a replay is what running eagerly is, bit for bit, and what a capture must not do is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from device_programs import PAGE, slab_of
from torch import nn

from headrace.copying.slots import Slab
from headrace.testing import Hazard, SimulatedAccelerator

POLICIES = ("random", "late", "early")


class Streamed:
    """Linear layers in page-locked memory that go through a ring of slots, for one pass after the other."""

    def __init__(self, device: SimulatedAccelerator, *, layers: int = 5, slots: int = 2, width: int = 8) -> None:
        torch.manual_seed(0)
        self.device, self.copying = device, device.new_stream()
        self.slabs = [Slab(width * width * 4) for _ in range(layers)]
        for slab in self.slabs:
            slab.bytes[: width * width * 4].view(torch.float32).copy_(torch.randn(width * width))
            assert device.page_lock(slab) is None
        self.memory = [device.allocate(width * width * 4) for _ in range(slots)]
        self.weights = [piece.view(torch.float32).view(width, width) for piece in self.memory]
        self.hidden = torch.randn(3, width)
        """The input: a graph reads it where it lies."""
        self.seen = torch.zeros(1)
        """What an operator changes in place, as a cache."""

    def run(self) -> torch.Tensor:
        """One pass: forks the copying stream, and joins it again."""
        device, copying = self.device, self.copying
        computing = device.current_stream()
        begin = device.new_event()
        begin.record(computing)
        copying.wait(begin)
        arrived = [device.new_event() for _ in self.memory]
        used = [device.new_event() for _ in self.memory]
        hidden = self.hidden
        for index, slab in enumerate(self.slabs):
            slot = index % len(self.memory)
            if index >= len(self.memory):
                copying.wait(used[slot])
            device.copy(self.memory[slot], slab.bytes[: self.memory[slot].numel()], copying, page_locked=True)
            arrived[slot].record(copying)
            computing.wait(arrived[slot])
            hidden = torch.relu(nn.functional.linear(hidden, self.weights[slot])) + 0.5
            self.seen += hidden.sum()
            used[slot].record(computing)
        return hidden

    def close(self) -> None:
        self.device.wait_idle()
        for piece in self.memory:
            self.device.free(piece)
        for slab in self.slabs:
            self.device.unlock(slab)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_replays_equal_eager_runs(policy: str, seed: int, inference: bool) -> None:
    mode: Callable[[], torch.inference_mode | torch.no_grad] = torch.inference_mode if inference else torch.no_grad
    with mode(), SimulatedAccelerator(seed, policy=policy) as device:  # type: ignore[arg-type]
        eager, captured = Streamed(device), Streamed(device)
        with device.capture() as graph:
            assert device.capturing
            result = captured.run()
        assert not device.capturing
        assert result.isnan().all(), "nothing has happened yet"
        assert captured.seen.item() == 0
        for number in range(3):
            for streamed in (eager, captured):
                streamed.hidden.fill_(number + 1)
            before = device.copies
            graph.replay()
            assert device.copies == before + len(captured.slabs)
            assert torch.equal(result, eager.run())
            assert torch.equal(captured.seen, eager.seen)
        assert captured.seen.item() != 0
        captured.close()
        eager.close()
        device.check()


def test_a_replay_comes_after_what_is_on_the_stream_and_before_what_comes_next() -> None:
    with torch.no_grad(), SimulatedAccelerator(policy="late") as device:
        streamed = Streamed(device, slots=5)
        with device.capture() as graph:
            streamed.run()
        streamed.memory[0].fill_(1)
        graph.replay()
        streamed.memory[0].fill_(1)
        graph.replay()
        streamed.close()
        device.check()


@pytest.fixture
def device() -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator() as accelerator:
        yield accelerator


def expect(kind: str, *, earlier: str, within: Callable[[], object]) -> None:
    with pytest.raises(Hazard) as caught:
        within()
    assert caught.value.kind == kind
    assert earlier in str(caught.value.earlier)


def test_what_was_freed_is_not_there_at_a_replay(device: SimulatedAccelerator) -> None:
    with torch.no_grad():
        streamed = Streamed(device)
        with device.capture() as graph:
            streamed.run()
        streamed.close()
        expect("not-page-locked", earlier="unlock", within=graph.replay)


def test_a_race_within_a_graph_is_found_at_its_replay(device: SimulatedAccelerator) -> None:
    slab, slot, copying = slab_of(1), device.allocate(PAGE), device.new_stream()
    assert device.page_lock(slab) is None
    with device.capture() as graph:
        fork, join = device.new_event(), device.new_event()
        fork.record(device.current_stream())
        copying.wait(fork)
        device.copy(slot, slab.bytes, copying, page_locked=True)
        slot.sum()
        join.record(copying)
        device.current_stream().wait(join)
    expect("read-before-ready", earlier="copy of 4096 bytes", within=graph.replay)


def test_an_event_from_outside(device: SimulatedAccelerator) -> None:
    event = device.new_event()
    event.record(device.new_stream())

    def within() -> None:
        with device.capture():
            device.current_stream().wait(event)

    expect("capture-isolation", earlier="record an event on stream 1", within=within)
    assert not device.capturing


def test_a_stream_that_is_not_joined_again(device: SimulatedAccelerator) -> None:
    slab, slot, copying = slab_of(1), device.allocate(PAGE), device.new_stream()
    assert device.page_lock(slab) is None

    def within() -> None:
        with device.capture():
            event = device.new_event()
            event.record(device.current_stream())
            copying.wait(event)
            device.copy(slot, slab.bytes, copying, page_locked=True)

    expect("capture-unjoined", earlier="copy of 4096 bytes on stream 1 (captured)", within=within)


def test_an_event_of_a_capture_outside_of_it(device: SimulatedAccelerator) -> None:
    event = device.new_event()
    with device.capture():
        event.record(device.current_stream())
    expect("captured-event", earlier="record an event", within=event.wait_done)
    expect("captured-event", earlier="record an event", within=lambda: event.done)
    expect("captured-event", earlier="record an event", within=lambda: device.current_stream().wait(event))


def copy_pageable(device: SimulatedAccelerator) -> None:
    source = torch.zeros(8, dtype=torch.uint8)
    device.copy(device.allocate(8), source, device.current_stream(), page_locked=False)


WAITS: dict[str, Callable[[SimulatedAccelerator], object]] = {
    "idle": lambda device: device.wait_idle(),
    "event": lambda device: device.new_event().wait_done(),
    "poll": lambda device: device.new_event().done,
    "item": lambda device: torch.ones(1).item(),
    "pageable": copy_pageable,
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_must_not_wait(device: SimulatedAccelerator, wait: str) -> None:
    def within() -> None:
        with device.capture():
            WAITS[wait](device)

    expect("capture-unsupported", earlier="begin of a capture", within=within)


def test_a_stream_outside_of_a_capture_works_on(device: SimulatedAccelerator) -> None:
    slab, slot, copying = slab_of(1), device.allocate(PAGE), device.new_stream()
    assert device.page_lock(slab) is None
    with device.capture() as graph:
        device.copy(slot, slab.bytes, copying, page_locked=True)
    device.wait_idle()
    assert slot.sum().item() == PAGE
    copies = device.copies
    graph.replay()
    assert device.copies == copies, "the graph is empty"
