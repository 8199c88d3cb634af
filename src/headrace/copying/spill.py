"""A file for weights that no checkpoint holds: written once, read as a checkpoint is, gone with the process.

Guarantees: the file has no name from the start where the system allows it (O_TMPFILE), so that nothing is left after a
kill; elsewhere it is removed on `close`. What is written leaves the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

from headrace import errors
from headrace.core import DIRECT_ALIGNMENT, align_up

WRITE_BYTES = 64 * 2**20
"""At once, and at most in the page cache before it is brought to the disk."""


class SpillFile:
    """Append-only. Raises: WriteError, with the space that was needed and there is."""

    def __init__(self, nbytes: int, directory: Path | None = None) -> None:
        self.nbytes = nbytes
        self.written_bytes = 0
        self._cached_bytes = 0
        self.directory = directory or _directory()
        self._named: Path | None = None
        self._descriptor: int | None = None
        try:
            self._descriptor = self._open()
            os.posix_fallocate(self._descriptor, 0, max(nbytes, 1))
        except OSError as error:
            self.close()
            raise self._failed(error) from None

    @property
    def path(self) -> Path:
        """Where the file can be opened again while it is not closed."""
        return self._named or Path(f"/proc/self/fd/{self._descriptor}")

    def append(self, address: int, nbytes: int) -> int:
        """Write memory; returns the offset, where it lies."""
        assert self._descriptor is not None
        offset = self.written_bytes
        source = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        done = 0
        try:
            while done < nbytes:
                done += os.pwrite(self._descriptor, source[done : done + WRITE_BYTES], offset + done)
        except OSError as error:
            raise self._failed(error) from None
        self.written_bytes += nbytes
        self._cached_bytes += nbytes
        if self._cached_bytes >= WRITE_BYTES:
            self.drop_cached()
        return offset

    def skip_to(self, alignment: int) -> None:
        """The next append begins at a multiple of `alignment`."""
        self.written_bytes = align_up(self.written_bytes, alignment)

    def drop_cached(self) -> None:
        """Bring what was written to the disk and out of the page cache."""
        assert self._descriptor is not None
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from None
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._cached_bytes = 0

    def close(self) -> None:
        """Give the space back. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._named is not None:
            self._named.unlink(missing_ok=True)

    def _open(self) -> int:
        unnamed = getattr(os, "O_TMPFILE", None)
        if unnamed is not None and Path("/proc/self/fd").exists():
            with contextlib.suppress(OSError):  # a file system without it
                return os.open(self.directory, unnamed | os.O_RDWR | os.O_CLOEXEC, 0o600)
        descriptor, name = tempfile.mkstemp(prefix="headrace-", suffix=".spill", dir=self.directory)
        self._named = Path(name)
        if Path("/proc/self/fd").exists():
            self._named.unlink()
            self._named = None
        return descriptor

    def _failed(self, error: OSError) -> errors.SpillFailed:
        free = 0
        with contextlib.suppress(OSError):
            status = os.statvfs(self.directory)
            free = status.f_bavail * status.f_frsize
        reason = os.strerror(error.errno) if error.errno else str(error)
        return errors.SpillFailed(
            directory=str(self.directory), needed_bytes=self.nbytes, free_bytes=free, reason=reason
        )


def spilled_size(sizes: list[int]) -> int:
    """Of the file that holds runs of these sizes, each at a place that direct reads like."""
    return sum(align_up(size, DIRECT_ALIGNMENT) for size in sizes)


def _directory() -> Path:
    """TMPDIR if it is set; else /var/tmp, which unlike /tmp is on a disk."""
    candidates = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir()]
    existing = [Path(name) for name in candidates if name and os.access(name, os.W_OK | os.X_OK)]
    return next((path for path in existing if not _in_memory(path)), existing[0] if existing else Path.cwd())


def _in_memory(path: Path) -> bool:
    """Whether the directory's files take the very memory that they should save, as far as /proc/mounts tells."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return False
    real = path.resolve()
    under = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point.replace("\\040", " "))]
    return max(under, default=(0, ""))[1] in ("tmpfs", "ramfs")
