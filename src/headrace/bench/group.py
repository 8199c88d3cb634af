"""A memory control group for one process, and a cold page cache before it. Linux, as root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import CannotCap

ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with this limit and no swap, version 1 or 2: yields the file that a process id is written to.

    Raises: CannotCap.
    """
    first_version = (ROOT / "memory").is_dir()
    group = (ROOT / "memory" if first_version else ROOT) / f"headrace-bench-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotCap(reason=f"{error.strerror}: {group}") from error
    try:
        try:
            (group / ("memory.limit_in_bytes" if first_version else "memory.max")).write_text(str(limit_bytes))
        except OSError as error:
            raise CannotCap(reason=f"{error.strerror}: a limit of {limit_bytes} bytes in {group}") from error
        with contextlib.suppress(OSError):  # where the system has no swap there is no such file
            (group / ("memory.swappiness" if first_version else "memory.swap.max")).write_text("0")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def drop_page_cache() -> bool:
    """Or what a candidate before has read costs the next one nothing. Whether it could be done: it takes root."""
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
