"""The ring of an accelerator, on a simulated one: whatever its copies do, every run finds its own weights.

The simulation finds every access that is not ordered, whether or not it did harm, so each of these tests also says that
nothing is read before it arrived, written while in use or used after it was freed.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes import ScriptedReader, broken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_stacks import in_threads
from torch import nn

import headrace
from headrace import OffloadConfig, backing
from headrace.errors import CannotCapture, ReadError
from headrace.testing import SimulatedAccelerator

WIDTH = 16


class Layer(nn.Module):
    """One operator; sizes and dtypes differ from layer to layer, and every weight changes the result."""

    def __init__(self, index: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1000 * seed + index)
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float64)[index % 4]
        rows = 1 + (index * 7 + seed) % 5
        self.weight = nn.Parameter(torch.randn(rows, WIDTH, generator=generator).to(dtype), requires_grad=False)
        self.offset = nn.Parameter(torch.randn((), generator=generator), requires_grad=False)
        counts = torch.randint(-4, 5, (3,), generator=generator, dtype=torch.int8)
        self.counts = nn.Parameter(counts, requires_grad=False)
        self.fails = False
        self.inside: Callable[[], None] = lambda: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inside()
        hidden = torch.sin(hidden + self.weight.sum(0)) + self.offset
        if self.fails:
            self.fails = False
            raise ValueError("from inside")
        return hidden * self.counts.sum()


class Stack(nn.Module):
    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, seed) for index in range(count))

    def forward(self, hidden: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for index in range(len(self.layers)) if order is None else order:
            hidden = self.layers[index](hidden)
        return hidden


def hidden(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def groups(size: int = 1, number: int = 1, step: int = 1) -> OffloadConfig:
    return OffloadConfig.model_validate(
        {
            "prefetch": {
                "offload_group_size": size,
                "offload_num_in_group": number,
                "offload_prefetch_step": step,
            }
        }
    )


class DriverFailed(Exception):
    """What a driver says when a copy cannot be launched."""


class BreakingAccelerator(SimulatedAccelerator):
    """Refuses one copy: the one after so many others."""

    copies_until_failure: int | None = None

    def copy(self, *args: Any, **kwargs: Any) -> None:
        if self.copies_until_failure is not None:
            self.copies_until_failure -= 1
            if self.copies_until_failure < 0:
                self.copies_until_failure = None
                raise DriverFailed
        super().copy(*args, **kwargs)


@dataclass
class Offloaded:
    module: Any
    resident: Any
    handle: headrace.Handle

    @property
    def reader(self) -> ScriptedReader | None:
        """What reads the blocks that host memory does not hold."""
        reader = self.handle._backing.reader
        assert reader is None or isinstance(reader, ScriptedReader)
        return reader

    def check(self, rows: int = 1, order: list[int] | None = None) -> None:
        streamed = self.module(hidden(rows), order)
        assert torch.equal(streamed, self.resident(hidden(rows), order))


@contextlib.contextmanager
def offloaded(
    device: SimulatedAccelerator, count: int, config: OffloadConfig, *, seed: int = 0, **options: Any
) -> Iterator[Offloaded]:
    """A stack on the device; at the end it has its weights again, and the device nothing left over."""
    resident = Stack(count, seed).eval()
    module = copy.deepcopy(resident)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backing, "DiskReader", ScriptedReader)
        handle = headrace.offload(module, config, device=device, **options)
    assert handle.report().offloaded_bytes > 0
    yield Offloaded(module, resident, handle)
    handle.close()
    for mine, theirs in zip(module.state_dict().values(), resident.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_number_of_blocks_and_slots(subtests: Any) -> None:
    """The pairs that garbled tokens elsewhere (vllm-project/vllm#54975): slots that do not divide the blocks."""
    for count in range(1, 13):
        for step in range(1, 13):
            device = SimulatedAccelerator(seed=count * 13 + step)
            with subtests.test(count=count, step=step), device, torch.inference_mode():
                with offloaded(device, count, groups(step=step)) as made:
                    for rows in (1, 3, 1):
                        made.check(rows)
                    assert made.handle.statistics().slot_misses == 0
                    copies = step + 1 + 3 * count if step + 1 < count else count
                    assert made.handle.report().counters.copies == copies
                device.check()


@pytest.mark.parametrize("host_bytes", [None, 600])
@pytest.mark.parametrize("seed", range(5))
def test_two_models_take_turns(seed: int, host_bytes: int | None) -> None:
    device = SimulatedAccelerator(seed)
    with device, torch.inference_mode(), contextlib.ExitStack() as stack:
        one = stack.enter_context(offloaded(device, 5, groups(), host_memory=host_bytes, seed=1))
        other = stack.enter_context(offloaded(device, 7, groups(step=2), host_memory=host_bytes, seed=2))
        for order in ([0, 1], [2, 3, 4], [0, 4]):
            one.check(order=order)
            other.check(order=order)
    device.check()


@pytest.mark.parametrize("seed", range(5))
def test_two_threads_on_streams_of_their_own(seed: int) -> None:
    device = SimulatedAccelerator(seed)
    with device, torch.inference_mode(), offloaded(device, 5, groups(), host_memory=600) as made:

        def run() -> None:
            with device, torch.inference_mode(), device.stream(device.new_stream()):
                for rows in range(1, 6):
                    made.check(rows)

        in_threads(run, run)
        made.check()
    device.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_block_that_runs_within_itself_on_another_stream(seed: int) -> None:
    """Its slot is refilled only after both runs."""
    device = SimulatedAccelerator(seed)
    with device, torch.inference_mode(), offloaded(device, 5, groups()) as made:
        layer, other = made.module.layers[2], device.new_stream()

        def again() -> None:
            layer.inside = lambda: None
            with device.stream(other):
                layer(hidden())

        layer.inside = again
        made.check()
        made.check()
    device.check()


@pytest.mark.parametrize("host_bytes", [None, 1])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_nested_deeper_than_there_are_slots(seed: int, host_bytes: int | None) -> None:
    """The innermost gets a slot of its own, and gives it back only when nothing uses it any more."""
    device = SimulatedAccelerator(seed, policy="late")
    config = groups()
    with device, torch.inference_mode(), offloaded(device, 5, config, host_memory=host_bytes) as made:
        for stack in (made.module, made.resident):
            stack.results = []
            for outer, inner in ((0, 3), (3, 1)):

                def call(stack: Any = stack, inner: int = inner) -> None:
                    stack.results.append(stack.layers[inner](hidden()))

                stack.layers[outer].inside = call
        made.check()
        made.check()
        assert made.handle.report().counters.overflow_slots == 2  # once per pass: 0 calls 3, which calls 1
        assert all(torch.equal(*pair) for pair in zip(made.module.results, made.resident.results, strict=True))
        for index in (0, 3):
            made.module.layers[index].inside = lambda: None
    device.check()


@pytest.mark.parametrize("host_bytes", [None, 1])
def test_a_slot_beside_the_ring_is_given_back_if_its_block_does_not_come(host_bytes: int | None) -> None:
    device = BreakingAccelerator()
    with device, torch.inference_mode(), offloaded(device, 5, groups(), host_memory=host_bytes) as made:
        made.check()
        before = device.allocated_bytes

        def call() -> None:
            with _failing_to_copy(device, 0), _failing_to_read(made, 0, times=1000):
                made.module.layers[0](hidden())

        def nest() -> None:
            made.module.layers[2].inside = call
            made.module.layers[2](hidden())

        made.module.layers[4].inside = nest
        with pytest.raises((DriverFailed, ReadError)):
            made.module(hidden())
        made.module.layers[4].inside = made.module.layers[2].inside = lambda: None
        assert made.handle.report().counters.overflow_slots == 1
        assert device.allocated_bytes == before
        for _ in range(2):  # in either slot what was brought ahead meanwhile may be missing
            with contextlib.suppress(DriverFailed, ReadError):
                made.check()
        made.check()
    device.check()


def test_a_block_whose_read_failed_is_not_copied() -> None:
    device = BreakingAccelerator()
    with device, torch.inference_mode(), offloaded(device, 5, groups(), host_memory=1) as made:
        made.check()
        with _failing_to_read(made, 0, times=1000):
            for _ in range(2):
                with pytest.raises(ReadError):
                    made.check(order=[2, 0, 3, 1])
            device.wait_idle()
            copies = device.copies
            with pytest.raises(ReadError):
                made.check(order=[4])
            assert device.copies == copies
        for _ in range(2):
            with contextlib.suppress(ReadError):
                made.check()
        made.check()
    device.check()


@pytest.mark.parametrize("coherent", [True, False])
def test_weights_are_used_in_place_only_if_the_device_sees_what_the_host_writes(coherent: bool) -> None:
    device = SimulatedAccelerator(coherent=coherent)
    config = OffloadConfig.model_validate({"uva": {"cpu_offload_gb": 1}})
    with device, torch.inference_mode(), offloaded(device, 5, config) as made:
        made.check()
        report = made.handle.report()
        assert report.backend == "uva"
        assert (report.counters.copied_bytes == 0) == coherent
        assert len(report.fallbacks) == (0 if coherent else 1)
    device.check()


def test_memory_is_exactly_what_was_asked_for() -> None:
    device = SimulatedAccelerator()
    with device, offloaded(device, 8, groups(2)) as made:
        report = made.handle.report()
        assert device.allocated_bytes == report.ring_bytes == 2 * made.handle.plan.slot_bytes
        # A block ends at a multiple of a page; nothing is rounded to a power of two.
        assert device.page_locked_bytes <= 1.02 * report.offloaded_bytes + 4 * 4096
        assert report.net_saving_bytes == report.offloaded_bytes - report.ring_bytes
        assert report.host_bytes >= report.offloaded_bytes
    device.check()


def test_a_budget_on_the_device_is_never_exceeded() -> None:
    for budget in range(1000, 9000, 500):
        device = SimulatedAccelerator(memory_bytes=budget)
        resident = Stack(12).eval()
        with device, torch.inference_mode():
            try:
                handle = headrace.offload(copy.deepcopy(resident), device=device, memory=budget)
            except headrace.HeadraceError as error:
                assert error.needed_bytes > budget  # type: ignore[attr-defined]
                continue
            report = handle.report()
            assert report.resident_bytes + report.ring_bytes <= budget
            assert torch.equal(handle.module(hidden()), resident(hidden()))
            handle.close()
        device.check()


def test_a_device_without_room_leaves_the_module_as_it_was() -> None:
    device = SimulatedAccelerator(memory_bytes=100)
    resident = Stack(6).eval()
    module = copy.deepcopy(resident)
    before = dict(module.named_parameters())
    with device, pytest.raises(headrace.HeadraceError, match="The device has no room"):
        headrace.offload(module, groups(), device=device)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
    assert torch.equal(module(hidden()), resident(hidden()))
    device.check()


@pytest.mark.parametrize("reason", ["RLIMIT_MEMLOCK is 8 MiB"])
def test_a_refused_page_lock_is_said_once_and_copies_happen_on_the_spot(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = SimulatedAccelerator(refuse_page_lock=reason)
    with device, torch.inference_mode(), offloaded(device, 5, groups()) as made:
        made.check()
        made.check()
        (fallback,) = made.handle.report().fallbacks
        assert reason in fallback
        assert device.page_locked_bytes == 0
    assert [record.message for record in caplog.records] == [fallback]
    device.check()


def test_without_page_locked_memory_by_wish_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedAccelerator()
    with device, torch.inference_mode(), offloaded(device, 5, groups(), pin_memory=False) as made:
        made.check()
        assert made.handle.report().fallbacks == ()
        assert device.page_locked_bytes == 0
    assert not caplog.records
    device.check()


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "copies"), [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
def test_copies_hide_behind_computing_and_computing_behind_copies(compute: float, copies: float) -> None:
    """In simulated time a pass takes max(compute, copies), within one block of it."""
    count, passes = 12, 10
    device = SimulatedAccelerator(
        copy_latency_s=copies, copy_bytes_per_s=1e12, kernel_s=lambda name, nbytes: compute if "sin" in name else 0
    )
    with device, torch.inference_mode(), offloaded(device, count, groups()) as made:
        for _ in range(passes):
            made.module(hidden())
        device.wait_idle()
        bound = count * passes * max(compute, copies)
        assert bound <= device.makespan_s <= 1.05 * bound + compute + copies
        statistics = made.handle.statistics()
        assert statistics.moving_s == pytest.approx(copies * (count * passes + 1), rel=0.02)
        expected = min(1.0, compute / copies) if copies > compute else 1.0
        assert statistics.hidden_fraction == pytest.approx(expected, abs=0.05)


# --- graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_a_captured_graph_replays_what_eager_computes(count: int, step: int, seed: int) -> None:
    """A replay runs no Python of ours: every copy and every wait has to be in the graph, and nothing from before it."""
    device = SimulatedAccelerator(seed)
    resident = Stack(count).eval()
    with device, torch.inference_mode():
        place = device.allocate(hidden().numel() * 8, "the input").view(torch.float64).view(1, WIDTH)
        place.copy_(hidden())
        with offloaded(device, count, groups(step=step)) as made:
            made.check()
            before = made.handle.report().counters.copies
            with device.capture() as graph:
                output = made.module(place)
            # Each block once, also where all have slots: a replay does not know what slots held.
            assert made.handle.report().counters.copies == before + count
            for seed in range(4):
                fresh = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                place.copy_(fresh)
                graph.replay()
                device.wait_idle()
                assert torch.equal(output, resident(fresh))
                made.check()  # eager between replays: slots are not what they were
                made.check(order=[0, count - 1])
            device.wait_idle()
        device.free(place.view(-1).view(torch.uint8))
    device.check()


def test_a_graph_of_a_pass_that_ends_early_waits_for_what_was_brought_ahead() -> None:
    device = SimulatedAccelerator()
    with device, torch.inference_mode(), offloaded(device, 5, groups(step=2)) as made:
        given = hidden()
        with device.capture() as graph:
            output = made.module(given, [0, 1])
        graph.replay()
        device.wait_idle()
        assert torch.equal(output, made.resident(hidden(), [0, 1]))
    device.check()


def test_a_graph_of_what_is_on_disk_is_refused() -> None:
    device = SimulatedAccelerator()
    with device, torch.inference_mode(), offloaded(device, 5, groups(), host_memory=1) as made:
        made.check()
        with pytest.raises(CannotCapture, match=r"layers\.0"), device.capture():
            made.module(hidden())
        made.check()


# --- disk, host, device -------------------------------------------------------------------------------------------


def test_what_host_memory_cannot_hold_comes_from_disk() -> None:
    device = SimulatedAccelerator()
    with device, torch.inference_mode(), offloaded(device, 12, groups(), host_memory=5 * 4096) as made:
        for _ in range(3):
            made.check()
        statistics, report = made.handle.statistics(), made.handle.report()
        assert statistics.copied_bytes > statistics.read_bytes > 0
        staging = report.host_bytes - device.page_locked_bytes
        assert staging <= 2 * made.handle.plan.slot_bytes + 3 * 4096
        assert device.page_locked_bytes <= 5 * 4096 + 2 * made.handle.plan.slot_bytes + 3 * 4096
    device.check()


# --- all of it together -------------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.just(("pass", 1)),
    st.just(("pass", 3)),
    st.tuples(st.just("order"), st.lists(st.integers(0, 11), min_size=1, max_size=8)),
    st.tuples(st.just("fail"), st.integers(0, 11)),
    st.tuples(st.just("fail to copy"), st.integers(0, 11)),
    st.tuples(st.just("fail to read"), st.integers(0, 5)),
)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(1, 12),
    group=st.integers(1, 4),
    number=st.integers(1, 4),
    step=st.integers(1, 12),
    host_bytes=st.sampled_from([None, None, None, None, 1, 500]),
    page_locked=st.booleans(),
    steps=st.lists(STEPS, min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    policy=st.sampled_from(["random", "late", "early"]),
)
def test_every_ring_order_and_failure(
    count: int,
    group: int,
    number: int,
    step: int,
    host_bytes: int | None,
    page_locked: bool,
    steps: list[tuple[str, Any]],
    seed: int,
    policy: Any,
) -> None:
    group = min(group, count)
    config = groups(group, min(number, group), step)
    device = BreakingAccelerator(seed, policy=policy)
    options: dict[str, Any] = {"host_memory": host_bytes, "pin_memory": page_locked, "seed": seed % 7}
    with device, torch.inference_mode(), offloaded(device, count, config, **options) as made:
        for kind, value in steps:
            if kind == "pass":
                made.check(value)
            elif kind == "order":
                made.check(order=[index % count for index in value])
            elif kind == "fail":
                made.module.layers[value % count].fails = True
                with pytest.raises(ValueError, match="from inside"):
                    made.module(hidden())
                made.check()
            else:
                failing = _failing_to_copy(device, value) if kind == "fail to copy" else _failing_to_read(made, value)
                with failing:
                    for _ in range(2):  # what was brought ahead for the next pass is missed in that one
                        with contextlib.suppress(DriverFailed, ReadError):
                            made.check()
                made.check()
        statistics = made.handle.statistics()
        offloaded_blocks = len(made.handle.plan.streamed)
        assert statistics.copied_bytes > 0 or not statistics.blocks_run
        assert made.handle.report().ring_bytes == min(step + 1, offloaded_blocks) * made.handle.plan.slot_bytes
    device.check()


@contextlib.contextmanager
def _failing_to_copy(device: BreakingAccelerator, after: int) -> Iterator[None]:
    device.copies_until_failure = after
    try:
        yield
    finally:
        device.copies_until_failure = None


@contextlib.contextmanager
def _failing_to_read(made: Offloaded, after: int, *, times: int = 1) -> Iterator[None]:
    if made.reader is None:
        yield
        return
    reads = itertools.count()
    fail = broken(errno.EIO, times=times)
    made.reader.script = lambda offset: fail(offset) if next(reads) >= after else None
    try:
        yield
    finally:
        made.reader.script = lambda offset: None
