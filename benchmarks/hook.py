"""What a hook costs when it has nothing to do: every block has a slot of its own, and is in it.

    python benchmarks/hook.py --blocks 32 --rounds 300

A stack of blocks that compute nothing, with eight weights each, is called plainly and offloaded; the difference per
block is the hook. Medians over the rounds, taken in turn. The last line of output is one JSON document.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from torch import nn

import headrace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(16, 16) for _ in range(8)])

    def forward(self, hidden):
        return hidden


class Stack(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def seconds(model, hidden):
    begin_s = time.perf_counter()
    model(hidden)
    return time.perf_counter() - begin_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    plain, hooked = Stack(arguments.blocks).eval(), Stack(arguments.blocks).eval()
    prefetch = {"offload_group_size": 1, "offload_prefetch_step": arguments.blocks}
    handle = headrace.offload(hooked, headrace.OffloadConfig(prefetch=prefetch))
    assert handle.plan.slots == arguments.blocks
    hidden = torch.zeros(1)
    rounds = {"plain": [], "hooked": []}
    gc.disable()
    with torch.inference_mode():
        for _ in range(arguments.rounds):
            rounds["plain"].append(seconds(plain, hidden))
            rounds["hooked"].append(seconds(hooked, hidden))
    per_block = {name: statistics.median(some) / arguments.blocks * 1e6 for name, some in rounds.items()}
    document = {
        "blocks": arguments.blocks,
        "plain_us_per_block": per_block["plain"],
        "hooked_us_per_block": per_block["hooked"],
        "hook_us_per_block": per_block["hooked"] - per_block["plain"],
        "slot_misses": handle.statistics().slot_misses,
        "stalls": handle.report().counters.stalls,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
