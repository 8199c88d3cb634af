"""Quantized matrices have the bytes that each format documents: by transformers' quantizers, and by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from public_configs import QUANTIZED, config, fields, meta_model

from headrace.sizing.families import outline
from headrace.sizing.outline import Matrices, Outline
from headrace.sizing.quantized import UnknownQuantization, quantize


def size(name: str, **changes: Any) -> int:
    some = fields(name, **changes)
    dtype = some.dtype or "bfloat16"
    return quantize(outline(some), some, dtype).nbytes(dtype)


def one(settings: dict[str, Any], *, rows: int = 256, columns: int = 384, dtype: str = "bfloat16") -> tuple[int, ...]:
    """Bytes of each tensor of one matrix."""
    out = Outline("table", "lm_head")
    out.add("model.layers.0.mlp.up_proj.weight", rows, columns, matrices=Matrices(1, rows, columns))
    made = quantize(out, fields("llama-3.2-1b", quantization_config=settings), dtype)
    return made.tensors[0].pieces


# --- against transformers' own quantizers ---------------------------------------------------------------------------


def quantized_by_transformers(name: str) -> int:
    """Bytes of the parameters and stored buffers after a quantizer has replaced the model's modules."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.quantizers import AutoHfQuantizer

    values = {key: value for key, value in config(name).items() if key != "auto_map"}
    kind: Any = getattr(transformers, values["architectures"][0])
    loaded = kind.config_class.from_dict(values)
    settings = {**loaded.quantization_config, "dequantize": False}
    quantizer: Any = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    quantizer.validate_environment()
    dtype = getattr(torch, fields(name).dtype or "bfloat16")
    with torch.device("meta"), no_init_weights():
        model = kind._from_config(loaded, dtype=dtype)
        quantizer.preprocess_model(model, dtype=dtype, device_map=None)
    model.tie_weights()
    named = dict(model.state_dict())
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in named.values()}.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b-fp8", "llama-3.1-8b-w8a8", "llama-3.1-8b-w4a16"])
def test_compressed_tensors_are_as_large_as_its_own_modules(name: str) -> None:
    assert size(name) == quantized_by_transformers(name)


# --- by hand, module by module ---------------------------------------------------------------------------------------


def by_hand(name: str, stored: Any) -> int:
    """transformers' unquantized model with `stored(outputs, inputs)` bytes for each matrix of its layers."""
    import torch

    total, seen = 0, set()
    for path, module in meta_model(name).named_modules():
        for parameter, tensor in module.named_parameters(recurse=False):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            plain = tensor.numel() * tensor.element_size()
            is_matrix = isinstance(module, torch.nn.Linear) and parameter == "weight" and ".layers." in path
            total += stored(*tensor.shape) if is_matrix else plain
            if "experts" in path and tensor.dim() == 3 and path.endswith("experts"):
                total += _experts(parameter, tensor, stored) - plain
    return total


def _experts(parameter: str, tensor: Any, stored: Any) -> int:
    count, rows, columns = tensor.shape
    if parameter == "gate_up_proj":  # stored as two
        return 2 * count * int(stored(rows // 2, columns))
    return count * int(stored(rows, columns))


def gptq(bits: int) -> Any:
    """Packed int32 along the inputs, zeros along the outputs, float16 scales, and the group of each input."""
    return lambda rows, columns: (
        4 * (columns * bits // 32) * rows
        + 4 * (columns // 128) * (rows * bits // 32)
        + 2 * (columns // 128) * rows
        + 4 * columns
    )


def awq(rows: int, columns: int) -> int:
    return 4 * columns * (rows // 8) + 4 * (columns // 128) * (rows // 8) + 2 * (columns // 128) * rows


def fp8(rows: int, columns: int) -> int:
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("qwen2.5-7b-gptq-int4", gptq(4)),
        ("qwen2.5-0.5b-gptq-int8", gptq(8)),
        ("llama-3.1-8b-awq-int4", awq),
        ("qwen3-4b-fp8", fp8),
        ("deepseek-v3", fp8),
    ],
)
def test_the_whole_model_matrix_by_matrix(name: str, stored: Any) -> None:
    assert size(name) == by_hand(name, stored)


def test_gpt_oss_has_blocks_of_32_numbers_in_4_bits() -> None:
    plain, packed = fields("gpt-oss-20b-bf16"), fields("gpt-oss-20b")
    dense = outline(plain).nbytes("bfloat16")
    experts = 24 * 32 * (2 * 2880 * 2880 + 2880 * 2880)
    assert quantize(outline(packed), packed, "bfloat16").nbytes("bfloat16") == dense - 2 * experts + experts * 17 // 32


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, (49152, 384, 1536, 1536)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, (49152, 128, 512, 1536)),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, (36864, 288, 1536, 1536)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, (49152, 768, 3072)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (98304, 24, 0)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, (98304, 4, 4)),
    ],
)
def test_one_matrix(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert one(settings) == expected


def test_modules_that_are_left_out_stay_as_they_are() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for names in (["up_proj"], ["model.layers.0.mlp"], ["model.layers.*.mlp"], ["layers.0"]):
        assert one({**settings, "modules_to_not_convert": names}) == ()
    assert one({**settings, "modules_to_not_convert": ["down_proj", "up"]}) != ()


def test_what_compressed_tensors_ignores_stays_as_it_is() -> None:
    settings = config("llama-3.1-8b-fp8")["quantization_config"]
    assert one(settings) == (98304, 512, 0, 0)
    for ignored in ("re:.*mlp.*", "model.layers.0.mlp.up_proj"):
        assert one({**settings, "ignore": [ignored]}) == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
        {},
    ],
    ids=json.dumps,
)
def test_a_layout_that_is_not_known_says_so(settings: dict[str, Any]) -> None:
    with pytest.raises(UnknownQuantization):
        size("llama-3.2-1b", quantization_config=settings or {"quant_method": ""})


def test_every_quantized_configuration_is_smaller_than_the_plain_one() -> None:
    for name in QUANTIZED:
        some = fields(name)
        assert size(name) < outline(some).nbytes(some.dtype or "bfloat16")
