"""Candidates under one memory cap, cold, in turn: time and bytes per token, peak memory, distance to the bound.

    python benchmarks/capped.py CHECKPOINT --memory 3GiB --rounds 3 --tokens 6 --peers auto,mapped

As root on Linux (it makes memory control groups, v1 or v2, and drops the page cache before each candidate). Each
candidate runs in a process of its own; in every round the disk's own rate is measured first. The last line of output
is one JSON document.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from headrace.settings import parse_size
from headrace.units import format_bytes

WORKER = Path(__file__).with_name("worker.py")


@contextlib.contextmanager
def memory_group(limit_bytes: int):
    """A control group with this limit; yields the file that a process id is written to."""
    root = Path("/sys/fs/cgroup")
    first_version = (root / "memory").is_dir()
    group = (root / "memory" if first_version else root) / f"headrace-bench-{os.getpid()}"
    group.mkdir()
    try:
        if first_version:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        else:
            (group / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def run_capped(kind: str, arguments: argparse.Namespace) -> dict:
    """One candidate's JSON document, or what became of it."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    command = [sys.executable, str(WORKER), kind, arguments.checkpoint, "--memory", arguments.memory]
    with memory_group(parse_size(arguments.memory)) as members:
        made = subprocess.run(
            [*command, "--tokens", str(arguments.tokens)],
            preexec_fn=lambda: members.write_text(str(os.getpid())),
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
        )
    if made.returncode:
        return {"failed": f"exit {made.returncode}: {made.stderr.strip().splitlines()[-1:]}"}
    return json.loads(made.stdout.splitlines()[-1])


def table(results: dict[str, list[dict]]) -> dict:
    """Medians by candidate, printed as a table."""
    rate = statistics.median(run["bytes_per_s"] for run in results["disk"])
    mine = [run for run in results["headrace"] if "failed" not in run]
    moved_bytes = mine[0]["bound"]["moved_bytes"]
    bound_s = moved_bytes / rate
    print(f"disk alone: {format_bytes(rate)}/s; bound for {format_bytes(moved_bytes)} per token: {bound_s:.3f} s")
    print(f"{'candidate':12} {'s/token':>8} {'vs bound':>9} {'read/token':>11} {'written':>9} {'peak':>9} {'ratio':>8}")
    summary = {"disk_bytes_per_s": rate, "bound_s": bound_s}
    own_s = statistics.median(second for run in mine for second in run["seconds_per_token"])
    for kind, runs in results.items():
        good = [run for run in runs if "failed" not in run]
        if kind == "disk":
            continue
        if not good:
            print(f"{kind:12} {runs[0]['failed']}")
            summary[kind] = runs[0]
            continue
        seconds = statistics.median(second for run in good for second in run["seconds_per_token"])
        read = statistics.median(run["read_bytes_per_token"] for run in good)
        peak = max(run["peak_memory_bytes"] for run in good)
        written = max(run["written_bytes"] for run in good)
        summary[kind] = {
            "seconds_per_token": seconds,
            "read_bytes_per_token": read,
            "peak_memory_bytes": peak,
            "written_bytes": written,
            "runs": len(good),
        }
        print(
            f"{kind:12} {seconds:8.3f} {seconds / bound_s:8.2f}x {format_bytes(read):>11} {format_bytes(written):>9} "
            f"{format_bytes(peak):>9} {seconds / own_s:7.2f}x"
        )
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--peers", default="auto")
    parser.add_argument("--timeout", type=int, default=900)
    arguments = parser.parse_args()
    kinds = ["disk", "headrace", *[peer for peer in arguments.peers.split(",") if peer]]
    results: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        for kind in kinds:
            results[kind].append(run_capped(kind, arguments))
            print(f"round {number + 1}, {kind}: {json.dumps(results[kind][-1])[:400]}", file=sys.stderr, flush=True)
    print(json.dumps({"summary": table(results), "runs": results}))


if __name__ == "__main__":
    main()
