"""Are plans right? Each cell is planned without torch, then run in a process of its own, and the two are compared.

    python benchmarks/planner.py [DIRECTORY] [--cells 14] [--rounds 3] [--tokens 12]

Checkpoints with random weights of up to 1.4 GiB are made in DIRECTORY (default: a directory in /var/tmp, removed at the
end). Prints a Markdown table of medians over the rounds, and last of all one JSON document. What is planned is what
`headrace plan` says with the rates that `headrace machine` measured just before: machines that others share are not the
same for long. The plan that `headrace run` makes is in the document too.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 2**20

# Name, dtype, and the config's fields.
COMMON = {"vocab_size": 49152, "max_position_embeddings": 8192}
SHAPES = {
    "llama-wide": (
        "bfloat16",
        "LlamaConfig",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 10, "num_attention_heads": 16,
         "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "llama-deep": (
        "float32",
        "LlamaConfig",
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "num_attention_heads": 16,
         "num_key_value_heads": 8, "tie_word_embeddings": False},
    ),
    "qwen3-moe": (
        "bfloat16",
        "Qwen3MoeConfig",
        {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts": 32,
         "num_experts_per_tok": 4, "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 4,
         "head_dim": 64, "tie_word_embeddings": False},
    ),
    "gemma2": (
        "float16",
        "Gemma2Config",
        {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 14, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256},
    ),
}  # fmt: skip

# Shape, share of the weights that the budget holds, context, batch.
CELLS = [
    ("llama-wide", 0.5, 256, 1), ("llama-wide", 0.75, 1024, 1), ("llama-wide", 0.75, 512, 4),
    ("llama-wide", 1.2, 512, 1),
    ("llama-deep", 0.4, 256, 1), ("llama-deep", 0.7, 1024, 1), ("llama-deep", 0.7, 512, 2),
    ("llama-deep", 1.2, 256, 1),
    ("qwen3-moe", 0.5, 512, 1), ("qwen3-moe", 0.8, 1024, 1), ("qwen3-moe", 1.2, 256, 1),
    ("gemma2", 0.5, 256, 1), ("gemma2", 0.75, 1024, 1), ("gemma2", 1.2, 512, 2),
]  # fmt: skip


def write(directory: Path, shape: str) -> None:
    import torch
    import transformers

    from headrace.bench import checkpoints

    dtype, kind, fields = SHAPES[shape]
    config = getattr(transformers, kind)(**COMMON, **fields, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    checkpoints.copy_tokenizer(directory)
    os.sync()  # or the disk is busy with it while it is measured


def predict(directory: Path, machine: Path, cell: tuple, tokens: int):
    """The forecast, for a budget that holds this share of the weights."""
    import dataclasses

    from headrace import forecast, machinefile, probing
    from headrace.config import OffloadConfig
    from headrace.planner import resident_memory_bytes

    probed = probing.Probed(machinefile.read(machine), ())
    subject = forecast.read_subject(str(directory))
    _, share, context, batch = cell
    wanted = {"memory": 2**40, "host_memory": None, "context": context, "batch": batch}
    demand = forecast.demand_for(subject, probed.machine, **wanted)
    demand = dataclasses.replace(demand, prefill_tokens=context - tokens)  # so that the cache is full at the end
    budget = resident_memory_bytes(subject.shape, demand) - int((1 - share) * subject.shape.weight_bytes)
    demand = dataclasses.replace(demand, memory_bytes=budget)
    return forecast.forecast(subject, probed, demand, OffloadConfig())


def worker(directory: str, budget: int, context: int, prefill: int, batch: int, tokens: int) -> dict:
    import time

    import torch

    from headrace import machine
    from headrace.engine import Engine

    engine = Engine.open(directory, memory=budget, context=lambda tokenizer, longest: (context, prefill), batch=batch)
    ids = torch.randint(100, 40000, (batch, prefill), generator=torch.Generator().manual_seed(0))
    processor = Stamps()
    begin_s = time.perf_counter()
    with torch.inference_mode():
        engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=[processor],
        )
    times_s = processor.times_s
    seconds = sorted(after - before for before, after in itertools.pairwise(times_s[1:]))
    return {
        "first_s": times_s[0] - begin_s,
        "decode_s": seconds[len(seconds) // 2],
        "planned_s": engine.plan.seconds_per_pass,
        "planned_first_s": engine.plan.seconds_to_first_token,
        "limited_by": engine.plan.bound.limited_by,
        "planned_bytes": engine.plan.memory.total_bytes,
        "baseline_bytes": engine.plan.memory.baseline_bytes,
        "working_bytes": engine.plan.memory.working_bytes,
        "peak_bytes": machine.peak_resident_bytes(),
        "backend": engine.plan.backend,
    }


class Stamps:
    """A logits processor that notes when it is called, once per pass."""

    def __init__(self):
        self.times_s = []

    def __call__(self, input_ids, scores):
        import time

        self.times_s.append(time.perf_counter())
        return scores


def measure(cell: tuple, directory: Path, machine: Path, tokens: int) -> dict:
    _, _, context, batch = cell
    made = predict(directory, machine, cell, tokens)
    wanted = made.demand
    arguments = [directory, wanted.memory_bytes, context, wanted.prefill_tokens, batch, tokens]
    command = [sys.executable, __file__, "--worker", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {
        "cell": cell,
        "forecast_bytes": made.plan.memory.total_bytes,
        "forecast_baseline_bytes": made.plan.memory.baseline_bytes,
        "forecast_s": made.plan.seconds_per_pass,
        "forecast_first_s": made.plan.seconds_to_first_token,
    }


def row(found: dict) -> str:
    shape, share, context, batch = found["cell"]
    memory, speed = found["forecast_bytes"] / found["peak_bytes"] - 1, found["forecast_s"] / found["decode_s"] - 1
    return (
        f"| {shape} {SHAPES[shape][0]} | {share:g} | {context} | {batch} | {found['backend']} "
        f"| {found['forecast_bytes'] / MIB:.0f} | {found['peak_bytes'] / MIB:.0f} | {memory:+.1%} "
        f"| {found['forecast_s'] * 1e3:.0f} | {found['decode_s'] * 1e3:.0f} | {speed:+.0%} "
        f"| {found['forecast_first_s']:.2f} | {found['first_s']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--cells", type=int, default=len(CELLS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--worker", nargs=6)
    arguments = parser.parse_args()
    if arguments.worker:
        directory, *numbers = arguments.worker
        print(json.dumps(worker(directory, *map(int, numbers))))
        return
    root = arguments.directory or Path(tempfile.mkdtemp(dir="/var/tmp", prefix="headrace-planner-"))
    results = []
    try:
        for number in range(arguments.rounds):
            for shape in SHAPES:
                cells = [cell for cell in CELLS[: arguments.cells] if cell[0] == shape]
                if cells:
                    results += measure_shape(shape, root / shape, cells, arguments.tokens)
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    finally:
        if arguments.directory is None:
            shutil.rmtree(root)
    print(
        "| shape | share | context | batch | backend | planned MiB | peak MiB | off | planned ms | ms/token | off "
        "| planned first s | first s |\n" + "|---" * 13 + "|"
    )
    for cell in CELLS[: arguments.cells]:
        print(row(median([found for found in results if found["cell"] == cell])))
    print(json.dumps(results))


def measure_shape(shape: str, directory: Path, cells: list[tuple], tokens: int) -> list[dict]:
    if not directory.exists():
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
             f"import planner; planner.write(planner.Path({str(directory)!r}), {shape!r})"],
            check=True, capture_output=True,
        )  # fmt: skip
    machine = directory / "machine.json"
    weights = directory / "model.safetensors"
    headrace = [sys.executable, "-m", "headrace", "machine", "--file", str(weights), "--output", str(machine)]
    subprocess.run(headrace, check=True, capture_output=True)
    return [measure(cell, directory, machine, tokens) for cell in cells]


def median(rounds: list[dict]) -> dict:
    """Of every figure on its own."""
    numbers = {name: value for name, value in rounds[0].items() if isinstance(value, (int, float))}
    return rounds[0] | {name: statistics.median(found[name] for found in rounds) for name in numbers}


if __name__ == "__main__":
    main()
