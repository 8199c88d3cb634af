"""Slabs: page-aligned memory that weights land in, exactly as large as asked for. Knows nothing of what lies in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

from headrace.core import DIRECT_ALIGNMENT, align_up


class Slab:
    """Anonymous memory, page-aligned, so that direct I/O may write into it and nothing rounds its size up.

    Pages are committed when first written: a slab costs nothing before. `discard` gives pages back at once, which
    freeing a torch tensor does not promise.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        self.nbytes = align_up(max(nbytes, 1), DIRECT_ALIGNMENT)
        # Private: Python's default is shared memory, which has no huge pages and is accounted as a file.
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: slower page walks, nothing else
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        """1-d uint8 over the whole slab; it keeps the memory alive."""

    def discard(self) -> None:
        """Drop the contents and give the pages back to the system; the slab can be written again."""
        self._map.madvise(mmap.MADV_DONTNEED)
