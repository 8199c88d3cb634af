"""Readers bring the right bytes by direct and by buffered reads, and whatever goes wrong reaches the one who waits."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Gate, ScriptedReader, broken, bytes_that_differ, execute, segment

from headrace.copying import disk
from headrace.copying.disk import DiskReader, Ticket, measure_bytes_per_s
from headrace.copying.slots import Slab
from headrace.core import DIRECT_ALIGNMENT
from headrace.errors import ClosedError, ReadError
from headrace.metrics import Metrics
from headrace.store import Placement, Read, coalesce, layout

PAGE = DIRECT_ALIGNMENT
CHUNK = 4 * PAGE
CONTENT = bytes_that_differ(40 * PAGE + 1234)
OTHER = bytes_that_differ(9 * PAGE + 1, 77)
SCRATCH = Slab(16 * CHUNK)
"""For bytes that nobody looks at. (Whoever submits a read keeps its target alive: `Slab(n).address` would not.)"""


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Two files, neither of which ends at a page."""
    (tmp_path / "x").write_bytes(CONTENT)
    (tmp_path / "y").write_bytes(OTHER)
    return {"x": tmp_path / "x", "y": tmp_path / "y"}


@pytest.fixture
def open_reader(paths: dict[str, Path]) -> Iterator[Callable[..., ScriptedReader]]:
    """Readers that are closed after the test; afterwards no thread and no file of theirs is left."""
    readers: list[ScriptedReader] = []

    def make(*, files: dict[str, Path] | None = None, **options: Any) -> ScriptedReader:
        readers.append(ScriptedReader(files or paths, **{"threads": 2, "chunk_bytes": CHUNK, **options}))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-disk")]
    assert not open_files(paths)


def open_files(paths: dict[str, Path]) -> list[str]:
    """Those of `paths` that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one of listdir itself
            continue
    return [link for link in found if any(link.startswith(str(path)) for path in paths.values())]


def one(offset: int, nbytes: int, file: str = "x") -> tuple[Read, ...]:
    """Reads of this range to the start of the target."""
    return coalesce([Placement(segment(file, offset, nbytes), 0)], CHUNK)


def whole(slab: Slab, nbytes: int) -> bytes:
    return bytes(slab.bytes[:nbytes].numpy().tobytes())


def check(reader: DiskReader, offset: int = 0, nbytes: int = len(CONTENT)) -> None:
    """The reader brings this range of the first file."""
    slab = Slab(nbytes)
    reader.submit(one(offset, nbytes), slab.address, "check").wait()
    assert whole(slab, nbytes) == CONTENT[offset : offset + nbytes]


# --- the right bytes ------------------------------------------------------------------------------------------------

PLACED = [
    ("x", 17, 3 * PAGE),
    ("y", 0, 1),
    ("x", 5 * PAGE - 1, 2),
    ("y", 100, 0),
    ("x", 7 * PAGE, 20 * PAGE),
    ("y", 9, 9000),
]


def refuse_direct(monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
    """A file system that opens no file directly."""
    really_open = os.open

    def open_buffered(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, "no direct reads here")
        return really_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_buffered)


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_bytes_land_where_they_belong(
    open_reader: Callable[..., ScriptedReader], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the fake `execute` does just what the real reader does."""
    if mode == "buffered":
        refuse_direct(monkeypatch)
    reader = open_reader()
    offsets, size = layout(nbytes for _, _, nbytes in PLACED)
    placements = [Placement(segment(*part), at) for part, at in zip(PLACED, offsets, strict=True)]
    reads = coalesce(placements, CHUNK)
    slab, target = Slab(size), bytearray(size)
    ticket = reader.submit(reads, slab.address, "layer")
    ticket.wait()
    assert ticket.ready
    assert not ticket.failed
    execute(reads, {"x": CONTENT, "y": OTHER}, target)
    assert whole(slab, size) == target
    for part, at in zip(PLACED, offsets, strict=True):
        content = CONTENT if part[0] == "x" else OTHER
        assert target[at : at + part[2]] == content[part[1] : part[1] + part[2]]
    assert len(reader.fallbacks) == (1 if mode == "buffered" else 0)


