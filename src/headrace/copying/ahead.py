"""Stored tensors on their way into the page cache before there is a model. Knows no plan, and not torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from headrace.copying.mapped import ASK_BYTES
from headrace.core import StoredTensor
from headrace.metrics import Metrics
from headrace.store import Checkpoint, Placement, Read, coalesce

GROUP_BYTES = 4 * 2**20
"""Two are under way: some milliseconds of a disk's work, for which an import may have to wait with its own file."""


class ReadAhead:
    """Tensors of a checkpoint that the kernel is asked to have in memory, where `residents` finds them.

    They are not mapped: bringing pages into this process takes the lock of its address space, and whoever imports torch
    meanwhile, which maps hundreds of pieces, waits for it each time (docs/log.md).

    Memory: none of this process. Guarantees: what cannot be read is left to whoever needs it; `wait` and `close` are
    idempotent, and after them there is neither thread nor open file.
    """

    def __init__(self, checkpoint: Checkpoint, tensors: Sequence[StoredTensor], metrics: Metrics) -> None:
        self.metrics = metrics
        self.read_bytes = 0
        """So far."""
        self._checkpoint = checkpoint
        self._reads = coalesce([Placement(tensor.segment, 0) for tensor in tensors], GROUP_BYTES)
        self._is_closed = False
        self._progress: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-ahead", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return sum(read.needed_bytes for read in self._reads)

    def wait(self, on_read: Callable[[int, int], None] | None = None) -> None:
        """Wait until nothing is under way; `on_read` is told the bytes so far and in all."""
        while (done := self._progress.get()) is not None:
            if on_read is not None:
                on_read(done, self.nbytes)
        self._progress.put(None)  # for who waits again
        self._thread.join()

    def close(self) -> None:
        """Ask for no more."""
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as files, contextlib.suppress(OSError):
                self._read({name: self._open(name, files) for name in {read.file for read in self._reads}})
        finally:
            self._progress.put(None)

    def _open(self, name: str, files: contextlib.ExitStack) -> int:
        descriptor = os.open(self._checkpoint.path(name), os.O_RDONLY | os.O_CLOEXEC)
        files.callback(os.close, descriptor)
        return descriptor

    def _read(self, descriptors: dict[str, int]) -> None:
        for read, following in itertools.pairwise([None, *self._reads, None]):
            if self._is_closed:
                return
            start_s = time.perf_counter()
            if following is not None:
                _ask_for(descriptors[following.file], following)
            if read is not None:
                _wait_for(descriptors[read.file], read)
                self.metrics.span("read ahead", "read", start_s)
                self.read_bytes += read.needed_bytes
                self._progress.put(self.read_bytes)


def _ask_for(descriptor: int, read: Read) -> None:
    for offset in range(read.offset, read.offset + read.needed_bytes, ASK_BYTES):
        os.posix_fadvise(descriptor, offset, ASK_BYTES, os.POSIX_FADV_WILLNEED)


def _wait_for(descriptor: int, read: Read) -> None:
    """What was asked for arrives in order: wait for a byte of each piece."""
    for offset in range(read.offset, read.offset + read.needed_bytes, ASK_BYTES):
        os.pread(descriptor, 1, offset)
