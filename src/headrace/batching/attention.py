"""Attention over a batch of sequences of unlike lengths, on the CPU: each sequence by itself.

transformers' own way without a flash kernel is one attention of all queries over all keys of the batch, with a mask
between the sequences: for 16 requests that is 16 times the work, and a mask as large as the cache. Here each sequence
goes through the same function that `generate` uses, so that it does not matter who else is in the batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "headrace_by_sequence"


def by_sequence(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Query of shape (1, heads, tokens, head_dim) over keys and values of shape (1, kv_heads, cached, head_dim).

    `cu_seq_lens_q` and `cu_seq_lens_k` say where each sequence begins. Gives (1, tokens, heads, head_dim).
    """
    queries = itertools.pairwise(cu_seq_lens_q.tolist())
    keys = itertools.pairwise(cu_seq_lens_k.tolist())
    parts = []
    for (q_start, q_stop), (k_start, k_stop) in zip(queries, keys, strict=True):
        part, _ = sdpa_attention_forward(
            module,
            query[:, :, q_start:q_stop],
            key[:, :, k_start:k_stop],
            value[:, :, k_start:k_stop],
            _mask(q_stop - q_start, k_stop - k_start, sliding_window),
            scaling=scaling,
        )
        parts.append(part)
    return torch.cat(parts, dim=1), None


def _mask(queries: int, keys: int, window: int | None) -> torch.Tensor | None:
    """The last query sees the last key. None where the kernel's own causal rule, or no rule at all, says the same."""
    if (queries == 1 or queries == keys) and (window is None or keys <= window):
        return None
    allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if window is not None:
        allowed = allowed.triu(keys - queries - window + 1)
    return allowed[None, None]


def register() -> None:
    """Make the name known to transformers. Idempotent."""
    AttentionInterface.register(NAME, by_sequence)
