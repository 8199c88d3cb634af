"""The model without weights: what transformers would have built, cut into blocks, and its sizes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    ARCHITECTURES,
    EOS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    edit,
    edit_config,
    ids,
    plain,
    plain_bytes,
    shared,
    write,
)

from headrace import model as room
from headrace.errors import ForeignQuantization, TensorMismatch, UnsupportedModel
from headrace.linears import FoldedLinear
from headrace.model import Skeleton, build, load_tokenizer, max_positions
from headrace.store import open_checkpoint

pytestmark = pytest.mark.slow


def skeleton(directory: Path) -> Skeleton:
    return build(directory, open_checkpoint(directory))


# --- what transformers would have built ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_the_same_model_without_its_weights(root: Path, architecture: str, dtype: torch.dtype) -> None:
    directory = shared(root, architecture, dtype)
    made, expected = skeleton(directory), plain(directory, dtype)
    assert type(made.model) is type(expected)
    assert made.dtype == dtype == expected.dtype
    ours, theirs = dict(made.model.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()  # tied ones have one name on both sides
    assert all((p.dtype, p.shape) == (theirs[name].dtype, theirs[name].shape) for name, p in ours.items())
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in ours.values())
    assert made.model.training is False
    assert made.converters == {}
    assert made.ignored == ()
    assert made.model.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_buffers_have_the_same_values(root: Path, architecture: str, dtype: torch.dtype) -> None:
    directory = shared(root, architecture, dtype)
    ours = dict(skeleton(directory).model.named_buffers())
    theirs = dict(plain(directory, dtype).named_buffers())
    assert ours.keys() == theirs.keys()
    assert len(ours) > 0 or architecture == "gpt2"
    for name, buffer in theirs.items():
        assert (ours[name].dtype, ours[name].device) == (buffer.dtype, buffer.device), name
        assert torch.equal(ours[name], buffer), name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_positions_too(tmp_path: Path, rope: dict[str, Any]) -> None:
    directory = write(tmp_path / "m", "llama", num_hidden_layers=1, rope_parameters=rope)
    ours, theirs = skeleton(directory).model.named_buffers(), plain(directory).named_buffers()
    for (name, buffer), (_, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(buffer, expected), name


@pytest.mark.parametrize("kept", [{"down_proj", "norm"}, {"mlp.up", "layers.*.input_layernorm.weight"}])
def test_weights_that_stay_in_float32(root: Path, monkeypatch: pytest.MonkeyPatch, kept: set[str]) -> None:
    directory = shared(root, "llama")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", kept)
    made, expected = skeleton(directory), plain(directory)
    dtypes = {name: parameter.dtype for name, parameter in expected.named_parameters()}
    assert {name: parameter.dtype for name, parameter in made.model.named_parameters()} == dtypes
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    raised = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert set(made.converters) == raised
    for name, convert in made.converters.items():
        assert torch.equal(convert(), expected.get_parameter(name))


def test_a_tied_table_that_stays_in_float32_stays_tied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = shared(root, "llama-tied")
    for kept, dtype in (({"embed_tokens"}, torch.float32), ({"lm_head"}, torch.bfloat16)):
        monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", kept)
        made, expected = skeleton(directory).model, plain(directory)
        assert made.lm_head.weight is made.model.embed_tokens.weight
        assert made.lm_head.weight.dtype == expected.lm_head.weight.dtype == dtype


def test_buffers_that_stay_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the correction bias of a mixture's router, which decides which experts answer."""
    real = transformers.LlamaModel.__init__

    def with_buffer(self: Any, config: Any) -> None:
        real(self, config)
        self.register_buffer("correction_bias", torch.zeros(4))

    monkeypatch.setattr(transformers.LlamaModel, "__init__", with_buffer)
    directory = write(tmp_path / "m", "llama", num_hidden_layers=2)
    values = torch.tensor([1.0, 1.0001, 1.0002, 1.0003])
    edit(directory, lambda tensors: {**tensors, "model.correction_bias": values})
    for kept in (set(), {"correction_bias"}):
        monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", kept)
        made, expected = skeleton(directory).model.model.correction_bias, plain(directory).model.correction_bias
        assert made.dtype == expected.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(made, expected)
    assert torch.equal(made, values)


