"""Each sequence of a batch attends to itself alone."""

from __future__ import annotations

import types

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.batching.attention import by_sequence

HEADS, KV_HEADS, DIM = 4, 2, 8


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Softmax over the allowed keys, written out; q of shape (1, heads, queries, dim)."""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * DIM**-0.5
    queries, keys = q.shape[2], k.shape[2]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None]
    allowed = (distance >= 0) & (distance < (window or keys + 1))
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_it_is_attention_of_each_sequence_by_itself(
    lengths: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [((HEADS, q), (KV_HEADS, q + p), (KV_HEADS, q + p)) for q, p in lengths]
    parts = [tuple(torch.randn(1, heads, n, DIM, generator=generator) for heads, n in each) for each in shapes]
    ends_q = torch.tensor([0, *[q for q, _ in lengths]]).cumsum(0)
    ends_k = torch.tensor([0, *[q + p for q, p in lengths]]).cumsum(0)
    module = types.SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
    query, key, value = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    made, _ = by_sequence(
        module,  # type: ignore[arg-type]
        query,
        key,
        value,
        None,
        cu_seq_lens_q=ends_q,
        cu_seq_lens_k=ends_k,
        scaling=DIM**-0.5,
        sliding_window=window,
    )
    expected = torch.cat([reference(*part, window) for part in parts], dim=1)  # type: ignore[arg-type]
    torch.testing.assert_close(made, expected)
