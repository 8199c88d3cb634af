"""Named threads that read a checkpoint's bytes into memory with direct I/O. Knows files and addresses, not models.

Each thread reads an aligned chunk into a staging buffer of its own and copies from there to where each tensor
belongs: tensors in a file start where the header happens to end, tensors in a slab at multiples of 64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace import errors
from headrace.copying.pages import Pages
from headrace.core import CHUNK_BYTES, DIRECT_ALIGNMENT, READER_THREADS
from headrace.metrics import Metrics
from headrace.store import Read

logger = logging.getLogger(__name__)


OnEnd = Callable[[BaseException | None], None]
"""What to do once every read of a ticket has ended, well or with this error. What it raises reaches the waiter."""


class Ticket:
    """Reads that belong together: one block's.

    Guarantees: `wait` returns after the last byte has been written, or raises the first error; once `wait` or
    `wait_idle` has returned, no thread touches the target any more.
    """

    def __init__(self, label: str, count: int, keep: object = None, on_end: OnEnd | None = None) -> None:
        self.label = label
        self.keep = keep
        """What owns the memory that is read into: it lives as long as a thread may still write there."""
        self._on_end = on_end
        self._unfinished = count
        self._remaining = count
        self._error: BaseException | None = None
        self._cancelled = False
        self._changed = threading.Condition()

    @property
    def ready(self) -> bool:
        return self._remaining == 0  # without the lock: it only ever becomes 0, and that last

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def wanted(self) -> bool:
        """False once reading on makes no sense."""
        return self._error is None and not self._cancelled

    def cancel(self) -> None:
        """Reads not begun yet are skipped; then `wait` raises, since the bytes are not there."""
        self._cancelled = True

    def wait_idle(self) -> None:
        """Wait until no read of this ticket is in flight or queued, whatever became of them."""
        if self.ready:
            return
        with self._changed:
            while self._remaining:
                self._changed.wait()

    def wait(self) -> None:
        """Wait for all bytes. Raises: ReadError."""
        self.wait_idle()
        if isinstance(self._error, errors.HeadraceError):
            # A new object: one error may reach several waiters, and each adds its own traceback.
            raise type(self._error)(**self._error.facts)
        if self._error is not None:
            raise self._error

    def finish_one(self, error: errors.HeadraceError | None = None) -> None:
        """One of the reads has ended. After the last one, `on_end` runs on this thread before any waiter wakes."""
        with self._changed:
            self._error = self._error or error
            self._unfinished -= 1
            last = self._unfinished == 0
        try:
            if last and self._on_end is not None:
                self._on_end(self._error)
        except BaseException as failure:
            # Like every failure here it belongs to the waiter: this thread has others to serve.
            self._error = self._error or failure
        finally:
            with self._changed:
                self._remaining -= 1
                if self._remaining == 0:
                    self._changed.notify_all()


READS_AT_ONCE = 16
"""Of what is loaded once: so often progress is told, and an interrupt is seen."""


def _memory(address: int, nbytes: int) -> memoryview:
    """For a system call to write to; whoever owns it sees that it lives so long."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class _File:
    """An open checkpoint file, direct if the file system can. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = hasattr(os, "O_DIRECT")
        self._replaced: int | None = None
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if not self.direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def fall_back(self) -> None:
        """Buffered reads, with the page cache dropped behind them. Other threads may be inside of a direct read."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._replaced, self.descriptor = self.descriptor, descriptor
        self.direct = False  # last: whoever sees it reads from the new descriptor

    def close(self) -> None:
        os.close(self.descriptor)
        if self._replaced is not None:
            os.close(self._replaced)


