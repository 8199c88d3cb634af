"""One candidate in a process of its own: prefill 16 tokens, decode some, print one JSON document.

    python benchmarks/worker.py headrace|auto|mapped|disk|resident CHECKPOINT --memory 3GiB --tokens 6

`auto` is accelerate's device_map="auto", `mapped` is transformers' own mapping of the file, `disk` reads the files with
direct I/O and computes nothing: the rate that bounds every other candidate.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

PROMPT = list(range(100, 116))
DISK_PASSES = 3


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def disk_bytes() -> dict[str, int]:
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in pairs if name in ("read_bytes", "write_bytes")}


def decode(model, tokens: int, written_before: int) -> dict:
    import torch

    with torch.inference_mode():
        start_s = time.perf_counter()
        output = model(torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1)
        first_s = time.perf_counter() - start_s
        chosen, seconds = [], []
        before = disk_bytes()
        for _ in range(tokens):
            start_s = time.perf_counter()
            token = output.logits[:, -1:].argmax(-1)
            chosen.append(int(token))
            cache = {"cache": output.past_key_values} if "cache" in _names(model) else {}
            cache = cache or {"past_key_values": output.past_key_values}
            output = model(token, use_cache=True, **cache)
            seconds.append(time.perf_counter() - start_s)
        after = disk_bytes()
    return {
        "seconds_to_first_token": first_s,
        "seconds_per_token": seconds,
        "tokens": chosen,
        "read_bytes_per_token": (after["read_bytes"] - before["read_bytes"]) / tokens,
        "written_bytes": disk_bytes()["write_bytes"] - written_before,
    }


def _names(model) -> set[str]:
    import inspect

    return set(inspect.signature(type(model).forward).parameters)


def headrace(path: str, memory: str, tokens: int) -> dict:
    import headrace
    import headrace.engine  # python may write its compiled files: that is not ours to count

    before = disk_bytes()["write_bytes"]
    model, _ = headrace.load(path, memory=memory, context=64)
    figures = decode(model, tokens, before)
    report = headrace.report(model).to_json()
    kept = ("offloaded_bytes", "resident_bytes", "ring_bytes", "requested_bytes", "bound", "counters")
    return figures | {name: report[name] for name in kept} | {"planned": report["plan"]["memory"]}


def auto(path: str, memory: str, tokens: int) -> dict:
    """As much in memory as survives the cap: the library itself, its copies while loading and one layer come on top."""
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.settings import parse_size

    before = disk_bytes()["write_bytes"]
    room = parse_size(memory) - 1000 * 2**20
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": room}, offload_folder=folder
        )
        return decode(model.eval(), tokens, before)


def mapped(path: str, memory: str, tokens: int) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    before = disk_bytes()["write_bytes"]
    return decode(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval(), tokens, before)


def disk(path: str, memory: str, tokens: int) -> dict:
    """Direct reads of the same bytes pass after pass, four at a time, by code that Headrace does not share.

    As many bytes as do not fit into the memory, since that is what has to be read for every token; the first pass is
    not counted, since what lies below a virtual disk may keep what was read once.
    """
    from headrace.settings import parse_size

    chunk = 4 * 2**20
    files = sorted(Path(path).glob("*.safetensors"))
    places = [(file, offset) for file in files for offset in range(0, file.stat().st_size - chunk, chunk)]
    excess = max(chunk, sum(file.stat().st_size for file in files) - parse_size(memory))
    places = places[: excess // chunk]
    passes = [_read_all(places, chunk) for _ in range(1 + DISK_PASSES)]
    return {"bytes_per_s": statistics.median(passes[1:]), "first_pass_bytes_per_s": passes[0]}


def _read_all(places: list[tuple[Path, int]], chunk: int) -> float:
    queue, lock = iter(places), threading.Lock()

    def serve() -> None:
        huge = 2 * 2**20  # without huge pages the rate is a third lower
        memory = mmap.mmap(-1, chunk + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
        buffer = memoryview(memory)[start : start + chunk]
        descriptors: dict[Path, int] = {}
        while True:
            with lock:
                place = next(queue, None)
            if place is None:
                break
            file, offset = place
            if file not in descriptors:
                descriptors[file] = os.open(file, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptors[file], [buffer], offset)
        for descriptor in descriptors.values():
            os.close(descriptor)

    start_s = time.perf_counter()
    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(places) * chunk / (time.perf_counter() - start_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["headrace", "auto", "mapped", "disk"])
    parser.add_argument("checkpoint")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--tokens", type=int, default=6)
    arguments = parser.parse_args()
    run = {"headrace": headrace, "auto": auto, "mapped": mapped, "disk": disk}[arguments.kind]
    with contextlib.redirect_stdout(None):
        made = run(arguments.checkpoint, arguments.memory, arguments.tokens)
    print(json.dumps(made | {"peak_memory_bytes": status("VmHWM")}), flush=True)
    os._exit(0)  # tearing a mapped model down takes longer than running it
