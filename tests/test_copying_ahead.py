"""What is read ahead is in the page cache, of no process; what cannot be read is left to whoever needs it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import Gate, broken, bytes_that_differ, entry, write_by_hand

from headrace import store
from headrace.copying import ahead as room
from headrace.copying.ahead import ReadAhead
from headrace.core import DIRECT_ALIGNMENT
from headrace.metrics import Metrics
from headrace.store import Checkpoint

GROUP = 4 * DIRECT_ALIGNMENT
SIZES = {"a": 3 * GROUP + 2, "b": GROUP, "c": 9 * GROUP, "d": 40 * GROUP}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(room, "GROUP_BYTES", GROUP)
    monkeypatch.setattr(room, "ASK_BYTES", DIRECT_ALIGNMENT)
    header, end = {}, 0
    for name, nbytes in SIZES.items():
        header[name] = entry("BF16", [nbytes // 2], end, end + nbytes)
        end += nbytes
    write_by_hand(tmp_path / "model.safetensors", header, bytes_that_differ(end))
    return store.open_checkpoint(tmp_path)


@pytest.fixture
def begin(checkpoint: Checkpoint) -> Iterator[Callable[..., ReadAhead]]:
    """Reading, of which no thread is left afterwards."""
    begun: list[ReadAhead] = []

    def make(names: str = "abcd") -> ReadAhead:
        begun.append(ReadAhead(checkpoint, [checkpoint.tensors[name] for name in names], Metrics(tracing=True)))
        return begun[-1]

    yield make
    for each in begun:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-")]


class Asked:
    """What the kernel is asked for and waited for, in order; a script may fail or hold each wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: list[int] = []
        self.waited: list[int] = []
        self.script: Callable[[int], None] = lambda offset: None
        advise, pread = os.posix_fadvise, os.pread

        def spy_advise(descriptor: int, offset: int, nbytes: int, advice: int) -> None:
            assert advice == os.POSIX_FADV_WILLNEED
            self.pages.extend(range(offset, offset + nbytes, DIRECT_ALIGNMENT))
            advise(descriptor, offset, nbytes, advice)

        def spy_pread(descriptor: int, nbytes: int, offset: int) -> bytes:
            self.script(offset)
            self.waited.append(offset)
            return pread(descriptor, nbytes, offset)

        monkeypatch.setattr(os, "posix_fadvise", spy_advise)
        monkeypatch.setattr(os, "pread", spy_pread)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def pages_of(checkpoint: Checkpoint, names: str) -> set[int]:
    segments = [checkpoint.tensors[name].segment for name in names]
    first = [segment.offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT for segment in segments]
    return {page for begin, of in zip(first, segments, strict=True) for page in range(begin, of.end, DIRECT_ALIGNMENT)}


def test_every_page_is_asked_for_and_waited_for_once(
    checkpoint: Checkpoint, begin: Callable[..., ReadAhead], asked: Asked
) -> None:
    told: list[tuple[int, int]] = []
    ahead = begin("acd")
    ahead.wait(lambda done, total: told.append((done, total)))
    wanted = pages_of(checkpoint, "acd")
    assert asked.pages == asked.waited == sorted(wanted)
    assert wanted < pages_of(checkpoint, "abcd")
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == (ahead.nbytes, ahead.nbytes) == (ahead.read_bytes, ahead.nbytes)
    assert (
        sum(SIZES[name] for name in "acd") <= ahead.nbytes < sum(SIZES[name] for name in "acd") + 4 * DIRECT_ALIGNMENT
    )
    assert {span.name for span in ahead.metrics.spans()} == {"read ahead"}
    ahead.wait()


def test_two_groups_are_under_way(begin: Callable[..., ReadAhead], asked: Asked) -> None:
    """More would keep everybody else from the disk; fewer would leave it idle in between."""
    far: list[int] = []
    asked.script = lambda offset: far.append(asked.pages[-1] - offset)
    begin("d").wait()
    assert max(far) < 2 * GROUP
    assert all(distance >= GROUP for distance in far[: -2 * GROUP // DIRECT_ALIGNMENT])


def test_what_cannot_be_read_ends_it(begin: Callable[..., ReadAhead], asked: Asked) -> None:
    asked.script = broken(errno.EIO, at=GROUP)
    ahead = begin()
    ahead.wait()
    assert 0 < ahead.read_bytes < ahead.nbytes
    assert asked.waited[-1] < GROUP


def test_a_file_that_is_gone(checkpoint: Checkpoint, begin: Callable[..., ReadAhead]) -> None:
    checkpoint.path("model.safetensors").unlink()
    ahead = begin()
    ahead.wait()
    assert ahead.read_bytes == 0


def test_closing_ends_what_is_under_way(begin: Callable[..., ReadAhead], asked: Asked) -> None:
    asked.script = gate = Gate()
    ahead = begin()
    gate.wait_arrived()
    closing = threading.Thread(target=ahead.close)
    closing.start()
    while not ahead._is_closed:
        pass
    gate.open()
    closing.join(60)
    assert not closing.is_alive()
    assert max(asked.pages) < 3 * GROUP
    ahead.close()
    ahead.wait()