def test_the_fake_without_a_script_is_the_real_reader(paths: dict[str, Path]) -> None:
    counted = []
    for kind in (DiskReader, ScriptedReader):
        metrics = Metrics()
        reader = kind(paths, metrics, threads=2, chunk_bytes=CHUNK)
        check(reader, 5, 30 * PAGE)
        reader.close()
        counters = metrics.counters()
        counted.append((counters.reads, counters.read_bytes, counters.read_errors, reader.staging_bytes))
    assert counted == [(8, 31 * PAGE, 0, 2 * CHUNK)] * 2


def test_the_end_of_a_file_that_ends_within_a_page(open_reader: Callable[..., ScriptedReader]) -> None:
    check(open_reader(), len(CONTENT) - 10, 10)


def test_a_ticket_without_reads_is_ready(open_reader: Callable[..., ScriptedReader]) -> None:
    ticket = open_reader().submit((), 0, "nothing")
    assert ticket.ready
    ticket.wait()


def test_short_reads_are_read_on(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader()
    reader.script = lambda offset: PAGE
    check(reader)
    assert reader.fallbacks == []


@pytest.mark.parametrize("most", [1, 700, 999])
def test_short_buffered_reads_are_read_on_from_where_they_ended(
    open_reader: Callable[..., ScriptedReader], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    refuse_direct(monkeypatch)
    reader = open_reader()
    reader.script = lambda offset: most
    check(reader, 0, 1000)


def test_a_direct_read_that_ends_off_the_grid_goes_on_from_the_grid(open_reader: Callable[..., ScriptedReader]) -> None:
    """To go on from where it ended would be refused, and taken for a disk without direct reads."""
    reader, places = open_reader(threads=1), []

    def script(offset: int) -> int | None:
        places.append(offset)
        return PAGE + 512 if len(places) == 1 else None

    reader.script = script
    check(reader, 0, 3 * PAGE)
    assert places == [0, PAGE]
    assert reader.fallbacks == []


def test_direct_reads_that_do_not_get_on_are_given_up(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader(threads=1)
    reader.script = lambda offset: 512
    check(reader, 0, 2 * PAGE)
    assert len(reader.fallbacks) == 1


# --- without direct reads -------------------------------------------------------------------------------------------


def test_a_disk_that_refuses_a_direct_read_is_read_through_the_cache(
    open_reader: Callable[..., ScriptedReader], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    reader = open_reader()
    reader.script = broken(errno.EINVAL)
    with caplog.at_level(logging.WARNING):
        check(reader)
        reader.submit(one(0, 100, "y"), SCRATCH.address, "other file").wait()
        check(reader)
    assert reader.fallbacks == [
        f"direct reads are not possible in {str(tmp_path)!r}: reading through the page cache",
    ]
    assert [record.getMessage() for record in caplog.records] == reader.fallbacks
    assert not reader._files["x"].direct
    assert reader._files["y"].direct, "each file is asked for itself"


def test_two_threads_that_are_refused_at_once(open_reader: Callable[..., ScriptedReader]) -> None:
    """The second one finds the file already replaced, and must not take that for an error."""
    reader = open_reader(threads=2)
    both = threading.Barrier(2, timeout=60)
    refused: set[int] = set()

    def script(offset: int) -> None:
        if offset < 2 * CHUNK and offset not in refused:
            both.wait()  # both have begun a direct read
            refused.add(offset)
            raise OSError(errno.EINVAL, "refused")

    reader.script = script
    check(reader, 0, 2 * CHUNK)
    assert refused == {0, CHUNK}
    assert len(reader.fallbacks) == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_opens_nothing_directly(
    open_reader: Callable[..., ScriptedReader],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    refuse_direct(monkeypatch, code)
    reader = open_reader()
    with caplog.at_level(logging.WARNING):
        check(reader)
        reader.submit(one(0, 100, "y"), SCRATCH.address, "other file").wait()
    assert len(reader.fallbacks) == len(caplog.records) == 1


def test_a_system_without_direct_reads(
    open_reader: Callable[..., ScriptedReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    reader = open_reader()
    check(reader)
    assert len(reader.fallbacks) == 1


def test_buffered_reads_leave_nothing_in_the_page_cache(
    open_reader: Callable[..., ScriptedReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, offset, nbytes, advice: dropped.append((offset, nbytes, advice))
    )
    reader = open_reader(threads=1)
    check(reader, 0, 2 * CHUNK)
    assert dropped == [], "a direct read leaves nothing to drop"
    reader.script = broken(errno.EINVAL)
    check(reader, 0, 2 * CHUNK)
    assert dropped == [(0, CHUNK, os.POSIX_FADV_DONTNEED), (CHUNK, CHUNK, os.POSIX_FADV_DONTNEED)]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_reaches_the_one_who_waits(
    open_reader: Callable[..., ScriptedReader], paths: dict[str, Path]
) -> None:
    metrics = Metrics()
    reader = open_reader(metrics=metrics)
    reader.script = broken(errno.EIO, at=2 * CHUNK)
    ticket = reader.submit(one(0, 4 * CHUNK), SCRATCH.address, "layer")
    healthy = reader.submit(one(0, 100, "y"), SCRATCH.address, "other")
    for _ in range(2):  # every waiter gets it
        with pytest.raises(ReadError) as caught:
            ticket.wait()
        assert caught.value.facts == {
            "file": str(paths["x"]),
            "offset": 2 * CHUNK,
            "nbytes": CHUNK,
            "reason": os.strerror(errno.EIO),
        }
    assert ticket.failed
    assert isinstance(caught.value, OSError)
    healthy.wait()
    assert metrics.counters().read_errors == 1
    check(reader)
    assert reader.fallbacks == []


def test_an_error_keeps_no_staging_alive(open_reader: Callable[..., ScriptedReader]) -> None:
    """A ticket that outlives its reader would keep the thread from giving its staging back, and be a warning here."""
    reader = open_reader()
    reader.script = broken(errno.EIO)
    ticket = reader.submit(one(0, 100), SCRATCH.address, "layer")
    ticket.wait_idle()
    reader.close()
    assert ticket._error is not None
    assert ticket._error.__traceback__ is ticket._error.__context__ is None


def test_a_file_that_is_cut_off_while_it_is_in_use(
    open_reader: Callable[..., ScriptedReader], paths: dict[str, Path]
) -> None:
    for length in (10 * PAGE + 700, 10 * PAGE, 100, 0):  # the last direct read is short, or comes back empty
        paths["x"].write_bytes(CONTENT)
        reader = open_reader()
        check(reader)
        os.truncate(paths["x"], length)
        ticket = reader.submit(one(0, len(CONTENT)), SCRATCH.address, "layer")
        with pytest.raises(ReadError, match="cut off") as caught:
            ticket.wait()
        assert caught.value.file == str(paths["x"])
        assert caught.value.offset + caught.value.nbytes > length
        assert reader.fallbacks == [], "a file that ends early is no reason to give direct reads up"
        paths["x"].write_bytes(CONTENT)
        check(reader)


def test_a_file_that_is_gone(open_reader: Callable[..., ScriptedReader], paths: dict[str, Path]) -> None:
    reader = open_reader()
    paths["x"].unlink()
    with pytest.raises(ReadError) as caught:
        check(reader, CHUNK, 10)
    assert caught.value.reason == os.strerror(errno.ENOENT)
    assert caught.value.offset == CHUNK
    paths["x"].write_bytes(CONTENT)
    check(reader)


def test_a_file_that_is_gone_when_the_reader_falls_back(
    open_reader: Callable[..., ScriptedReader], paths: dict[str, Path]
) -> None:
    reader = open_reader()
    check(reader)
    paths["x"].unlink()
    reader.script = broken(errno.EINVAL)
    with pytest.raises(ReadError, match=os.strerror(errno.ENOENT)):
        check(reader)
    check(reader)  # the descriptor is still good


@pytest.mark.parametrize("failure", [ZeroDivisionError, MemoryError, SystemExit])
def test_no_failure_leaves_anyone_waiting(
    open_reader: Callable[..., ScriptedReader], failure: type[BaseException]
) -> None:
    reader = open_reader(threads=1)

    def script(offset: int) -> None:
        raise failure("of ours")

    reader.script = script
    with pytest.raises(ReadError) as caught:
        reader.submit(one(0, 10), SCRATCH.address, "layer").wait()
    assert caught.value.reason == repr(failure("of ours"))
    with pytest.raises(ReadError, match="KeyError"):
        reader.submit([Read("unknown", 0, PAGE, PAGE, ())], SCRATCH.address, "layer").wait()
    reader.script = lambda offset: None
    check(reader)


# --- order, cancelling, closing -------------------------------------------------------------------------------------


def hold(reader: ScriptedReader) -> tuple[Gate, Ticket]:
    """A reader of one thread whose first read waits at a gate, so that what is submitted then is queued."""
    gate = Gate()
    reader.script = gate
    first = reader.submit(one(0, PAGE), SCRATCH.address, "first")
    gate.wait_arrived()
    return gate, first


def test_reads_come_in_the_order_in_which_they_were_asked_for_and_urgent_ones_first(
    open_reader: Callable[..., ScriptedReader],
) -> None:
    reader = open_reader(threads=1)
    gate, _ = hold(reader)
    slabs = [Slab(2 * CHUNK) for _ in range(3)]
    late = reader.submit(one(CHUNK, 2 * CHUNK), slabs[0].address, "late")
    soon = reader.submit(one(3 * CHUNK, 2 * CHUNK), slabs[1].address, "soon", urgent=True)
    now = reader.submit(one(6 * CHUNK, 2 * CHUNK), slabs[2].address, "now", urgent=True)
    assert not now.ready
    gate.open()
    for ticket in (late, soon, now):
        ticket.wait()
    assert [offset // CHUNK for offset in gate.offsets] == [0, 6, 7, 3, 4, 1, 2]


def test_cancelled_reads_are_not_made(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader(threads=1)
    gate, first = hold(reader)
    slab = Slab(2 * CHUNK)
    ticket = reader.submit(one(CHUNK, 2 * CHUNK), slab.address, "unwanted")
    ticket.cancel()
    assert not ticket.wanted
    gate.open()
    ticket.wait_idle()
    first.wait()
    assert gate.offsets == [0]
    assert ticket.ready
    assert not slab.bytes.any()
    with pytest.raises(ReadError, match="not wanted any more"):
        ticket.wait()  # whoever waits all the same must not believe that the bytes are there
    assert reader.metrics.counters().read_errors == 0


def test_a_ticket_that_is_cancelled_too_late_has_its_bytes(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader()
    slab = Slab(CHUNK)
    ticket = reader.submit(one(7, PAGE), slab.address, "layer")
    ticket.wait_idle()
    ticket.cancel()
    ticket.wait()
    assert whole(slab, PAGE) == CONTENT[7 : 7 + PAGE]


def test_reads_after_an_error_of_the_same_ticket_are_not_made(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader(threads=1)
    offsets: list[int] = []

    def script(offset: int) -> None:
        offsets.append(offset)
        raise OSError(errno.EIO, "broken")

    reader.script = script
    with pytest.raises(ReadError) as caught:
        reader.submit(one(0, 3 * CHUNK), SCRATCH.address, "layer").wait()
    assert offsets == [0]
    assert caught.value.offset == 0


def test_wait_returns_only_after_the_last_read_has_ended(open_reader: Callable[..., ScriptedReader]) -> None:
    """Also where another read of the ticket has failed: the target's memory may be freed then."""
    reader = open_reader(threads=2)
    gate = Gate()

    def script(offset: int) -> None:
        if offset == 0:
            gate(offset)
        elif offset == CHUNK:
            raise OSError(errno.EIO, "broken")

    reader.script = script
    slab = Slab(2 * CHUNK)
    ticket = reader.submit(one(0, 2 * CHUNK), slab.address, "layer")
    gate.wait_arrived()
    reader.submit(one(4 * CHUNK, 1), SCRATCH.address, "after").wait()  # so the thread that failed is through with it
    assert ticket.failed
    assert not ticket.ready
    block = ticket._changed.wait

    def open_and_block(*arguments: Any) -> bool:  # the other read ends only because somebody waits for it
        gate.open()
        return block(*arguments)

    ticket._changed.wait = open_and_block  # type: ignore[method-assign]
    try:
        with pytest.raises(ReadError):
            ticket.wait()
        assert whole(slab, CHUNK) == CONTENT[:CHUNK]
    finally:
        gate.open()


def test_close_ends_what_is_queued_and_lets_what_runs_finish(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader(threads=1)
    gate, first = hold(reader)
    queued = reader.submit(one(CHUNK, 2 * CHUNK), SCRATCH.address, "queued")
    closer = threading.Thread(target=reader.close)
    closer.start()
    with pytest.raises(ClosedError):
        queued.wait()  # before the gate opens
    gate.open()
    closer.join(60)
    assert not closer.is_alive()
    first.wait()
    assert gate.offsets == [0]
    with pytest.raises(ClosedError):
        reader.submit(one(0, 1), 0, "late")
    reader.close()


def test_close_twice_and_without_any_read(paths: dict[str, Path]) -> None:
    before = threading.active_count()
    reader = DiskReader(paths, Metrics())
    assert threading.active_count() == before + disk.READER_THREADS
    reader.close()
    reader.close()
    assert threading.active_count() == before


def test_close_after_a_fall_back_closes_both_descriptors(
    open_reader: Callable[..., ScriptedReader], paths: dict[str, Path]
) -> None:
    reader = open_reader()
    reader.script = broken(errno.EINVAL)
    check(reader)
    assert len(open_files(paths)) == 2
    reader.close()
    assert open_files(paths) == []


@pytest.mark.slow
def test_no_thread_and_no_file_is_left_by_many_readers(paths: dict[str, Path]) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reader = DiskReader(paths, Metrics(), threads=3, chunk_bytes=CHUNK)
        check(reader)
        reader.close()
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_two_threads_with_a_ticket_each(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader(threads=2)
    together = threading.Barrier(2, timeout=60)
    wrong: list[str] = []

    def work(shift: int) -> None:
        slab = Slab(20 * PAGE)
        for turn in range(25):
            offset = (shift * 7 + turn * 13) % 50 * 300
            together.wait()
            reader.submit(one(offset, 20 * PAGE), slab.address, f"layer {shift}", urgent=turn % 3 == shift).wait()
            if whole(slab, 20 * PAGE) != CONTENT[offset : offset + 20 * PAGE]:
                wrong.append(f"thread {shift}, turn {turn}")

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    counters = reader.metrics.counters()
    assert counters.reads >= 2 * 25 * 5
    assert counters.busy_s <= counters.read_s


def test_reads_are_traced_under_the_label_of_their_ticket(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader(metrics=Metrics(tracing=True))
    reader.submit(one(0, 3 * CHUNK), SCRATCH.address, "layers.7").wait()
    spans = reader.metrics.spans()
    assert [(span.name, span.category) for span in spans] == [("layers.7", "read")] * 3
    assert {span.thread for span in spans} <= {"headrace-disk-0", "headrace-disk-1"}


# --- the probe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_the_probe_on_tiny_files(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "tiny").write_bytes(CONTENT[:nbytes])
    metrics = Metrics()
    reader = DiskReader({"tiny": tmp_path / "tiny"}, metrics, threads=2, chunk_bytes=CHUNK)
    rate = measure_bytes_per_s(reader, {"tiny": nbytes})
    reader.close()
    assert rate > 0
    assert metrics.counters().reads == max(1, nbytes // CHUNK)


def test_the_probe_reads_the_largest_file_each_place_once(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader()
    places: list[int] = []
    reader.script = places.append  # type: ignore[assignment]
    measure_bytes_per_s(reader, {"x": len(CONTENT), "y": len(OTHER)})
    assert sorted(places) == [number * CHUNK for number in range(10)]
    assert set(reader._files) == {"x"}


def test_an_error_in_the_probe(open_reader: Callable[..., ScriptedReader]) -> None:
    reader = open_reader()
    reader.script = broken(errno.EIO)
    with pytest.raises(ReadError):
        measure_bytes_per_s(reader, {"x": len(CONTENT)})
