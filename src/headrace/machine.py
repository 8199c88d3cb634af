"""What this machine has: memory this process may use, and how fast weights go through its cores. Knows no model.

torch is imported only where a rate of its kernels is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core import FAST_DTYPE, Products

CGROUPS = Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""

UNLIMITED_BYTES = 2**60
"""Control groups write a huge number for "no limit"."""


def available_bytes() -> int:
    """Memory that this process could fill: what is free plus what it has, within its control group's limit."""
    free = _meminfo_available() + resident_bytes()
    limit = control_group_limit_bytes()
    return min(free, limit) if limit is not None else free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def control_group_limit_bytes(proc: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int | None:
    """The smallest memory limit of this process's control group and its parents (v1 and v2), or None."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    group = root / path.lstrip("/")
    limits = []
    for folder in (group, *group.parents):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            text = "max"
        if text.isdecimal() and int(text) < UNLIMITED_BYTES:
            limits.append(int(text))
        if folder == root:
            break
    return limits


def resident_bytes() -> int:
    """The process's resident set now (VmRSS)."""
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The process's largest resident set so far. VmHWM: ru_maxrss carries over what the parent had at fork."""
    scale = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def trim_memory() -> None:
    """Give memory that the C library keeps free back to the system: loading a tokenizer leaves some 20 MiB behind."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def tune_allocator(*, return_memory: bool) -> None:
    """Make the C library give larger allocations back to the system when they are freed, or keep them for the next.

    glibc begins with the first and drifts to the second by itself: it raises its threshold to 32 MiB as it goes. Then
    the KV cache, which grows in between, pins the holes that activations leave: under a cap a prefill of 1,530 tokens
    took 700 MiB instead of 250 (docs/log.md). It only helps if it is said before the heap has grown.
    """
    threshold, trim = (2**20, 8 * 2**20) if return_memory else (32 * 2**20, 64 * 2**20)
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, threshold)
        library.mallopt(M_TRIM_THRESHOLD, trim)


def _status_bytes(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


BUSY_SHARE = 0.15
"""Of all cores: if others have more, what is measured is not what the machine can do."""


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of all cores since the machine started, and of this process."""

    cores_s: float
    own_s: float
    wall_s: float

    @classmethod
    def now(cls, proc: Path = Path("/proc/stat")) -> ProcessorTime | None:
        """None where the system does not tell."""
        try:
            fields = proc.read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
        used_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return cls(used_s, time.process_time(), time.perf_counter())


def others_share(before: ProcessorTime | None, after: ProcessorTime | None) -> float:
    """The part of all cores that other processes had in between; 0 where the system does not tell."""
    if before is None or after is None or after.wall_s <= before.wall_s:
        return 0.0
    others_s = (after.cores_s - before.cores_s) - (after.own_s - before.own_s)
    return max(0.0, others_s / (after.wall_s - before.wall_s) / (os.cpu_count() or 1))


def measure_compute_bytes_per_s(dtype: str = "bfloat16", nbytes: int = 48 * 2**20) -> float:
    """Weight bytes per second of a matrix-vector product, as decoding one token does it: the median of five.

    Costs `nbytes` of memory for some milliseconds. `dtype` is torch's name.
    """
    import torch

    element = getattr(torch, dtype)
    columns = 4096
    rows = nbytes // (columns * torch.empty(0, dtype=element).element_size())
    weight = torch.full((rows, columns), 0.5, dtype=element)
    token = torch.ones((1, columns), dtype=element)
    return nbytes / _seconds(lambda: torch.nn.functional.linear(token, weight), unmeasured=1)


PRODUCT_ROWS = (1, 2, 4, 16, 64, 512)
MATRIX_SIDE = 2048
WEIGHTS_BYTES = 256 * 2**20
"""More than caches hold: fewer would be read out of them, pass after pass."""
MANY_ROWS = 64
"""From here on computing takes longer than memory does, whatever caches hold."""


def measure_products(dtype: str, nbytes: int = WEIGHTS_BYTES, product_rows: Sequence[int] = PRODUCT_ROWS) -> Products:
    """How fast square matrices of `dtype` (torch's name) are gone through, by rows: medians."""
    import torch

    matrices = square_matrices(dtype, nbytes)
    size, rates = matrices[0].nbytes, []
    for rows in product_rows:
        some = matrices[:1] if rows >= MANY_ROWS else matrices
        hidden = torch.ones((rows, MATRIX_SIDE), dtype=matrices[0].dtype)
        multiply = functools.partial(_multiply, hidden, some)
        times = 1 if rows >= MANY_ROWS else 3  # many rows take long enough not to depend on the moment
        rates.append((rows, size * len(some) / _seconds(multiply, unmeasured=1, measured=times)))
    return Products(tuple(rates))


def measure_fast_row_bytes_per_s(nbytes: int = 48 * 2**20) -> float:
    """The same of one row in bfloat16 by torch's own kernel."""
    from headrace import linears

    with linears.own_kernel():
        return measure_products(FAST_DTYPE, nbytes=nbytes, product_rows=(1,)).rates[0][1]


def square_matrices(dtype: str, nbytes: int = WEIGHTS_BYTES) -> list[Any]:
    """As many as have so many bytes, at least one."""
    import torch

    one = torch.full((MATRIX_SIDE, MATRIX_SIDE), 0.5, dtype=getattr(torch, dtype))
    return [one, *(one.clone() for _ in range(nbytes // one.nbytes - 1))]


def _multiply(hidden: Any, matrices: Sequence[Any]) -> None:
    import torch

    for matrix in matrices:
        torch.nn.functional.linear(hidden, matrix)


def measure_low_bits_per_s(bits: int, dtype: str = "bfloat16", nbytes: int = 48 * 2**20) -> float:
    """The same of weights of 8 or 4 bits, by torch's kernels for them."""
    import torch

    element, columns, group = getattr(torch, dtype), 4096, 64
    rows = nbytes * 8 // bits // columns
    token = torch.ones((1, columns), dtype=element)
    kernels = torch.ops.aten
    if bits == 8:
        wide, scale = torch.ones((rows, columns), dtype=torch.int8), torch.ones(rows, dtype=element)
        return nbytes / _seconds(lambda: kernels._weight_int8pack_mm(token, wide, scale), unmeasured=1)
    packed = torch.zeros((rows, columns // 2), dtype=torch.uint8)
    scales = torch.ones((columns // group, rows, 2), dtype=element)
    return nbytes / _seconds(lambda: kernels._weight_int4pack_mm_for_cpu(token, packed, group, scales), unmeasured=1)


ATTENTION_TOKENS, ATTENTION_HEADS, ATTENTION_GROUPS, ATTENTION_SIDE = 1024, 4, 4, 128
"""Tokens in the cache, key-value heads, query heads for each, numbers of a head."""


def measure_attention_bytes_per_s(dtype: str, layers: int = 16) -> float:
    """Keys and values that the query heads of one token go through in a second, counted for each query head.

    Several query heads look at the same keys and values, and torch's kernel goes through them for each.
    """
    import torch

    element = getattr(torch, dtype)
    heads = ATTENTION_HEADS * ATTENTION_GROUPS
    query = torch.full((1, heads, 1, ATTENTION_SIDE), 0.5, dtype=element)
    one = torch.full((1, ATTENTION_HEADS, ATTENTION_TOKENS, ATTENTION_SIDE), 0.5, dtype=element)
    caches = [(one.clone(), one.clone()) for _ in range(layers)]

    def attend() -> None:
        for keys, values in caches:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return 2 * one.nbytes * ATTENTION_GROUPS * layers / _seconds(attend, unmeasured=1, measured=3)


def measure_operations_per_s(dtype: str = "bfloat16", side: int = 1024) -> float:
    """Operations per second of a product of two square matrices, as a prefill does it: the median of five."""
    import torch

    matrix = torch.full((side, side), 0.5, dtype=getattr(torch, dtype))
    return 2 * side**3 / _seconds(lambda: torch.nn.functional.linear(matrix, matrix), unmeasured=2)


def _seconds(product: Callable[[], object], unmeasured: int, measured: int = 5) -> float:
    """The median of some; before them others that set the kernels up."""
    import torch

    seconds = []
    with torch.inference_mode():
        for _ in range(unmeasured + measured):
            start_s = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[unmeasured:])