class DiskReader:
    """Reads chunks in the order in which they were asked for, several at a time.

    Memory: `threads` x `chunk_bytes` of staging. Guarantees: `submit` never blocks; chunks of a ticket may arrive in
    any order; an error fails its ticket only, and every ticket ends, whatever goes wrong; `close` waits for the threads
    and is idempotent.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        metrics: Metrics,
        *,
        threads: int = READER_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.metrics = metrics
        self.fallbacks: list[str] = []
        self._fallback_lock = threading.Lock()
        self.paths = dict(paths)
        self._files: dict[str, _File] = {}
        self._queue: deque[tuple[Ticket, Read, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"headrace-disk-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> int:
        return len(self._threads)

    @property
    def staging_bytes(self) -> int:
        return len(self._threads) * self.chunk_bytes

    def submit(
        self,
        reads: Sequence[Read],
        target_address: int,
        label: str,
        *,
        urgent: bool = False,
        keep: object = None,
        on_end: OnEnd | None = None,
    ) -> Ticket:
        """Start `reads` into memory at `target_address`; `urgent` ones go before everything that is queued.

        The target's memory has to live until the ticket is idle: `keep` is what owns it, or the caller sees to that.
        """
        ticket = Ticket(label, len(reads), keep, on_end)
        work = [(ticket, read, target_address) for read in reads]
        if not work and on_end is not None:
            on_end(None)
        with self._changed:
            if self._closed:
                raise errors.ClosedError()
            if urgent:
                self._queue.extendleft(reversed(work))
            else:
                self._queue.extend(work)
            self._changed.notify(len(work))
        return ticket

    def read_all(
        self, reads: Sequence[Read], target: Pages, label: str, on_read: Callable[[int, int], None] | None = None
    ) -> None:
        """Read into `target`, some at a time; `on_read` is told the bytes so far and in all. Raises: ReadError."""
        done, total = 0, sum(read.needed_bytes for read in reads)
        for start in range(0, len(reads), READS_AT_ONCE):
            some = reads[start : start + READS_AT_ONCE]
            self.submit(some, target.address, label, keep=target).wait()
            done += sum(read.needed_bytes for read in some)
            if on_read is not None:
                on_read(done, total)

    def close(self) -> None:
        """Skip what is queued, finish what is in flight, end the threads, close the files."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            skipped = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for ticket, _, _ in skipped:
            ticket.finish_one(errors.ClosedError())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _serve(self) -> None:
        staging = Pages(self.chunk_bytes)
        with staging.view() as view:
            while (work := self._next()) is not None:
                self._read(*work, view, staging.address)

    def _next(self) -> tuple[Ticket, Read, int] | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _read(self, ticket: Ticket, read: Read, target: int, staging: memoryview, staging_address: int) -> None:
        error: errors.HeadraceError | None = None
        if ticket.wanted:
            start_s = time.perf_counter()
            self.metrics.begin_read()
            try:
                if read.target_offset is not None and target % DIRECT_ALIGNMENT == 0:
                    self._fill(read, _memory(target + read.target_offset, read.nbytes))
                else:
                    self._fill(read, staging)
                    for copy in read.copies:
                        # ctypes lets other threads run during the copy; slicing a memoryview would not.
                        ctypes.memmove(target + copy.target_offset, staging_address + copy.source_offset, copy.nbytes)
            except BaseException as failure:
                # Whatever it is, it belongs to the waiter: this thread has others to serve.
                error = self._error(read, failure)
                self.metrics.add(read_errors=1)
            else:
                self.metrics.add(reads=1, read_bytes=read.nbytes, read_s=time.perf_counter() - start_s)
                self.metrics.span(ticket.label, "read", start_s)
            finally:
                self.metrics.end_read()
        else:
            error = self._error(read, errors.Reason("it was not wanted any more"))
        ticket.finish_one(error)

    def _error(self, read: Read, failure: BaseException) -> errors.ReadError:
        """A new error, without the traceback of `failure`: it would keep this thread's staging alive."""
        if isinstance(failure, OSError) and failure.errno:
            reason = os.strerror(failure.errno)
        else:
            reason = str(failure) if isinstance(failure, errors.Reason) else repr(failure)
        path = str(self.paths.get(read.file, read.file))
        return errors.ReadError(file=path, offset=read.offset, nbytes=read.needed_bytes, reason=reason)

    def _fill(self, read: Read, staging: memoryview) -> None:
        """Read until everything needed is in `staging`. Raises: OSError, Reason."""
        file = self._open(read.file)
        done = 0
        while done < read.needed_bytes:
            direct = file.direct
            # A direct read has to begin at an aligned place, also if the one before it ended elsewhere.
            begin = done // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT if direct else done
            try:
                count = self._pread(file, staging[begin : read.nbytes], read.offset + begin)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._fall_back(file)
                continue
            if begin + count > done:
                done = begin + count
            elif direct and os.fstat(file.descriptor).st_size >= read.offset + read.needed_bytes:
                self._fall_back(file)  # it is all there, and yet direct reads do not get there
            else:
                raise errors.Reason("the file ends before it: it was cut off while it was in use")
        if not file.direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.descriptor, read.offset, read.nbytes, os.POSIX_FADV_DONTNEED)

    def _pread(self, file: _File, into: memoryview, offset: int) -> int:
        """One system call; the seam where tests inject failures."""
        return os.preadv(file.descriptor, [into], offset)

    def _open(self, name: str) -> _File:
        with self._fallback_lock:
            if name not in self._files:
                self._files[name] = _File(self.paths[name])
                if not self._files[name].direct:
                    self._announce(self._files[name])
            return self._files[name]

    def _fall_back(self, file: _File) -> None:
        with self._fallback_lock:
            if file.direct:
                file.fall_back()
                self._announce(file)

    def _announce(self, file: _File) -> None:
        message = f"direct reads are not possible in {str(file.path.parent)!r}: reading through the page cache"
        if message not in self.fallbacks:
            self.fallbacks.append(message)
            logger.warning(message)


PROBE_BATCH_READS = 16
PROBE_SECONDS = 0.4


def measure_bytes_per_s(reader: DiskReader, sizes: Mapping[str, int]) -> float:
    """The rate at which `reader` gets through the files of these `sizes`: a short direct read, spread over the largest.

    Reads for about 0.4 s, each place once, since a second read may come out of a cache below us.
    """
    name = max(sizes, key=lambda file: sizes[file])
    chunk = reader.chunk_bytes
    whole = max(1, sizes[name] // chunk)
    offsets = [index * chunk for index in range(whole)]
    stride = max(1, whole // (PROBE_BATCH_READS * 8))
    places = [offset for start in range(stride) for offset in offsets[start::stride]]
    read_bytes, begin_s, now_s = 0, time.perf_counter(), 0.0
    while places and now_s < PROBE_SECONDS:
        some, places = places[:PROBE_BATCH_READS], places[PROBE_BATCH_READS:]
        reads = [Read(name, offset, chunk, min(chunk, sizes[name] - offset), ()) for offset in some]
        reader.submit(reads, 0, "probe").wait()
        read_bytes += sum(read.needed_bytes for read in reads)
        now_s = time.perf_counter() - begin_s
    return read_bytes / max(now_s, 1e-9)
