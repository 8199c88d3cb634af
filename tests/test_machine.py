"""Limits of control groups as the kernel writes them, and what is measured of this process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from fakes import MIB, ControlGroups

from headrace import machine
from headrace.machine import UNLIMITED_BYTES, control_group_limit_bytes

GIB = 2**30
V1_UNLIMITED = "9223372036854771712\n"


def limit(groups: ControlGroups) -> int | None:
    return control_group_limit_bytes(groups.proc, groups.root)


# --- version 2 ------------------------------------------------------------------------------------------------------


def test_the_limit_of_its_own_group(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "0::/user.slice/run-1.scope\n")
    groups.limit("user.slice/run-1.scope", "memory.max", "3221225472\n")
    assert limit(groups) == 3 * GIB


@pytest.mark.parametrize(
    ("own", "parent", "smallest"),
    [("max", "2147483648", 2 * GIB), ("1073741824", "2147483648", GIB), ("2147483648", "1073741824", GIB)],
)
def test_a_parent_limits_its_children(tmp_path: Path, own: str, parent: str, smallest: int) -> None:
    groups = ControlGroups(tmp_path, "0::/a/b/c\n")
    groups.limit("a/b/c", "memory.max", own + "\n")
    groups.limit("a", "memory.max", parent + "\n")  # and a/b has no such file
    assert limit(groups) == smallest


def test_the_root_is_a_parent_too_and_what_is_above_it_is_not(tmp_path: Path) -> None:
    """In a container the root that is seen is the container's group."""
    groups = ControlGroups(tmp_path, "0::/\n")
    groups.limit("", "memory.max", "536870912\n")
    (tmp_path / "memory.max").write_text("1\n")
    assert limit(groups) == 512 * MIB


@pytest.mark.parametrize("text", ["max\n", "max", "", "\n", "nonsense", "-1", f"{UNLIMITED_BYTES}", f"{2**70}", "1.5"])
def test_no_limit(tmp_path: Path, text: str) -> None:
    groups = ControlGroups(tmp_path, "0::/a\n")
    groups.limit("a", "memory.max", text)
    assert limit(groups) is None


def test_the_largest_number_that_is_a_limit(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "0::/a\n")
    groups.limit("a", "memory.max", str(UNLIMITED_BYTES - 1))
    assert limit(groups) == UNLIMITED_BYTES - 1


def test_missing_files(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "0::/not/there\n")
    assert limit(groups) is None
    groups.proc.unlink()
    assert limit(groups) is None


def test_a_path_that_leads_out_of_the_root(tmp_path: Path) -> None:
    """So it reads where a process is in a group above the one that its namespace shows."""
    groups = ControlGroups(tmp_path, "0::/../../elsewhere\n")
    groups.limit("", "memory.max", str(GIB))
    assert limit(groups) == GIB


# --- version 1 ------------------------------------------------------------------------------------------------------


def test_version_1(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/y\n")
    groups.limit("memory/docker/abc", "memory.limit_in_bytes", f"{2 * GIB}\n")
    groups.limit("memory/docker", "memory.limit_in_bytes", V1_UNLIMITED)
    groups.limit("memory", "memory.limit_in_bytes", V1_UNLIMITED)
    groups.limit("x", "memory.limit_in_bytes", "1\n")  # of another controller
    assert limit(groups) == 2 * GIB


def test_version_1_in_a_container_that_shows_only_its_own_group(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "4:memory:/docker/abc\n")
    groups.limit("memory", "memory.limit_in_bytes", f"{GIB}\n")
    assert limit(groups) == GIB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "4:memory:/a:b\n0::/\n")  # a group's name may hold a colon
    groups.limit("memory/a:b", "memory.limit_in_bytes", V1_UNLIMITED)
    assert limit(groups) is None
    groups.limit("memory/a:b", "memory.limit_in_bytes", "4096\n")
    assert limit(groups) == 4096


def test_both_versions_at_once(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, "4:memory:/a\n0::/b\n")
    groups.limit("memory/a", "memory.limit_in_bytes", str(2 * GIB))
    groups.limit("b", "memory.max", str(GIB))
    assert limit(groups) == GIB


def test_the_fake_tree_is_written_as_the_kernel_writes_it() -> None:
    """Every line has three fields; every limit is a number or `max`."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    assert lines
    assert all(len(line.split(":", 2)) == 3 and line.split(":", 2)[2].startswith("/") for line in lines)
    for name in ("memory.max", "memory.limit_in_bytes"):
        for path in [*machine.CGROUPS.glob(name), *machine.CGROUPS.glob(f"*/{name}")]:
            text = path.read_text()
            assert text.endswith("\n")
            assert text.strip().isdecimal() or text.strip() == "max"
    found = control_group_limit_bytes()
    assert found is None or 0 < found < UNLIMITED_BYTES


# --- this process ---------------------------------------------------------------------------------------------------


def test_memory_of_this_process() -> None:
    assert 5 * MIB < machine.resident_bytes() <= machine.peak_resident_bytes()
    before = machine.resident_bytes()
    # A mapping of its own: what the C library keeps free from tests before could serve any other allocation.
    with mmap.mmap(-1, 64 * MIB) as block:
        block[:] = b"\1" * len(block)
        assert machine.resident_bytes() - before > 48 * MIB
    assert machine.peak_resident_bytes() >= before + 48 * MIB, "the peak remembers"


def test_available_memory_is_within_the_machine_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.available_bytes() <= whole + machine.resident_bytes()
    monkeypatch.setattr(machine, "control_group_limit_bytes", lambda: 123)
    assert machine.available_bytes() == 123
    monkeypatch.setattr(machine, "control_group_limit_bytes", lambda: 2**60)
    assert machine.available_bytes() > 123


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(self: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", no_file)
    assert machine.peak_resident_bytes() > 5 * MIB
    assert machine.resident_bytes() == machine.peak_resident_bytes()
    assert machine.available_bytes() > 5 * MIB
    assert control_group_limit_bytes() is None


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.cores() == os.cpu_count()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_compute_rate(dtype: str) -> None:
    assert 1e6 < machine.measure_compute_bytes_per_s(dtype, nbytes=2 * MIB) < 1e13


@pytest.mark.slow
def test_products_are_measured_for_every_number_of_rows() -> None:
    products = machine.measure_products("float32", nbytes=1)
    assert [rows for rows, _ in products.rates] == list(machine.PRODUCT_ROWS)
    assert all(1e5 < rate < 1e13 for _, rate in products.rates)


def test_the_compute_rate_is_the_median_without_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [0, 0.5, 200, 201, 300, 304, 400, 402, 500, 503, 600, 605]  # half a second, then 1, 4, 2, 3 and 5
    clock = iter(ends)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.measure_compute_bytes_per_s("float32", nbytes=3 * MIB) == MIB


def test_looking_at_a_cache_has_a_rate() -> None:
    assert machine.measure_attention_bytes_per_s("float32", layers=1) > 0


def test_what_others_use_is_what_is_neither_idle_nor_ours(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 99999 888 5 5 40 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    now = machine.ProcessorTime.now(stat)
    assert now is not None
    assert now.cores_s == 200 / os.sysconf("SC_CLK_TCK")
    assert machine.ProcessorTime.now(tmp_path / "missing") is None
    cores = os.cpu_count() or 1
    before, after = (machine.ProcessorTime(*seconds) for seconds in ((0, 0, 0), (cores, 0.25 * cores, 2)))
    assert machine.others_share(before, after) == pytest.approx(0.375)
    assert machine.others_share(before, before) == 0
    assert machine.others_share(None, after) == 0
