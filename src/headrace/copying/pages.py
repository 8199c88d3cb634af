"""Aligned memory, exactly as large as asked for. Knows nothing of what lies in it, and not torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from headrace.core import DIRECT_ALIGNMENT, HUGE_PAGE_BYTES, align_up


class Pages:
    """Anonymous memory in huge pages where the system has them; direct I/O may read into it.

    Pages are committed when first written: they cost nothing before, and never more than their size. `discard` gives
    them back at once, which freeing a torch tensor does not promise. Huge pages are not a nicety: a direct read into
    them is a few large pieces for the disk instead of one per 4 KiB, half as fast again on a virtual disk
    (docs/log.md).
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        self.nbytes = align_up(max(nbytes, 1), DIRECT_ALIGNMENT)
        huge_pages = huge_pages and self.nbytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
        # Private: Python's default is shared memory, which has no huge pages and is accounted as a file. The address
        # space beyond `nbytes` is never touched; it lets the pages begin where a huge one does.
        spare_bytes = HUGE_PAGE_BYTES if huge_pages else 0
        self._map = mmap.mmap(-1, self.nbytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = align_up(begin, HUGE_PAGE_BYTES) if huge_pages else begin
        self._offset = self.address - begin
        if huge_pages:
            with contextlib.suppress(OSError):  # a kernel without them
                whole_bytes = self.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES  # the rest would commit more than asked
                self._map.madvise(mmap.MADV_HUGEPAGE, self._offset, whole_bytes)

    def view(self) -> memoryview:
        """All bytes, for system calls."""
        return memoryview(self._map)[self._offset : self._offset + self.nbytes]

    def discard(self, begin: int = 0, nbytes: int | None = None) -> None:
        """Drop the contents, or those of some whole pages, and give the pages back; they can be written again."""
        self._map.madvise(mmap.MADV_DONTNEED, self._offset + begin, self.nbytes - begin if nbytes is None else nbytes)
