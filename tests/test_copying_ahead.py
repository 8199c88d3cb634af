"""Tensors are read ahead whole or not at all, lie where any slab has them, and what is not kept is given back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import Gate, ScriptedReader, broken, bytes_that_differ, entry, write_by_hand

from headrace import store
from headrace.copying import ahead as room
from headrace.copying.ahead import ReadAhead
from headrace.core import DIRECT_ALIGNMENT, TENSOR_ALIGNMENT
from headrace.metrics import Metrics
from headrace.store import Checkpoint, Placement, coalesce

CHUNK = 4 * DIRECT_ALIGNMENT
SIZES = {"a": ("BF16", 3 * CHUNK + 2), "b": ("BF16", CHUNK), "c": ("F32", 9 * CHUNK), "d": ("BF16", 40 * CHUNK)}
ELEMENT_BYTES = {"BF16": 2, "F32": 4}

Script = Callable[[int], int | None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    header, end = {}, 0
    for name, (dtype, nbytes) in SIZES.items():
        header[name] = entry(dtype, [nbytes // ELEMENT_BYTES[dtype]], end, end + nbytes)
        end += nbytes
    write_by_hand(tmp_path / "model.safetensors", header, bytes_that_differ(end))
    return store.open_checkpoint(tmp_path)


@pytest.fixture
def begin(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ReadAhead]]:
    """Reading with a script; afterwards none of its threads is left."""
    begun: list[ReadAhead] = []

    def make(names: str = "abcd", script: Script = lambda offset: None) -> ReadAhead:
        class Reader(ScriptedReader):
            def __init__(self, paths: dict[str, Path], metrics: Metrics) -> None:
                super().__init__(paths, metrics, threads=2, chunk_bytes=CHUNK)
                self.script = script

        monkeypatch.setattr(room, "DiskReader", Reader)
        begun.append(ReadAhead(checkpoint, [checkpoint.tensors[name] for name in names], Metrics()))
        return begun[-1]

    yield make
    for each in begun:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-")]


def stored(checkpoint: Checkpoint, name: str) -> bytes:
    segment = checkpoint.tensors[name].segment
    return checkpoint.path(segment.file).read_bytes()[segment.offset : segment.end]


def there(ahead: ReadAhead, name: str) -> bytes | None:
    segment = ahead.checkpoint.tensors[name].segment
    offset = ahead.offset_of(segment)
    return None if offset is None else bytes(ahead.pages.view()[offset : offset + segment.nbytes])


def test_tensors_lie_where_a_slab_has_them_with_their_bytes(
    checkpoint: Checkpoint, begin: Callable[..., ReadAhead]
) -> None:
    told: list[tuple[int, int]] = []
    ahead = begin("acd")
    ahead.wait(lambda done, total: told.append((done, total)))
    assert there(ahead, "b") is None, "nobody asked for it"
    for name in "acd":
        assert there(ahead, name) == stored(checkpoint, name)
        segment = checkpoint.tensors[name].segment
        address = ahead.pages.address + (ahead.offset_of(segment) or 0)
        assert (address - segment.offset) % DIRECT_ALIGNMENT == 0 or address % TENSOR_ALIGNMENT == 0
    total = sum(checkpoint.tensors[name].nbytes for name in "acd")
    assert len(told) > 1
    assert total <= told[-1][0] == told[-1][1] < total + 4 * DIRECT_ALIGNMENT
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert ahead.metrics.counters().read_bytes >= total
    assert ahead.committed_bytes == ahead.pages.nbytes


def test_what_is_not_kept_is_given_back(checkpoint: Checkpoint, begin: Callable[..., ReadAhead]) -> None:
    ahead = begin()
    ahead.wait()
    for _ in range(2):
        ahead.keep([checkpoint.tensors["b"].segment, checkpoint.tensors["c"].segment])
        assert there(ahead, "b") == stored(checkpoint, "b")
        assert there(ahead, "c") == stored(checkpoint, "c")
        assert there(ahead, "a") is there(ahead, "d") is None
    kept = sum(checkpoint.tensors[name].nbytes for name in "bc")
    assert kept <= ahead.committed_bytes <= kept + 4 * DIRECT_ALIGNMENT
    filled = sum(any(ahead.pages.view()[at : at + DIRECT_ALIGNMENT]) for at in range(0, ahead.pages.nbytes, 4096))
    assert filled * DIRECT_ALIGNMENT == ahead.committed_bytes, "pages that were given back are zeroes"
    ahead.keep(())
    assert ahead.committed_bytes == 0
    assert not any(ahead.pages.view())


def test_after_a_failed_read_nothing_is_kept_and_the_reader_goes_on(
    checkpoint: Checkpoint, begin: Callable[..., ReadAhead]
) -> None:
    ahead = begin(script=broken(errno.EIO))
    ahead.wait()
    assert [there(ahead, name) for name in "abcd"] == [None] * 4
    assert ahead.committed_bytes == 0
    assert not any(ahead.pages.view())
    reads = coalesce([Placement(checkpoint.tensors["b"].segment, 0)], CHUNK)
    ahead.reader.submit(reads, ahead.pages.address, "again", keep=ahead.pages).wait()
    assert bytes(ahead.pages.view()[:CHUNK]) == stored(checkpoint, "b")


def test_closing_ends_what_is_under_way(begin: Callable[..., ReadAhead]) -> None:
    gate = Gate()
    ahead = begin(script=gate)
    gate.wait_arrived()
    closing = threading.Thread(target=ahead.close)
    closing.start()
    gate.open()
    closing.join(60)
    assert not closing.is_alive()
    assert ahead.committed_bytes == 0
    assert not any(ahead.pages.view())
    ahead.close()
