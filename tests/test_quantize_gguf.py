"""GGUF files become checkpoints of few bits: what gguf decodes is what comes out, and 4-bit numbers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file

from headrace import importing, machine
from headrace.config import OffloadConfig, PrefetchOffloadConfig
from headrace.engine import Engine
from headrace.errors import CorruptGguf, InvalidSetting
from headrace.lowbit import packing
from headrace.quantize import gguf as originals
from headrace.quantize import job

pytestmark = pytest.mark.slow

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "measure_compute_bytes_per_s", lambda dtype: 1e10)
    monkeypatch.setattr(machine, "measure_low_bits_per_s", lambda bits, dtype: 1e10)


def quiet(*progress: object) -> None:
    pass


def random_rows(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 3) -> np.ndarray:
    """Bytes of a type, any of them, but with scales that are small and finite."""
    items, nbytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // items, nbytes), dtype=np.uint8)
    factors = (random.uniform(0.5, 1.5, (len(blocks), 2)) * 1e-3).astype(np.float16)
    places = {"Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208], "Q8_0": [0], "Q5_K": [0, 2]}[kind.name]
    for number, place in enumerate(places):
        blocks[:, place : place + 2] = factors[:, number : number + 1].view(np.uint8)
    return blocks.reshape(rows, columns // items * nbytes)


def write(file: Path, kinds: dict[str, str], default: str, **changes: Any) -> Path:
    """A tiny Llama whose matrices have these types, by part of their names."""
    writer = gguf.GGUFWriter(file, "llama")
    config = tiny_gguf.config("llama", **WIDE, **changes)
    tiny_gguf._write_metadata(writer, "llama", config)
    for number, (name, shape) in enumerate(tiny_gguf._tensors("llama", config).items()):
        kind = GGMLQuantizationType[next((kind for part, kind in kinds.items() if part in name), default)]
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        elif kind == GGMLQuantizationType.F32:
            numbers = np.random.default_rng(number).standard_normal(shape, dtype=np.float32) * 0.05
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, random_rows(kind, *shape, seed=number), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stands_for(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A stored matrix in float32."""
    weight = tensors[f"{module}.weight"]
    if weight.dtype == torch.int8:
        return weight.float() * tensors[f"{module}.weight_scale"].float()[:, None]
    both = tensors[f"{module}.weight_scale_and_zero"].float().transpose(0, 1)
    q = packing.unpack(weight, packing.layout_here()).float().view(len(weight), both.shape[1], -1)
    return ((q - 8) * both[..., :1] + both[..., 1:]).view(len(weight), -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_type_stands_for_what_gguf_decodes(kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    raw = random_rows(quantization, 6, 512)
    q, scale, zero = originals.unpacked(int(quantization), raw)
    assert q.shape == (6, 512)
    assert q.max() == 15
    made = ((q.reshape(6, 16, 32).astype(np.float32) - 8) * scale[..., None] + zero[..., None]).reshape(6, 512)
    np.testing.assert_allclose(made, dequantize(raw, quantization), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K", "Q5_K", "F32"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_type_becomes_what_an_import_makes_of_it(kind: str, tied: bool, tmp_path: Path) -> None:
    """4-bit types up to the rounding of scale and zero, the others up to half a step of 8 bits."""
    file = write(tmp_path / "tiny.gguf", {}, kind, tie_word_embeddings=tied)
    job.quantize(str(file), tmp_path / "new", quiet)
    made = load_file(tmp_path / "new" / "model.safetensors")
    imported = load_file(importing.import_gguf(file) / "model.safetensors")
    four = kind.startswith("Q4")
    for name, matrix in imported.items():
        module = name.removesuffix(".weight")
        if matrix.dim() == 1:
            assert torch.equal(made[name], matrix)
            continue
        is_end = module in ("model.embed_tokens", "lm_head")
        assert made[name].dtype == (torch.uint8 if four and not is_end else torch.int8), name
        error = (stands_for(made, module) - matrix.float()).abs()
        largest = matrix.float().abs().amax(dim=1, keepdim=True)
        assert (error <= largest * (2**-6 if four and not is_end else 0.55 / 127)).all(), name


def test_the_numbers_of_4_bits_are_the_files_own_in_the_models_order_of_rows(tmp_path: Path) -> None:
    """q and k of a Llama have their rows in another order in the two."""
    file = write(tmp_path / "tiny.gguf", {}, "Q4_0")
    job.quantize(str(file), tmp_path / "new", quiet)
    made = load_file(tmp_path / "new" / "model.safetensors")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for theirs, ours, is_shuffled in (("ffn_up", "mlp.up_proj", False), ("attn_q", "self_attn.q_proj", True)):
        q, _, _ = originals.unpacked(originals.Q4_0, read[f"blk.1.{theirs}.weight"].data)
        numbers = packing.unpack(made[f"model.layers.1.{ours}.weight"], packing.layout_here()).numpy()
        assert np.array_equal(numbers, q) is not is_shuffled
        assert np.array_equal(np.sort(numbers.view("V256"), axis=0), np.sort(q.view("V256"), axis=0))


def test_a_mixture_keeps_its_mixture_and_bits_that_are_asked_for_win(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", {"ffn_down": "Q6_K", "attn_v": "Q8_0"}, "Q4_K")
    for name, asked, expected in (
        ("kept", {}, {"down_proj": torch.int8, "v_proj": torch.int8, "up_proj": torch.uint8}),
        ("eight", {"bits": 8}, {"down_proj": torch.int8, "v_proj": torch.int8, "up_proj": torch.int8}),
        ("four", {"bits": 4}, {"down_proj": torch.uint8, "v_proj": torch.int8, "up_proj": torch.uint8}),
    ):
        job.quantize(str(file), tmp_path / name, quiet, **asked)
        made = load_file(tmp_path / name / "model.safetensors")
        for part, dtype in expected.items():
            assert {tensor.dtype for key, tensor in made.items() if key.endswith(f"{part}.weight")} == {dtype}


def test_value_projections_that_have_4_bits_in_the_file_keep_them(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", {}, "Q4_0")
    for name, asked in (("kept", {}), ("asked", {"bits": 4})):
        job.quantize(str(file), tmp_path / name, quiet, **asked)
        made = load_file(tmp_path / name / "model.safetensors")
        assert made["model.layers.0.self_attn.v_proj.weight"].dtype == torch.uint8


def test_it_runs_and_streams(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", {"ffn_down": "Q6_K"}, "Q4_K")
    job.quantize(str(file), tmp_path / "new", quiet)
    tokens = torch.arange(5, 16)[None]
    results = []
    for offload in (OffloadConfig(), OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1))):
        with Engine.open(tmp_path / "new", offload=offload) as engine, torch.inference_mode():
            results.append(engine.model(tokens).logits)
            assert (engine.report().offloaded_bytes > 0) is bool(offload.prefetch.offload_group_size)
    assert torch.equal(*results)
    assert results[0].isfinite().all()
    with Engine.open(importing.import_gguf(file)) as engine, torch.inference_mode():
        imported = engine.model(tokens).logits.float()
    assert (results[0].float() - imported).norm() < 0.1 * imported.norm()


def test_a_broken_file_and_settings_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(CorruptGguf):
        job.quantize(str(tmp_path / "broken.gguf"), tmp_path / "new", quiet)
    file = write(tmp_path / "tiny.gguf", {}, "Q4_0", num_hidden_layers=2)
    with pytest.raises(InvalidSetting):
        job.quantize(str(file), tmp_path / "new", quiet, bits=4, group_size=16)
    assert not (tmp_path / "new").exists()
