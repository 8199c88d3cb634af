"""What one GPU of vLLM or SGLang holds beside the layers' weights, and what is left for them. Pure arithmetic.

What these engines measure at start (activations, graphs, the context) is estimated here, and reports say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core import Machine
from headrace.datasheets import CONTEXT_BYTES
from headrace.peers.layout import PeerModel
from headrace.peers.vllm import Offloaded

GRAPH_BYTES = 512 * 2**20
"""CUDA graphs. An assumption: not measured here."""
PROFILED_TOKENS = 2048
"""At once in the profiling run that sizes activations: vLLM's default for GPUs below 70 GiB."""


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes on one GPU."""

    stack_bytes: int
    """Layers' weights that stay."""
    pool_bytes: int
    around_bytes: int
    kv_bytes: int
    """For the longest sequence, for each of the sequences."""
    activation_bytes: int
    other_bytes: int
    """Context and graphs."""
    pinned_bytes: int
    """Host memory of this GPU's offloaded weights."""

    @property
    def total_bytes(self) -> int:
        """On the GPU."""
        return (
            self.stack_bytes
            + self.pool_bytes
            + self.around_bytes
            + self.kv_bytes
            + self.activation_bytes
            + self.other_bytes
        )


def share(model: PeerModel, taken: Offloaded, *, tokens: int, sequences: int, graphs: bool = True) -> Share:
    """One GPU's, with a KV cache for so many sequences of so many tokens."""
    windowed = model.kv_window_bytes_per_token * min(tokens, model.kv_window_tokens)
    return Share(
        stack_bytes=model.stack_bytes - taken.nbytes,
        pool_bytes=taken.pool_bytes,
        around_bytes=model.around_bytes,
        kv_bytes=(model.kv_bytes_per_token * tokens + windowed) * sequences,
        activation_bytes=model.activation_bytes_per_token * PROFILED_TOKENS + model.logits_bytes * max(256, sequences),
        other_bytes=CONTEXT_BYTES + (GRAPH_BYTES if graphs else 0),
        pinned_bytes=taken.pinned_bytes,
    )


def seconds_per_token(model: PeerModel, taken: Offloaded, machine: Machine) -> float:
    """Of one sequence: what is read on the GPU, and what comes over its link, at once or one after the other."""
    gpu = machine.accelerator
    assert gpu is not None
    away = {(number, param.name) for number, params in taken.layers for param in params}
    on_gpu = sum(
        param.nbytes * param.used_share
        for number, layer in enumerate(model.layers)
        for param in layer
        if not taken.zero_copy or (number, param.name) not in away
    )
    compute_s = (on_gpu + model.around_bytes / 2) / gpu.memory_bytes_per_s
    link_s = taken.moved_bytes_per_token / gpu.link.bytes_per_s
    return max(compute_s, link_s) if taken.overlaps else compute_s + link_s
