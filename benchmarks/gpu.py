"""What a GPU shows: agreement of every way of offloading with the resident model, and rates against their bounds.

    python benchmarks/gpu.py [--device cuda:0] [--block-mib 128] [--blocks 12]

One JSON document on the last line. A rate is the median of passes; candidates take turns in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import platform
import sys
import time
from statistics import median
from typing import Any

import torch
from torch import nn

import headrace
from headrace import OffloadConfig
from headrace.copying.accelerator import open_device
from headrace.copying.slots import Slab

MIB = 2**20
ROUNDS = 5


class Block(nn.Module):
    """`mib` MiB of weights; a product of few rows is bound by the link, one of many by computing."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        width = 4096
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(width, width).mul_(0.02).to(torch.bfloat16), requires_grad=False)
            for _ in range(mib * MIB // (2 * width * width))
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            hidden = torch.tanh(hidden @ weight)
        return hidden


def stack(blocks: int, mib: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(mib) for _ in range(blocks))).eval()


def groups(size: int, number: int = 1, step: int = 1) -> OffloadConfig:
    fields = {"offload_group_size": size, "offload_num_in_group": number, "offload_prefetch_step": step}
    return OffloadConfig.model_validate({"prefetch": fields})


UVA = OffloadConfig.model_validate({"uva": {"cpu_offload_gb": 1000}})


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def agreement(device: str, blocks: int) -> dict[str, Any]:
    """Bit-identical for every setting; each says how much it offloaded and moved."""
    resident = stack(blocks, 32)
    reference = copy.deepcopy(resident).to(device)
    settings: dict[str, dict[str, Any]] = {
        "prefetch 1/1/1": {"config": groups(1)},
        "prefetch 1/1/3": {"config": groups(1, 1, 3)},
        "prefetch 4/2/2": {"config": groups(4, 2, 2)},
        "prefetch, all have slots": {"config": groups(2, 1, 99)},
        "prefetch, pageable": {"config": groups(1), "pin_memory": False},
        "prefetch, host and disk": {"config": groups(1), "host_memory": blocks * 32 * MIB // 2},
        "uva": {"config": UVA},
        "uva, pageable": {"config": UVA, "pin_memory": False},
    }
    rows = {}
    for name, options in settings.items():
        module = copy.deepcopy(resident)
        with torch.inference_mode(), headrace.offload(module, device=device, **options) as handle:
            equal = True
            for tokens in (1, 33, 1, 512):
                hidden = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)
                equal &= torch.equal(module(hidden), reference(hidden))
            report = handle.report()
            rows[name] = {
                "equal": equal,
                "offloaded_bytes": report.offloaded_bytes,
                "copied_bytes": report.counters.copied_bytes,
                "read_bytes": report.counters.read_bytes,
                "slot_misses": report.counters.slot_misses,
                "fallbacks": list(report.fallbacks),
            }
        say(f"agreement, {name}: {'equal' if equal else 'DIFFERENT'}")
    rows["graph"] = graph_agreement(device, resident, reference)
    return rows


def graph_agreement(device: str, resident: nn.Module, reference: nn.Module) -> dict[str, Any]:
    """A captured pass, replayed with other inputs, between eager passes."""
    module = copy.deepcopy(resident)
    equal = True
    with torch.inference_mode(), headrace.offload(module, groups(1, 1, 2), device=device) as handle:
        given = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
        for _ in range(3):
            module(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(given)
        for _ in range(4):
            given.copy_(torch.randn_like(given))
            graph.replay()
            equal &= torch.equal(output, reference(given))
            equal &= torch.equal(module(given), reference(given))
        torch.cuda.synchronize()
        copied = handle.report().counters.copied_bytes
        del graph
    return {"equal": equal, "copied_bytes": copied}


def plain_copy(device: str, nbytes: int) -> float:
    """Bytes per second of one large page-locked copy: what the link gives."""
    target = open_device(device)
    assert target is not None
    slab, memory = Slab(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device)
    slab.bytes.zero_()
    assert target.page_lock(slab) is None
    stream = target.new_stream()
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy(memory, slab.bytes[:nbytes], stream, page_locked=True)
        target.wait_idle()
        seconds.append(time.perf_counter() - start_s)
    target.unlock(slab)
    return nbytes / median(seconds[1:])


def pass_seconds(module: nn.Module, hidden: torch.Tensor, passes: int) -> float:
    """Of one pass, when several follow each other."""
    module(hidden)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(passes):
        module(hidden)
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / passes


def rates(device: str, blocks: int, mib: int) -> dict[str, Any]:
    """Streaming everything, bound by the link and bound by compute; in place; and from disk."""
    resident = stack(blocks, mib)
    nbytes = blocks * mib * MIB
    reference = copy.deepcopy(resident).to(device)
    found: dict[str, Any] = {"offloaded_bytes": nbytes}
    candidates: dict[str, dict[str, Any]] = {
        "prefetch": {"config": groups(1)},
        "prefetch, 2 ahead": {"config": groups(1, 1, 2)},
        "uva": {"config": UVA},
        "prefetch, host and disk": {"config": groups(1), "host_memory": nbytes // 2},
    }
    with torch.inference_mode(), contextlib.ExitStack() as opened:
        handles = {
            name: opened.enter_context(headrace.offload(copy.deepcopy(resident), device=device, **options))
            for name, options in candidates.items()
        }
        for tokens in (1, 2048, 8192):
            hidden = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)
            link, compute = [], []
            times: dict[str, list[float]] = {name: [] for name in handles}
            for _ in range(ROUNDS):
                link.append(plain_copy(device, mib * MIB))
                compute.append(pass_seconds(reference, hidden, 3))
                for name, handle in handles.items():
                    times[name].append(pass_seconds(handle.module, hidden, 3))
            bound_s = max(median(compute), nbytes / median(link))
            found[f"{tokens} tokens"] = {
                "plain_copy_bytes_per_s": median(link),
                "compute_s": median(compute),
                "bound_s": bound_s,
                **{
                    name: {
                        "pass_s": median(values),
                        "times_bound": median(values) / bound_s,
                        "share_of_plain_copy": nbytes / median(values) / median(link),
                    }
                    for name, values in times.items()
                },
            }
            say(f"{tokens} tokens: {json.dumps(found[f'{tokens} tokens'])}")
        for name, handle in handles.items():
            statistics = handle.statistics()
            found[f"{name}: hidden_fraction"] = statistics.hidden_fraction
            found[f"{name}: host_bytes"] = handle.report().host_bytes
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--block-mib", type=int, default=128)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device here", file=sys.stderr)
        return 2
    document = {
        "device": torch.cuda.get_device_name(options.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "agreement": agreement(options.device, options.blocks),
        "rates": rates(options.device, options.blocks, options.block_mib),
    }
    print(json.dumps(document))
    return 0 if all(row["equal"] for row in document["agreement"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
