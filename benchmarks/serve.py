"""The server under a memory cap: one request, sixteen at once, a long prompt, against `headrace run` and the bound.

    python benchmarks/serve.py CHECKPOINT --memory 3GiB --tokens 24 [--no-cap]

As root on Linux, for the control group (--no-cap runs without one, to try the script). The compute bound of a prompt of
512 tokens is the quickest of four passes over it with all weights in memory, in a process of its own that has no cap.
The last line of output is one JSON document.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from headrace.bench.group import memory_group
from headrace.bench.rounds import Wanted, run_one
from headrace.settings import parse_size

PROMPT_TOKENS, LONG_PROMPT_TOKENS, REQUESTS = 16, 512, 16
PREFILL = f"""
import json, sys, time, torch, headrace
model, _ = headrace.load(sys.argv[1], context={LONG_PROMPT_TOKENS})
ids = torch.arange(100, {100 + LONG_PROMPT_TOKENS})[None]
seconds = []
with torch.inference_mode():
    for _ in range(4):
        start = time.perf_counter()
        model(ids, logits_to_keep=1)
        seconds.append(time.perf_counter() - start)
print(json.dumps(min(seconds)))
"""


def tokens(count: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(100, 40_000) for _ in range(count)]


async def ask(client: httpx2.AsyncClient, prompt: list[int], count: int) -> list[float]:
    """Seconds from the request to each of its tokens."""
    start_s, times = time.perf_counter(), []
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, "logprobs": 0}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["logprobs"]:
                times.append(time.perf_counter() - start_s)
    return times


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


async def measure(url: str, count: int, rounds: int) -> dict:
    async with httpx2.AsyncClient(base_url=url, timeout=3600) as client:
        await ask(client, tokens(PROMPT_TOKENS, 0), 2)  # code that is loaded on first use
        alone, together, between, first = [], [], [], []
        for number in range(rounds):
            times = await ask(client, tokens(PROMPT_TOKENS, 1000 + number), count)
            alone.append(statistics.median(gaps(times)))
            start_s = time.perf_counter()
            prompts = [tokens(PROMPT_TOKENS, 100 * number + each) for each in range(REQUESTS)]
            answers = await asyncio.gather(*(ask(client, prompt, count) for prompt in prompts))
            together.append(sum(map(len, answers)) / (time.perf_counter() - start_s))
            between += [gap for times in answers for gap in gaps(times)]
            first.append((await ask(client, tokens(LONG_PROMPT_TOKENS, 5000 + number), 1))[0])
        status = (await client.get("/status")).json()
    between.sort()
    single_s = statistics.median(alone)
    return {
        "single_seconds_per_token": single_s,
        "tokens_per_s_16": statistics.median(together),
        "throughput_ratio_16": statistics.median(together) * single_s,
        "inter_token_median_s": statistics.median(between),
        "inter_token_p99_s": between[int(0.99 * (len(between) - 1))],
        "time_to_first_token_512_s": statistics.median(first),
        "pass_bound_s": status["rates"]["bound_s"],
        "peak_memory_bytes": status["memory"]["peak_bytes"],
        "read_bytes_per_pass": status["rates"]["read_bytes_per_pass"],
    }


def serve(arguments: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "headrace", "serve", arguments.checkpoint, "--memory", arguments.memory]
    # Room for what is asked here and no more: every block of the cache is a piece of a weight that has to be read.
    command += ["--port", str(arguments.port), "--max-model-len", "544", "--max-num-batched-tokens", "544"]
    command += ["--num-gpu-blocks-override", str(max(48, REQUESTS * -(-(PROMPT_TOKENS + arguments.tokens) // 16)))]
    with memory_group(parse_size(arguments.memory)) if not arguments.no_cap else contextlib.nullcontext() as members:
        process = subprocess.Popen(command, preexec_fn=lambda: members and members.write_text(str(os.getpid())))
        try:
            url = f"http://127.0.0.1:{arguments.port}"
            while process.poll() is None:
                with contextlib.suppress(httpx2.HTTPError):
                    if httpx2.get(f"{url}/ready").status_code == 200:
                        break
                time.sleep(0.5)
            if process.poll() is not None:
                sys.exit("the server has ended; its error is above")
            return asyncio.run(measure(url, arguments.tokens, arguments.rounds))
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--no-cap", action="store_true")
    arguments = parser.parse_args()
    prefill = [sys.executable, "-c", PREFILL, arguments.checkpoint]
    compute_s = json.loads(subprocess.run(prefill, capture_output=True, text=True, check=True).stdout)
    document = serve(arguments)
    bound_s = max(compute_s, document["pass_bound_s"])
    document |= {"prefill_512_compute_s": compute_s, "time_to_first_token_bound_s": bound_s}
    document["time_to_first_token_ratio"] = document["time_to_first_token_512_s"] / bound_s
    document["inter_token_p99_ratio"] = document["inter_token_p99_s"] / document["inter_token_median_s"]
    if not arguments.no_cap:
        cap_bytes = parse_size(arguments.memory)
        wanted = Wanted(
            memory_bytes=cap_bytes, weight_bytes=0, tokens=arguments.tokens, threads=0, timeout_s=3600, scratch=Path()
        )
        run = run_one(sys.executable, "headrace", Path(arguments.checkpoint), wanted)
        document["run_pass_bound_s"] = run["bound"]["seconds"]
        document["run_seconds_per_token"] = statistics.median(run["seconds_per_token"])
        document["single_against_run"] = document["single_seconds_per_token"] / document["run_seconds_per_token"]
    for name, value in document.items():
        print(f"{name:32} {value:.4g}", file=sys.stderr)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
