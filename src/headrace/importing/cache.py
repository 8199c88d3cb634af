"""A .gguf file becomes a safetensors checkpoint, once, in the cache. Knows nothing of what runs it afterwards.

Guarantees:
- A checkpoint in the cache is whole: it is written beside its place, brought to the disk, marked and only then renamed.
  What was left by a killed import is noticed (no mark, or files of other sizes), removed and done again.
- A replaced .gguf file is noticed: the name carries a digest of its size, its time and its header.
- Two processes that import the same file take turns (`filelock`); the second finds the work done.
- An import that fails leaves nothing behind.
- Peak memory: libraries, and the largest tensor that needs another layout as float32, twice; not the model.

The whole checkpoint has one dtype, the one the model then runs in: float32 if the file holds nothing else, float16 if
it holds float16 (and float32), else bfloat16. Norms, which GGUF keeps as float32, are cast too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace import cache
from headrace.errors import HeadraceError, MissingPackage, NotWritable, WriteError
from headrace.importing.header import GgufHeader, read_header
from headrace.importing.writer import TensorSpec, plan_shards, sync_directory, write_shards

Progress = Callable[[str, int, int], None]

_FORMAT = 1
"""Raised when an import would come out different, so old ones are not taken for new ones."""
_MARK = "headrace.json"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def cache_directory() -> Path:
    """Where imported checkpoints live."""
    return cache.cache_directory("checkpoints")


def import_gguf(file: Path, *, on_progress: Progress | None = None) -> Path:
    """The checkpoint directory of a .gguf file: from the cache, or converted into it now.

    `on_progress(label, done_bytes, total_bytes)` is called as weights are written. Raises CorruptGguf, NotWritable,
    WriteError, MissingPackage.
    """
    header = read_header(file)
    target = cache_directory() / _name(file, header)
    if _is_complete(target):
        return target
    with _exclusive(target):
        if not _is_complete(target):
            _convert(file, header, target, on_progress or (lambda label, done, total: None))
    return target


def _name(file: Path, header: GgufHeader) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", file.stem)[:80].lstrip(".") or "model"
    digest = hashlib.blake2b(f"{_FORMAT}:{header.identity}".encode(), digest_size=8).hexdigest()
    return f"{stem}-{digest}"


def _is_complete(target: Path) -> bool:
    """Whether the directory has its mark, and every file the size that the mark states."""
    try:
        files = json.loads((target / _MARK).read_bytes())["files"]
        return all((target / name).stat().st_size == nbytes for name, nbytes in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of one checkpoint. The lock file stays: removing it would let two in."""
    try:
        from filelock import FileLock
    except ImportError as error:
        raise MissingPackage(package="filelock", purpose="Importing a .gguf file", extra="engine") from error

    lock = FileLock(target.with_name(target.name + ".lock"))
    with _writing(target, 0):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(file: Path, header: GgufHeader, target: Path, on_progress: Progress) -> None:
    from headrace.importing.convert import GgufModel, quiet

    label = f"importing {file.name}"
    on_progress(label, 0, header.file_bytes)
    partial = target.with_name(target.name + ".partial")
    for debris in (partial, target):
        shutil.rmtree(debris, ignore_errors=True)
    with quiet(), _scratch(target) as scratch:
        model = GgufModel(file, header, scratch)
        shards = plan_shards(model.tensors)
        total = sum(shard.data_bytes for shard in shards)
        # The tokenizer's files hold what the header holds, as JSON.
        needed = sum(shard.nbytes for shard in shards) + 4 * header.data_offset
        done = 0

        def pieces(spec: TensorSpec) -> Iterator[Any]:
            nonlocal done
            for piece in model.pieces(spec):
                yield piece
                done += piece.nbytes
                on_progress(label, done, total)

        with _writing(target, needed), _removed_on_failure(partial):
            _check_space(target, needed)
            partial.mkdir()
            model.save_metadata(partial)
            write_shards(partial, shards, pieces)
            _publish(partial, target, {"format": _FORMAT, "source": str(file.resolve()), "identity": header.identity})


def _publish(partial: Path, target: Path, facts: dict[str, Any]) -> None:
    """Mark as complete and move into place; each step is on the disk before the next begins."""
    sync_directory(partial)
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    (partial / _MARK).write_text(json.dumps({**facts, "files": files}, indent=2) + "\n", encoding="utf-8")
    sync_directory(partial)
    partial.rename(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A directory for a moment, in the cache: nowhere else is sure to be writable. The lock is held: one has it."""
    path = target.with_name(target.name + ".scratch")
    shutil.rmtree(path, ignore_errors=True)  # of an import that was killed
    with _writing(target, 0):
        path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _writing(target: Path, needed_bytes: int) -> Iterator[None]:
    """Turn what goes wrong on the disk into WriteError with the numbers, or NotWritable."""
    try:
        yield
    except HeadraceError:
        raise
    except OSError as error:
        raise _write_error(target, needed_bytes, error.strerror or str(error)) from error
    except Exception as error:
        # The tokenizer's writer is not Python: its errors are plain Exceptions with the number in their text.
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        raise _write_error(target, needed_bytes, os.strerror(int(match.group(1)))) from error


def _write_error(target: Path, needed_bytes: int, reason: str) -> WriteError | NotWritable:
    if not needed_bytes:  # it never came to writing
        return NotWritable(path=str(target.parent), reason=reason)
    return WriteError(path=str(target), needed_bytes=needed_bytes, free_bytes=_free_bytes(target), reason=reason)


def _check_space(target: Path, needed_bytes: int) -> None:
    if _free_bytes(target) < needed_bytes:
        raise _write_error(target, needed_bytes, "there is not enough space")


def _free_bytes(target: Path) -> int:
    for directory in target.parents:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(directory).free
    return 0
