"""Many source files read by several processes, in order. Knows no errors."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from headrace.reference.packages import PackageSource

Progress = Callable[[str, int, int], None]
"""Called with a label, the number of files that are done, and that of all."""
T = TypeVar("T")

_FILES_PER_TASK = 24
_WORTH_PROCESSES = 150
"""With fewer files to read, starting processes takes longer than reading."""


def each_file(
    read: Callable[[PackageSource, Sequence[str]], list[T]],
    source: PackageSource,
    files: Sequence[str],
    label: str,
    on_progress: Progress | None = None,
) -> Iterator[T]:
    """What `read` makes of each file, in the order of the files; it is a function that other processes can import."""
    tasks = [files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)]
    done = 0
    parts = _in_processes(read, source, tasks) if len(files) >= _WORTH_PROCESSES else _here(read, source, tasks)
    for part, task in zip(parts, tasks, strict=True):
        yield from part
        done += len(task)
        if on_progress is not None:
            on_progress(label, done, len(files))


def _here(
    read: Callable[[PackageSource, Sequence[str]], list[T]], source: PackageSource, tasks: Iterable[Sequence[str]]
) -> Iterator[list[T]]:
    return (read(source, task) for task in tasks)


def _in_processes(
    read: Callable[[PackageSource, Sequence[str]], list[T]], source: PackageSource, tasks: Sequence[Sequence[str]]
) -> Iterator[list[T]]:
    # Spawned and not forked: a progress bar has a thread, and a fork would copy its locks as they are.
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0))
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    try:
        yield from pool.map(read, [source] * len(tasks), tasks)
    finally:
        # After Ctrl-C nobody wants what is still waiting.
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    gc.disable()
    # Ctrl-C goes to all processes of a terminal. The one that started them ends them; they would only complain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
