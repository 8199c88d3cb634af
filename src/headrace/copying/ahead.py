"""Stored tensors on their way into memory before it is known where a model has them. Knows no plan, and not torch."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrace.copying.disk import READS_AT_ONCE, DiskReader, Ticket
from headrace.copying.pages import Pages
from headrace.core import DIRECT_ALIGNMENT, Segment, StoredTensor, align_up
from headrace.errors import ClosedError, ReadError
from headrace.metrics import Metrics
from headrace.store import Checkpoint, Placement, Read, coalesce, layout_as_stored


class ReadAhead:
    """Tensors of a checkpoint that are read ahead of the model that will use them, by the reader that goes on with it.

    A thread writes to each page before it is read into. Fresh memory can take seconds per GiB (docs/log.md), and the
    kernel brings it under a lock on the whole address space if a direct read, or madvise, is the first to touch it:
    whoever imports torch meanwhile, which maps hundreds of pieces, waits for it each time. An ordinary write does not
    hold that lock. From `wait` on nobody imports, and the reader's threads touch memory themselves, all at once.

    Memory: `committed_bytes` at most, beside the reader's staging. Guarantees: tensors lie as `layout_as_stored` puts
    them, like those of any slab; after `wait` no thread touches the memory any more, and either all of it was read or
    nothing of it is left; `keep` and `close` are idempotent.
    """

    def __init__(self, checkpoint: Checkpoint, tensors: Sequence[StoredTensor], metrics: Metrics) -> None:
        self.checkpoint = checkpoint
        self.metrics = metrics
        segments = [tensor.segment for tensor in tensors]
        offsets, nbytes = layout_as_stored([[segment] for segment in segments], [each.is_steady for each in tensors])
        self.pages = Pages(nbytes)
        self._offsets = dict(zip(segments, offsets, strict=True))
        self.reader = DiskReader({name: checkpoint.path(name) for name in checkpoint.files}, metrics)
        placements = [Placement(segment, offset) for segment, offset in self._offsets.items()]
        reads = coalesce(placements, self.reader.chunk_bytes, self.pages.nbytes)
        self._groups = [reads[begin : begin + READS_AT_ONCE] for begin in range(0, len(reads), READS_AT_ONCE)]
        self._tickets: list[Ticket] = []
        self._is_handed_over = False
        self._waited_for = threading.Event()
        self._thread = threading.Thread(target=self._submit, name="headrace-ahead", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self.reader.close()
            raise

    @property
    def committed_bytes(self) -> int:
        """Of memory, once `wait` has returned."""
        return sum(end - begin for begin, end in self._runs())

    def is_of(self, directory: Path) -> bool:
        return self.checkpoint.directory == directory

    def wait(self, on_read: Callable[[int, int], None] | None = None) -> None:
        """Wait until nothing is under way; `on_read` is told the bytes so far and in all.

        After an error nothing is kept: whoever needs these bytes reads them again, and meets it there.
        """
        self._waited_for.set()
        self._thread.join()
        sizes = [sum(read.needed_bytes for read in group) for group in self._groups]
        done, total = 0, sum(sizes)
        try:
            for ticket, nbytes in zip(self._tickets, sizes, strict=True):
                ticket.wait()
                done += nbytes
                if on_read is not None:
                    on_read(done, total)
        except ReadError:
            for ticket in self._tickets:
                ticket.cancel()
            for ticket in self._tickets:
                ticket.wait_idle()
            self.keep(())

    def offset_of(self, segment: Segment) -> int | None:
        """Where in `pages` these bytes lie; None if they were not read ahead. After `wait`."""
        return self._offsets.get(segment)

    def keep(self, segments: Iterable[Segment]) -> None:
        """Give all memory back that holds none of these. After `wait`."""
        wanted = set(segments)
        self._offsets = {segment: offset for segment, offset in self._offsets.items() if segment in wanted}
        end = 0
        for begin, next_end in [*self._runs(), (self.pages.nbytes, self.pages.nbytes)]:
            if begin > end:
                self.pages.discard(end, begin - end)
            end = next_end

    def hand_over(self, segments: Iterable[Segment]) -> None:
        """Keep these for a model, whose memory they are from now on. After `wait`."""
        self.keep(segments)
        self._is_handed_over = True

    def close(self) -> None:
        """Stop reading, and keep nothing but what a model has. For who does not go on with it."""
        self.reader.close()
        self._thread.join()
        if not self._is_handed_over:
            self.keep(())

    def _submit(self) -> None:
        with contextlib.suppress(ClosedError):
            for group in self._groups:
                if not self._waited_for.is_set():
                    self._touch(group)
                self._tickets.append(self.reader.submit(group, self.pages.address, "read ahead", keep=self.pages))

    def _touch(self, reads: Sequence[Read]) -> None:
        for read in reads:
            for copy in read.copies:
                ctypes.memset(self.pages.address + copy.target_offset, 0, copy.nbytes)

    def _runs(self) -> list[tuple[int, int]]:
        """Begins and ends of the runs of whole pages that hold what is kept."""
        runs: list[tuple[int, int]] = []
        for segment, offset in sorted(self._offsets.items(), key=lambda item: item[1]):
            begin = offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            end = align_up(offset + segment.nbytes, DIRECT_ALIGNMENT)
            if runs and begin <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            else:
                runs.append((begin, end))
        return runs
