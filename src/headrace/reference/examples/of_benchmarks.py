"""Examples of what a benchmark cannot measure, or must not compare."""

from headrace.reference.examples import Example

_RUNS = """
from headrace.bench.summary import summarize

CAP = 3 * 2**30
figures = {
    "seconds_to_first_token": 9.0,
    "read_bytes_per_token": 0,
    "written_bytes": 0,
    "peak_memory_bytes": CAP,
    "cap_bytes": CAP,
    "cold": True,
}
bound = {"moved_bytes": 2**30, "compute_s": 0.2}
ours = figures | {"seconds_per_token": [1.0], "resident_bytes": 2**30, "bound": bound}
theirs = figures | {"seconds_per_token": [4.0]}


def compare(their_cap):
    runs = {
        "reader": [{"bytes_per_s": 2e9, "cap_bytes": CAP, "cold": True}],
        "headrace": [ours],
        "mapped": [theirs | {"cap_bytes": their_cap}],
    }
    summarize([{"model": "m", "machine": "x86_64", "memory_bytes": CAP, "tokens": 1, "runs": runs}])
"""

EXAMPLES = (
    Example(error="NotComparable", given=_RUNS, before="compare(None)", after="compare(CAP)"),
    Example(
        error="CannotCap",
        checkpoint=True,
        given="""
import sys
from pathlib import Path

from headrace.bench import group, rounds

group.ROOT = Path("no/control/groups")


def run(cap):
    wanted = rounds.Wanted(
        memory_bytes=cap, weight_bytes=0, tokens=1, threads=1, timeout_s=60, scratch=Path("split")
    )
    rounds.run_one(sys.executable, "reader", Path("models/tiny"), wanted)
""",
        before="run(2**30)",
        after="run(None)",
    ),
    Example(
        error="BenchmarkFailed",
        checkpoint=True,
        given="""
import json
from pathlib import Path

from headrace.bench import gguf

config = Path("models/tiny/config.json")
fields = json.loads(config.read_text()) | {"vocab_size": 49152}
""",
        before="""
config.write_text(json.dumps(fields | {"model_type": "gpt2"}))
gguf.write(Path("models/tiny"), Path("tiny.gguf"))
""",
        after="""
config.write_text(json.dumps(fields))
gguf.write(Path("models/tiny"), Path("tiny.gguf"))
""",
    ),
)
"""`BenchmarkFailed` shows a conversion: the shapes in the config are not looked at, so any vocabulary will do."""
