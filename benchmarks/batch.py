"""Tokens per second of `headrace run --batch` with one sequence and with many, under a memory cap, cold, in turn.

    python benchmarks/batch.py CHECKPOINT --memory 3GiB --sizes 1,32 --tokens 16

As root on Linux. Each size answers as many lines as it has sequences, with --tokens each to a prompt of a few;
time runs from the first request to the last answer. The last line of output is one JSON document.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.bench.group import drop_page_cache, memory_group
from headrace.settings import parse_size


def run(arguments: argparse.Namespace, size: int) -> dict:
    assert drop_page_cache(), "this takes root"
    with tempfile.TemporaryDirectory() as folder, memory_group(parse_size(arguments.memory)) as members:
        questions, out = Path(folder) / "questions.jsonl", Path(folder) / "answers.jsonl"
        questions.write_text("".join(json.dumps({"prompt": f"Why {n}"}) + "\n" for n in range(size)))
        command = [sys.executable, "-m", "headrace", "run", arguments.checkpoint, "--batch", str(questions)]
        command += ["-o", str(out), "--batch-size", str(size), "--max-tokens", str(arguments.tokens)]
        made = subprocess.run(
            [*command, "--memory", arguments.memory, "--temperature", "0", "--raw", "--json", "-q"],
            preexec_fn=lambda: members.write_text(str(os.getpid())),
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
        )
    if made.returncode:
        return {"failed": f"exit {made.returncode}: {made.stderr.strip().splitlines()[-1:]}"}
    document = json.loads(made.stdout.splitlines()[-1])
    return document["batch"] | {"peak_memory_bytes": document["report"]["peak_memory_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--sizes", default="1,32")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--timeout", type=int, default=600)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    runs = {size: run(arguments, size) for size in sizes}
    for size, figures in runs.items():
        print(size, figures)
    rates = [runs[size].get("tokens_per_s") for size in sizes]
    ratio = rates[-1] / rates[0] if all(rates) else None
    print(json.dumps({"runs": runs, "ratio": ratio}))


if __name__ == "__main__":
    main()