def test_it_runs_in_the_dtype_of_most_of_its_bytes(root: Path, tmp_path: Path) -> None:
    norms = write(tmp_path / "norms", "llama", num_hidden_layers=1)
    edit(norms, lambda tensors: {n: t.float() if "norm" in n else t for n, t in tensors.items()})
    made = skeleton(norms)
    assert made.dtype == torch.bfloat16
    assert set(made.converters) == {name for name, _ in made.model.named_parameters() if "norm" in name}
    expected = plain(norms)
    assert all(torch.equal(convert(), expected.get_parameter(name)) for name, convert in made.converters.items())
    assert all(convert().data_ptr() % 64 == 0 for convert in made.converters.values())
    unmovable = {p.name for block in made.shape.blocks for p in block.params if not p.movable}
    assert unmovable == set(made.converters) - {"model.norm.weight"}
    assert skeleton(shared(root, "llama", torch.float16)).dtype == torch.float16


def test_generation_settings_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "llama", num_hidden_layers=1)
    settings = {"temperature": 0.25, "top_p": 0.5, "do_sample": True, "eos_token_id": [2, 5]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    made = skeleton(directory).model.generation_config
    assert (made.temperature, made.top_p, made.do_sample, made.eos_token_id) == (0.25, 0.5, True, [2, 5])
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json cannot be read"):
        skeleton(directory)
    (directory / "generation_config.json").unlink()
    assert skeleton(directory).model.generation_config.eos_token_id == EOS


def test_the_longest_sequence(root: Path) -> None:
    assert max_positions(skeleton(shared(root, "llama")).model) == 256
    assert max_positions(skeleton(shared(root, "gpt2")).model) == 256
    odd = torch.nn.Module()
    odd.config = type("Config", (), {})()
    assert max_positions(odd) is None


# --- blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_hold_every_weight_once_in_the_order_of_a_pass(root: Path, architecture: str) -> None:
    made = skeleton(shared(root, architecture))
    blocks = made.blocks.moving
    tied = made.model.get_input_embeddings().weight is made.model.get_output_embeddings().weight
    kinds = ["layer"] * LAYERS + ["head"]
    assert [block.kind for block in blocks] == (kinds if tied else ["embedding", *kinds])
    assert tied == (architecture in ("llama-tied", "qwen3", "gemma3", "gpt2"))
    stack = "transformer.h" if architecture == "gpt2" else "model.layers"
    assert [block.name for block in blocks if block.kind == "layer"] == [f"{stack}.{i}" for i in range(LAYERS)]
    assert blocks[-1].name == "lm_head"
    assert blocks[-1].module is made.model.lm_head
    table = made.model.get_input_embeddings()
    assert [block.table for block in blocks] == ([None] * LAYERS + [table] if tied else [table, *[None] * LAYERS, None])
    weights = list(made.blocks.weights())
    assert {id(weight.meta) for weight in weights} == {id(parameter) for parameter in made.model.parameters()}
    assert len(weights) == len({id(weight) for weight in weights})
    assert all(weight.movable for weight in weights)
    assert {weight.name for weight in made.blocks.fixed} == {
        "gpt2": {"transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    }.get(architecture, {"model.norm.weight"})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bytes_add_up_and_tied_ones_count_once(root: Path, architecture: str) -> None:
    directory = shared(root, architecture)
    made, (weights, buffers) = skeleton(directory), plain_bytes(directory)
    assert made.shape.weight_bytes == weights + buffers
    assert sum(weight.nbytes for weight in made.blocks.weights()) == weights
    assert sum(part.nbytes for weight in made.blocks.weights() for part in weight.parts) == weights
    assert made.shape.head_bytes == 0  # no copy of it is made
    assert [block.gathered for block in made.shape.blocks] == [b.kind == "embedding" for b in made.blocks.moving]


def test_a_weight_that_two_layers_share_is_fixed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = room._empty_model

    def tie(*arguments: Any) -> Any:
        made = real(*arguments)
        made.model.layers[4].mlp.up_proj.weight = made.model.layers[1].mlp.up_proj.weight
        return made

    monkeypatch.setattr(room, "_empty_model", tie)
    made = skeleton(shared(root, "llama"))
    shared_weight = next(weight for weight in made.blocks.fixed if "up_proj" in weight.name)
    assert [site.name for site in shared_weight.sites] == [f"model.layers.{i}.mlp.up_proj.weight" for i in (1, 4)]
    assert sum(weight is shared_weight for weight in made.blocks.weights()) == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_cache_of_a_token_has_the_size_that_is_planned(root: Path, architecture: str) -> None:
    directory = shared(root, architecture)
    with torch.inference_mode():
        cache = plain(directory)(input_ids=ids(1, 5), use_cache=True).cache
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    shape = skeleton(directory).shape
    assert shape.kv_bytes_per_token + shape.kv_window_bytes_per_token == held / 5


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=["bf16", "f32", "f16"])
def test_the_head_gives_the_bits_of_one_that_needs_grad(dtype: torch.dtype, batch: int) -> None:
    """Which is what from_pretrained gives. Without grad and folding, torch gives other ones in float16 and float32."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn((8192, 960), generator=generator).to(dtype)
    head = torch.nn.Linear(960, 8192, bias=False, dtype=dtype, device="meta")
    head.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    head.__class__ = FoldedLinear
    needs_grad = torch.nn.Parameter(weight)
    states = torch.randn((batch, 17, 960), generator=generator).to(dtype)
    with torch.inference_mode():
        for some in (states, states[:, -1:], states[:, -3:], states[:, 0], states[0, 0]):
            made = head(some)
            assert made.shape == (*some.shape[:-1], 8192)
            assert torch.equal(made, torch.nn.functional.linear(some, needs_grad))


def test_only_a_plain_head_without_a_bias_is_folded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shared(root, "llama")
    assert type(skeleton(directory).model.lm_head) is FoldedLinear
    real = transformers.LlamaForCausalLM.__init__

    def with_bias(self: Any, config: Any) -> None:
        real(self, config)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", with_bias)
    copied = shutil.copytree(directory, tmp_path / "m")
    edit(copied, lambda tensors: {**tensors, "lm_head.bias": torch.ones(VOCABULARY, dtype=torch.bfloat16)})
    made = skeleton(copied)
    assert type(made.model.lm_head) is torch.nn.Linear
    assert made.shape.head_bytes == VOCABULARY * HIDDEN * 2
    assert [weight.name for weight in made.blocks.moving[-1].weights] == ["lm_head.weight", "lm_head.bias"]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "m", "llama", num_hidden_layers=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "unheard_of"}, "cannot read its config"),
        ({"num_attention_heads": 0}, "transformers cannot"),
        ({"hidden_act": "no_such_function"}, "cannot build a language model"),
    ],
)
def test_a_config_that_cannot_be_used(small: Path, change: dict[str, Any], reason: str) -> None:
    edit_config(small, **change)
    with pytest.raises(UnsupportedModel, match=reason):
        skeleton(small)


def test_a_form_of_quantization_that_cannot_be_streamed(small: Path) -> None:
    edit_config(small, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ForeignQuantization, match="'gptq'"):
        skeleton(small)


def test_a_config_that_does_not_fit_the_weights(small: Path) -> None:
    edit_config(small, num_hidden_layers=2)
    with pytest.raises(TensorMismatch, match="9 weights of the model are not in the checkpoint"):
        skeleton(small)


@pytest.mark.parametrize(
    "spoil",
    [lambda file: file.unlink(), lambda file: file.write_text("{"), lambda file: file.write_text("[]")],
    ids=["missing", "no JSON", "no object"],
)
def test_a_tokenizer_that_cannot_be_used(small: Path, spoil: Callable[[Path], Any]) -> None:
    assert load_tokenizer(small).vocab_size > 256
    spoil(small / "tokenizer.json")
    with pytest.raises(UnsupportedModel, match="its tokenizer cannot be loaded"):
        load_tokenizer(small)
