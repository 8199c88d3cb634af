"""The file for weights that no checkpoint holds: no name, no cache, a clear word when there is no room."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from fakes import bytes_that_differ

from headrace.copying import spill
from headrace.copying.spill import SpillFile, spilled_size
from headrace.errors import SpillFailed


def append(file: SpillFile, data: bytes) -> int:
    memory = ctypes.create_string_buffer(data, len(data))
    return file.append(ctypes.addressof(memory), len(data))


def test_what_is_written_is_there_at_its_place(tmp_path: Path) -> None:
    file = SpillFile(30_000, tmp_path)
    one, other = bytes_that_differ(5000), bytes_that_differ(9000, seed=3)
    assert append(file, one) == 0
    file.skip_to(4096)
    assert append(file, other) == 8192
    assert file.written_bytes == 8192 + 9000
    file.drop_cached()
    data = file.path.read_bytes()
    assert data[:5000] == one
    assert data[8192 : 8192 + 9000] == other
    assert len(data) == 30_000  # the room was taken at once: it cannot be missing later
    file.close()


def test_it_has_no_name_and_is_gone_once_closed(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    file = SpillFile(100, tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = file.path
    assert path.exists()
    for _ in range(2):
        file.close()
    assert not path.exists() or path.resolve() != tmp_path
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_without_unnamed_files_the_name_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    file = SpillFile(100, tmp_path)
    assert list(tmp_path.iterdir()) == []
    append(file, b"abc")
    assert file.path.read_bytes()[:3] == b"abc"
    file.close()


def test_more_than_fits_into_one_write_leaves_the_cache_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "WRITE_BYTES", 1000)
    synced: list[int] = []
    real = os.fdatasync

    def counted(descriptor: int) -> None:
        synced.append(file.written_bytes)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", counted)
    file, data = SpillFile(10_000, tmp_path), bytes_that_differ(2500)
    for part in (data[:700], data[700:800], data[800:]):
        append(file, part)
    assert synced == [2500]
    file.drop_cached()
    assert file.path.read_bytes()[:2500] == data
    file.close()


def _full(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def _write(directory: Path, opened: list[SpillFile]) -> None:
    opened.append(SpillFile(12345, directory))
    append(opened[0], b"abc")
    opened[0].drop_cached()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fdatasync"])
def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, _full)
    opened: list[SpillFile] = []
    with pytest.raises(SpillFailed) as raised:
        _write(tmp_path, opened)
    assert raised.value.directory == str(tmp_path)
    assert raised.value.needed_bytes == 12345
    assert raised.value.free_bytes > 0
    assert "No space left on device" in str(raised.value)
    assert "TMPDIR=" in str(raised.value)
    for file in opened:
        file.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpillFailed, match="No such file or directory"):
        SpillFile(1, tmp_path / "nowhere")


def test_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(spill, "_in_memory", lambda path: False)
    assert spill._directory() == tmp_path
    monkeypatch.setattr(spill, "_in_memory", lambda path: path == tmp_path)
    assert spill._directory() == Path("/var/tmp")
    monkeypatch.setattr(spill, "_in_memory", lambda path: True)
    assert spill._directory() == tmp_path  # better than nowhere
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(spill, "_in_memory", lambda path: False)
    assert spill._directory() == Path("/var/tmp")


def test_a_file_system_in_memory_is_told_from_a_disk(tmp_path: Path) -> None:
    mounts = {line.split()[1]: line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    assert mounts["/dev/shm"] == "tmpfs"
    assert spill._in_memory(Path("/dev/shm"))
    assert not spill._in_memory(Path("/"))


def test_the_size_of_runs_at_places_for_direct_reads() -> None:
    assert spilled_size([]) == 0
    assert spilled_size([1, 4096, 4097]) == 4 * 4096
