"""A file in the address space: its bytes lie where the page cache has them. Knows no tensors, and not torch."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from headrace import errors
from headrace.store import Read

GROUP_BYTES = 32 * 2**20
"""Of a file that is brought to memory: while one group arrives, the next is asked for. So often progress is told, and
an interrupt is seen."""

ASK_BYTES = 2**20
"""At once. A kernel leaves out what is more than its disk takes; then the rest is read when it is waited for."""

POPULATE_READ = 22
"""madvise: bring pages to memory, and into the page tables. Since Linux 5.14; Python has no name for it."""

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)
"""mmap: no memory is set aside for copies of pages, of which there are none as long as nobody writes."""


class MappedFile:
    """A private mapping: the model could write to it without touching the file.

    Memory: the pages that were touched, which belong to the page cache: whoever maps the file as well shares them, and
    whoever reads it later finds them there. If memory runs short the system may drop them, and reads them again when
    they are needed. If that fails, or the file was cut off since, the process ends (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        """Raises: ReadError."""
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE, prot=access)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise errors.ReadError(file=str(path), offset=0, nbytes=0, reason=str(error)) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def view(self) -> memoryview:
        """All bytes."""
        return memoryview(self._map)

    def advise(self, advice: int, offset: int, nbytes: int) -> None:
        """Call `madvise` for all pages that have one of these bytes. Raises: OSError."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(advice, start, offset + nbytes - start)

    def ask_for(self, read: Read) -> None:
        """Begin to read it into the page cache. Raises: OSError."""
        end = read.offset + read.needed_bytes
        if end > len(self._map):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        for offset in range(read.offset, end, ASK_BYTES):
            self.advise(mmap.MADV_WILLNEED, offset, min(ASK_BYTES, end - offset))

    def wait_for(self, read: Read) -> None:
        """Wait until it is in memory, and used without a page fault. Raises: OSError: it cannot be read."""
        try:
            self.advise(POPULATE_READ, read.offset, read.needed_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            bytes(self.view()[read.offset : read.offset + read.needed_bytes : mmap.PAGESIZE])  # an older kernel
