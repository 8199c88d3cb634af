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

_MOST_PER_TASK, _FEWEST_PER_TASK = 128, 8
"""Files: a task opens the wheel and collects garbage, which takes as long as reading eight of them."""
_ROUNDS = 3
"""A task is at most this part of what is left for one process, so that all of them end at about the same time."""
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
    tasks = list(_tasks(files, _workers()))
    done = 0
    parts = _in_processes(read, source, tasks) if len(files) >= _WORTH_PROCESSES else _here(read, source, tasks)
    for part, task in zip(parts, tasks, strict=True):
        yield from part
        done += len(task)
        if on_progress is not None:
            on_progress(label, done, len(files))


def _tasks(files: Sequence[str], workers: int) -> Iterator[Sequence[str]]:
    """The files in their order, in pieces that get smaller towards the end."""
    start = 0
    while start < len(files):
        share = (len(files) - start) // (_ROUNDS * workers)
        end = start + min(_MOST_PER_TASK, max(_FEWEST_PER_TASK, share))
        yield files[start:end]
        start = end


def _workers() -> int:
    return len(os.sched_getaffinity(0))


def _here(
    read: Callable[[PackageSource, Sequence[str]], list[T]], source: PackageSource, tasks: Iterable[Sequence[str]]
) -> Iterator[list[T]]:
    return (read(source, task) for task in tasks)


def _in_processes(
    read: Callable[[PackageSource, Sequence[str]], list[T]], source: PackageSource, tasks: Sequence[Sequence[str]]
) -> Iterator[list[T]]:
    # Spawned and not forked: a progress bar has a thread, and a fork would copy its locks as they are.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(_workers(), mp_context=context, initializer=_begin)
    try:
        yield from pool.map(read, [source] * len(tasks), tasks)
    finally:
        # After Ctrl-C nobody wants what is still waiting.
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    gc.disable()
    # Ctrl-C goes to all processes of a terminal. The one that started them ends them; they would only complain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
