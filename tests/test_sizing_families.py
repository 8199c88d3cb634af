"""Sizes from a config alone are those of transformers' own modules: every parameter, every block, to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from public_configs import NAMES, PLAIN, QUANTIZED, config, fields, meta_model

from headrace import model as engine_model
from headrace.blocks import Weight, named_sites
from headrace.core import Segment, StoredTensor
from headrace.errors import ConfigLacksFields
from headrace.sizing.families import MODEL_TYPES, outline
from headrace.sizing.fields import UnknownFamily
from headrace.sizing.shape import model_shape
from headrace.sizing.stored import copied_share

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_there_are_enough_configurations_and_of_every_kind() -> None:
    assert len(PLAIN) >= 25
    kinds = {config(name)["model_type"] for name in NAMES}
    assert {"llama", "deepseek_v2", "deepseek_v3", "qwen2_moe", "gemma2", "gpt2", "qwen2_vl", "llava"} <= kinds
    methods = {config(name)["quantization_config"]["quant_method"] for name in QUANTIZED}
    assert methods == {"gptq", "awq", "fp8", "compressed-tensors", "mxfp4"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_every_parameter_has_the_name_shape_and_place_that_it_has_in_transformers(name: str) -> None:
    made = outline(fields(name))
    theirs = meta_model(name)
    assert [(tensor.name, tensor.shape) for tensor in made.tensors] == [
        (parameter, tuple(tensor.shape)) for parameter, tensor in theirs.named_parameters()
    ]
    counted = sum(tensor.numel() * tensor.element_size() for tensor in theirs.parameters())
    assert made.nbytes(fields(name).dtype or "float32") == counted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_the_planner_sees_what_it_sees_of_the_engine_s_own_model(name: str) -> None:
    """But for tables of angles, which are computed and not stored."""
    theirs: Any = meta_model(name)
    anywhere = StoredTensor("", "", (), None)  # type: ignore[arg-type]
    weights = {}
    for identity, sites in named_sites(theirs).items():
        parameter = sites[0].module._parameters[sites[0].attribute]
        assert parameter is not None
        weights[identity] = Weight(tuple(sites), parameter, (anywhere,))
    blocks = engine_model._cut(theirs, weights)
    expected = engine_model._shape(theirs, blocks, theirs.config, theirs.dtype)
    made = model_shape(outline(fields(name)), fields(name), fields(name).dtype or "float32")
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in theirs.buffers())
    assert expected.fixed_bytes - buffers <= made.fixed_bytes <= expected.fixed_bytes
    has_bias = theirs.get_output_embeddings().bias is not None
    same = {"fixed_bytes": 0, "head_bytes": 0}
    assert dataclasses.replace(made, **same) == dataclasses.replace(expected, **same)
    assert made.head_bytes == (expected.head_bytes if has_bias else 0), "a head without a bias is never copied"


def test_a_family_that_is_not_known_says_so() -> None:
    assert "newmodel" not in MODEL_TYPES
    with pytest.raises(UnknownFamily, match="'newmodel'"):
        outline(fields("llama-3.2-1b", model_type="newmodel"))


def test_fields_that_are_missing_or_no_numbers_are_named_together() -> None:
    broken = fields("llama-3.2-1b", hidden_size=None, num_hidden_layers=None, vocab_size="many")
    with pytest.raises(ConfigLacksFields) as caught:
        outline(broken)
    assert set(caught.value.missing) == {"hidden_size", "num_hidden_layers"}
    assert caught.value.wrong == ["vocab_size is 'many'"]


@pytest.mark.parametrize("value", [0, -1, 2**50, 1.5, True, [32], float("nan")])
def test_a_count_that_no_model_has(value: object) -> None:
    with pytest.raises(ConfigLacksFields, match="num_hidden_layers"):
        outline(fields("llama-3.2-1b", num_hidden_layers=value))


def test_fields_of_a_part_are_named_with_their_path() -> None:
    vision = {**config("gemma-3-4b")["vision_config"], "image_size": None}
    with pytest.raises(ConfigLacksFields, match=r"vision_config\.image_size"):
        outline(fields("gemma-3-4b", vision_config=vision))
    with pytest.raises(ConfigLacksFields, match=r"text_config\.hidden_size"):
        outline(fields("gemma-3-4b", text_config={"model_type": "gemma3_text"}))


def test_a_tower_before_a_decoder_that_is_not_known() -> None:
    text = {**config("llava-1.5-7b")["text_config"], "model_type": "newmodel"}
    with pytest.raises(UnknownFamily, match="text_config"):
        outline(fields("llava-1.5-7b", text_config=text))


def test_experts_are_used_in_part_and_all_else_whole() -> None:
    made = model_shape(outline(fields("mixtral-8x7b")), fields("mixtral-8x7b"), "bfloat16")
    shares = {param.name.split(".", 3)[-1]: param.used_share for param in made.blocks[1].params}
    assert shares["mlp.experts.gate_up_proj"] == shares["mlp.experts.down_proj"] == 2 / 8
    assert {share for name, share in shares.items() if "experts" not in name} == {1.0}


@pytest.mark.parametrize(
    ("dtype", "offset", "name", "is_copied"),
    [
        ("BF16", 6, "model.layers.0.mlp.up_proj.weight", False),
        ("BF16", 7, "model.layers.0.mlp.up_proj.weight", True),
        ("F32", 64, "model.layers.0.mlp.up_proj.weight", False),
        ("F32", 8, "model.layers.0.mlp.up_proj.weight", True),
        ("I8", 4096, "model.layers.0.mlp.up_proj.weight", False),
        ("BF16", 64, "model.layers.0.mlp.experts.7.up_proj.weight", True),
    ],
)
def test_what_lies_in_memory_as_in_the_file_is_not_copied(dtype: str, offset: int, name: str, is_copied: bool) -> None:
    asked = StoredTensor(name, dtype, (8,), Segment("a", offset, 100))
    other = StoredTensor("model.norm.weight", "BF16", (8,), Segment("a", 0, 300))
    assert copied_share([asked, other]) == (0.25 if is_copied else 0.0)
    assert copied_share([]) == 0.0
