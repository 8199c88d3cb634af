"""Settings and questions that the tests of offload() share. The fixtures are in conftest.py."""

from __future__ import annotations

import os
from pathlib import Path

from tiny_modules import WIDTH, random

from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.offloading import Handle

ALL = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1))
MAPPED = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1.0))
X = random(3, WIDTH)


def groups(size: int, number: int = 1, step: int = 1, params: frozenset[str] = frozenset()) -> OffloadConfig:
    return OffloadConfig(
        prefetch=PrefetchOffloadConfig(
            offload_group_size=size, offload_num_in_group=number, offload_prefetch_step=step, offload_params=params
        )
    )


def proves(handle: Handle) -> bool:
    """Something was offloaded, and read: else a comparison with the resident module proves nothing."""
    return handle.report().offloaded_bytes > 0 and (handle.plan.backend == "uva" or handle.statistics().read_bytes > 0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
