"""Numbers of few bits: packing is the kernel's, rounding is never worse than the plain one, products are right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from headrace.lowbit import kernels, packing, rounding
from headrace.lowbit.modules import Int4Linear, Int8Embedding, Int8Linear, candidates, replace
from headrace.sizing.scheme import Scheme, UnknownScheme, folded, scheme_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def numbers(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def stands_for(rounded: rounding.Rounded, group_size: int = 0) -> torch.Tensor:
    """What numbers and scales mean, in float32."""
    if rounded.zero is None:
        return rounded.numbers.float() * rounded.scale.float()[:, None]
    rows = rounded.numbers.shape[0]
    q = rounded.numbers.float().view(rows, -1, group_size) - 8
    return (q * rounded.scale.float()[..., None] + rounded.zero.float()[..., None]).view(rows, -1)


def packed(rounded: rounding.Rounded) -> tuple[torch.Tensor, torch.Tensor]:
    assert rounded.zero is not None
    both = torch.stack([rounded.scale, rounded.zero], dim=-1).transpose(0, 1).contiguous()
    return packing.pack(rounded.numbers, packing.layout_here()), both


# --- packing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", packing.HALVES)
def test_every_layout_gives_back_what_it_was_given(layout: str) -> None:
    made = packing.pack(numbers(192, 96), layout)
    assert made.shape == (192, 48)
    assert torch.equal(packing.unpack(made, layout), numbers(192, 96))


def test_the_layouts_differ() -> None:
    first, second, third = (packing.pack(numbers(64, 32), layout) for layout in packing.HALVES)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_what_is_packed_here_is_what_torch_packs() -> None:
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers(192, 96).int(), 1)
    assert torch.equal(packing.pack(numbers(192, 96), packing.layout_here()), theirs)


def test_a_part_of_the_rows_is_packed_as_in_the_whole() -> None:
    whole = packing.pack(numbers(192, 96), "avx512")
    assert torch.equal(packing.pack(numbers(192, 96)[64:128], "avx512"), whole[64:128])


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "layout"), [("default", "plain"), ("avx2", "avx2")])
def test_the_layout_of_other_vectors_is_recognised(capability: str, layout: str) -> None:
    """torch chooses its kernels by this variable, so a processor with fewer vectors can be imitated."""
    code = "import torch; from headrace.lowbit import packing as p; "
    code += "print(torch.backends.cpu.get_cpu_capability(), p.layout_here())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    had, found = done.stdout.split()
    if had.lower() != capability:
        pytest.skip(f"this processor has no {capability} kernels")
    assert found == layout


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits_are_as_near_as_the_scale_allows(dtype: torch.dtype) -> None:
    matrix = random(64, 96)
    rounded = rounding.to_8_bits(matrix, dtype)
    assert rounded.scale.dtype == dtype
    error = (stands_for(rounded) - matrix).abs()
    assert (error <= rounded.scale.float()[:, None] * 0.501).all()


@pytest.mark.parametrize("group_size", [32, 64])
def test_4_bits_are_never_worse_than_plain_rounding(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random(64, 128)

    def errors() -> torch.Tensor:
        rounded = rounding.to_4_bits(matrix, group_size, torch.bfloat16)
        return (stands_for(rounded, group_size) - matrix).square().view(64, -1, group_size).sum(dim=-1)

    searched = errors()
    monkeypatch.setattr(rounding, "SHRINKS_4", (1.0,))
    monkeypatch.setattr(rounding, "REFITS", 0)
    plain = errors()
    assert (searched <= plain * (1 + 1e-5)).all()
    assert searched.sum() < 0.95 * plain.sum()


def test_numbers_on_a_lattice_come_back() -> None:
    q = numbers(64, 64).float()
    q[:, 0], q[:, 1] = 0, 15
    matrix = (q - 8) * 0.125 + 0.5
    rounded = rounding.to_4_bits(matrix, 64, torch.bfloat16)
    assert torch.equal(rounded.numbers.float(), q)
    assert torch.equal(stands_for(rounded, 64), matrix)


def test_what_matters_more_is_rounded_better() -> None:
    matrix, importance = random(64, 128), torch.ones(128)
    importance[:8] = 1000
    moments = torch.diag_embed(importance.view(2, 64))
    plain, weighted = (
        ((stands_for(rounding.to_4_bits(matrix, 64, torch.float32, some), 64) - matrix).square() * importance).sum()
        for some in (None, moments)
    )
    assert weighted < 0.6 * plain


@pytest.mark.parametrize("columns", [128, 96])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_errors_make_good_for_each_other(group_size: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product with inputs that are alike: no row gets worse, and all together much better."""
    if columns % group_size:
        group_size = 32
    matrix = random(64, columns)
    inputs = random(300, columns, seed=1) @ (torch.eye(columns) + random(columns, columns, seed=2) * 5)
    shape = rounding.moment_blocks(columns)
    by_block = inputs.view(300, *shape[:2]).transpose(0, 1)
    moments = by_block.transpose(1, 2) @ by_block / 300

    def errors() -> torch.Tensor:
        rounded = rounding.to_4_bits(matrix, group_size, torch.bfloat16, moments)
        wrong = (stands_for(rounded, group_size) - matrix).view(64, *shape[:2])
        return torch.einsum("rbi,bij,rbj->r", wrong, rounding._damped(moments), wrong)

    better = errors()
    monkeypatch.setattr(rounding, "SWEEPS", 0)
    alone = errors()
    assert (better <= alone * (1 + 1e-5)).all()
    assert better.sum() < 0.9 * alone.sum()


