"""What others have quantized is refused with the command that converts it, and that command reads it right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fakes import small_matrices
from safetensors.torch import load_file

import headrace
from headrace import forecast
from headrace.config import OffloadConfig, PrefetchOffloadConfig
from headrace.engine import Engine
from headrace.errors import ForeignQuantization, UnsupportedModel
from headrace.probing import estimate
from headrace.quantize import job

pytestmark = pytest.mark.slow

GROUP = 128


@pytest.fixture(autouse=True)
def _small_matrices() -> Iterator[None]:
    with small_matrices():
        yield


def quiet(*progress: object) -> None:
    pass


def packed_int32(numbers: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of 4 bits in each int32, along `dim`; `order[i]` is the number whose place is the i-th."""
    groups = numbers.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    made = sum(groups[..., each] << 4 * place for place, each in enumerate(order))
    assert isinstance(made, torch.Tensor)
    return torch.where(made >= 2**31, made - 2**32, made).int()


def gptq(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors as GPTQ stores them, and what they stand for."""
    q, zeros, scales, meant = rounded(matrix)
    return {
        "qweight": packed_int32(q, 0),
        "qzeros": packed_int32(zeros - 1, 1),
        "scales": scales.half(),
        "g_idx": (torch.arange(len(q)) // GROUP).int(),
    }, meant


def awq(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    q, zeros, scales, meant = rounded(matrix)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed_int32(q, 1, order),
        "qzeros": packed_int32(zeros, 1, order),
        "scales": scales.half(),
    }, meant


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers and zeros from 0 to 15 and scales, inputs first, and the matrix that they stand for."""
    inputs = matrix.float().t()
    grouped = inputs.view(-1, GROUP, inputs.shape[1])
    scales = ((grouped.amax(1) - grouped.amin(1)) / 14).half().float()
    zeros = (-grouped.amin(1) / scales).round().clamp(1, 15)
    q = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    meant = ((q - zeros[:, None]) * scales[:, None]).view_as(inputs).t()
    return q.view_as(inputs), zeros, scales, meant


FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}


def quantize_by(form: str, directory: Path) -> dict[str, torch.Tensor]:
    """Replace the layers' matrices of a checkpoint; returns what they stand for now."""
    return packed_by(*FORMS[form], directory)


def packed_by(pack: Any, settings: dict[str, Any], directory: Path) -> dict[str, torch.Tensor]:
    """The same, with a function that gives the pieces of a matrix and what they stand for."""
    meant: dict[str, torch.Tensor] = {}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {}
        for name, tensor in tensors.items():
            if "_proj." not in name:
                made[name] = tensor
                continue
            pieces, meant[name] = pack(tensor)
            made |= {name.replace("weight", piece): some for piece, some in pieces.items()}
        return made

    tiny_models.edit(directory, change)
    tiny_models.edit_config(directory, quantization_config=settings)
    return meant


@pytest.mark.parametrize("form", FORMS)
def test_it_is_refused_with_the_command_and_the_command_reads_it(form: str, tmp_path: Path) -> None:
    source = tiny_models.write(tmp_path / "foreign", "llama")
    plain = load_file(source / "model.safetensors")
    meant = quantize_by(form, source)
    with pytest.raises(ForeignQuantization, match=f"headrace quantize {source} NEW --bits 4"):
        headrace.load(source)
    subject, probed = forecast.read_subject(str(source)), estimate()
    demand = forecast.demand_for(subject, probed.machine, memory=None, host_memory=None, context=None, batch=1)
    with pytest.raises(ForeignQuantization, match="headrace quantize"):
        forecast.forecast(subject, probed, demand, OffloadConfig())
    job.quantize(str(source), tmp_path / "new", quiet, bits=8)
    made = load_file(tmp_path / "new" / "model.safetensors")
    assert len(meant) == 7 * tiny_models.LAYERS
    for name, matrix in meant.items():
        assert (matrix - plain[name].float()).norm() < 0.2 * plain[name].float().norm()
        numbers = made[name].float() * made[f"{name}_scale"].float()[:, None]
        assert (numbers - matrix).norm() < 0.01 * matrix.norm(), name
    assert torch.equal(made["model.norm.weight"], plain["model.norm.weight"])
    with Engine.open(
        tmp_path / "new", offload=OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1))
    ) as engine:
        assert engine.report().offloaded_bytes > 0
        tiny_models.logits(engine.model)


def test_compressed_tensors_are_read_by_their_own_package(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    source = tiny_models.write(tmp_path / "foreign", "llama")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }

    def pack(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        grouped = tensor.float().view(len(tensor), -1, GROUP)
        scale = (grouped.abs().amax(-1) / 7).bfloat16()
        q = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
        pieces = {
            "weight_packed": pack_to_int32(q.view_as(tensor).to(torch.int8), 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor(tensor.shape),
        }
        return pieces, (q * scale.float()[..., None]).view_as(tensor)

    meant = packed_by(pack, settings, source)
    with pytest.raises(ForeignQuantization, match="compressed-tensors"):
        headrace.load(source)
    job.quantize(str(source), tmp_path / "new", quiet, bits=8)
    made = load_file(tmp_path / "new" / "model.safetensors")
    assert len(meant) == 7 * tiny_models.LAYERS
    for name, matrix in meant.items():
        numbers = made[name].float() * made[f"{name}_scale"].float()[:, None]
        assert (numbers - matrix).norm() < 0.02 * matrix.norm(), name


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"quant_method": "gptq", "bits": 3}, UnsupportedModel),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, UnsupportedModel),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ForeignQuantization),
    ],
    ids=["gptq of 3 bits", "awq gemv", "bitsandbytes"],
)
def test_forms_that_are_not_read_say_so(settings: dict[str, Any], error: type[Exception], tmp_path: Path) -> None:
    source = tiny_models.write(tmp_path / "foreign", "llama")
    tiny_models.edit_config(source, quantization_config=settings)
    with pytest.raises(error, match=r"unquantized checkpoint, or a \.gguf file"):
        job.quantize(str(source), tmp_path / "new", quiet)
    assert not (tmp_path / "new").exists()