def test_inputs_that_were_never_seen_change_nothing() -> None:
    matrix, silent = random(64, 128), torch.zeros(rounding.moment_blocks(128))
    seen, unseen = (rounding.to_4_bits(matrix, 64, torch.bfloat16, some) for some in (silent, None))
    assert torch.equal(seen.numbers, unseen.numbers)
    assert torch.equal(seen.scale, unseen.scale)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_matrix_of_one_value_stays_finite(value: float) -> None:
    matrix = torch.full((64, 64), value)
    assert torch.allclose(stands_for(rounding.to_8_bits(matrix, torch.float32)), matrix, rtol=1e-6)
    for moments in (None, torch.eye(64)[None]):
        assert torch.equal(stands_for(rounding.to_4_bits(matrix, 32, torch.float32, moments), 32), matrix)


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, kernels.MOST_ROWS_8 + 1, 70])
def test_products_are_those_of_what_the_numbers_stand_for(dtype: torch.dtype, rows: int) -> None:
    matrix, inputs = random(192, 128), torch.randn(rows, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    eight, four = rounding.to_8_bits(matrix, dtype), rounding.to_4_bits(matrix, 64, dtype)
    weight, both = packed(four)
    for made, rounded in (
        (kernels.linear_8(inputs, eight.numbers, eight.scale), stands_for(eight)),
        (kernels.linear_4(inputs, weight, both, 64, packing.layout_here()), stands_for(four, 64)),
    ):
        expected = inputs.float() @ rounded.t()
        assert made.dtype == dtype
        assert (made.float() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_a_matrix_made_in_pieces_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random(70, 128).bfloat16()
    four = rounding.to_4_bits(random(320, 128), 32, torch.bfloat16)
    weight, both = packed(four)
    whole = kernels.linear_4(inputs, weight, both, 32, packing.layout_here())
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1)
    assert torch.equal(kernels.linear_4(inputs, weight, both, 32, packing.layout_here()), whole)


def test_rows_of_a_table() -> None:
    eight = rounding.to_8_bits(random(40, 16), torch.bfloat16)
    indices = torch.tensor([[3, 0], [39, 3]])
    expected = (eight.numbers[indices].float() * eight.scale[indices].float()[..., None]).bfloat16()
    assert torch.equal(kernels.rows_8(indices, eight.numbers, eight.scale), expected)


# --- modules and schemes --------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.table.weight
        self.all_tied_weights_keys = {"head.weight": "table.weight"}


def test_modules_take_their_places_tied_as_before() -> None:
    model = _Tied()
    bias = model.inner.bias
    replace(model, Scheme(4, 32, "avx512", {"table": 8, "head": 8, "inner": 4}), torch.bfloat16)
    assert isinstance(model.table, Int8Embedding)
    assert isinstance(model.head, Int8Linear)
    assert isinstance(model.inner, Int4Linear)
    assert model.inner.bias is bias
    assert model.head.weight is model.table.weight
    assert model.head.weight_scale is model.table.weight_scale
    assert model.all_tied_weights_keys == {"head.weight": "table.weight", "head.weight_scale": "table.weight_scale"}
    assert not list(candidates(model))


def test_modules_with_a_forward_of_their_own_are_left() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    assert not list(candidates(nn.Sequential(Own(64, 64), Scaled(8, 8), nn.Embedding(8, 8, max_norm=1.0))))


def test_a_scheme_survives_json_and_is_refused_if_it_is_of_another_version() -> None:
    scheme = Scheme(4, 64, "avx512", {"model.layers.*.mlp.up_proj": 4, "lm_head": 8})
    assert scheme_of(scheme.to_json()) == scheme
    assert scheme.bits_of("model.layers.17.mlp.up_proj") == 4
    assert scheme.bits_of("model.layers.17.mlp.gate") is None
    for change in ({"version": 2}, {"bits": 3}, {"group_size": 48}, {"modules": {"lm_head": 5}}, {"layout": None}):
        with pytest.raises(UnknownScheme):
            scheme_of(scheme.to_json() | change)


def test_layers_are_named_together_only_where_they_agree() -> None:
    same = {"a.0.x": 4, "a.1.x": 4}
    assert folded(same) == {"a.*.x": 4}
    assert folded(same, ["a.2.x"]) == same
    assert folded({"a.0.x": 4, "a.1.x": 8, "b": 8}) == {"a.0.x": 4, "a.1.x": 8, "b": 8}
