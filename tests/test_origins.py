"""Every weight is traced to the stored bytes that transformers would have made it of; what does not fit is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small_matrices
from safetensors.torch import load_file, save_file
from tiny_models import (
    ARCHITECTURES,
    LAYERS,
    differing,
    edit,
    edit_config,
    ids,
    logits,
    plain,
    shared,
    write,
    write_tokenizer,
)
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engine import Engine
from headrace.errors import TensorMismatch
from headrace.model import Skeleton, build
from headrace.origins import TORCH_DTYPES
from headrace.store import DTYPE_BITS, open_checkpoint

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_matrices() -> Iterator[None]:
    with small_matrices():
        yield


def skeleton(directory: Path) -> Skeleton:
    return build(directory, open_checkpoint(directory))


def bytes_of(directory: Path, made: Skeleton) -> dict[str, bytes]:
    """By weight: the bytes of its parts, one after the other."""
    files = {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}
    return {
        weight.name: b"".join(
            files[part.segment.file][part.segment.offset :][: part.segment.nbytes] for part in weight.parts
        )
        for weight in made.blocks.weights()
    }


def assert_same_bits(directory: Path, dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> dict[str, bool]:
    """Half on disk, resident and transformers' own agree. By parameter: whether it was on disk."""
    expected = logits(plain(directory, dtype))
    with Engine.open(directory) as engine:
        assert differing(logits(engine.model), expected) == []
    with Engine.open(directory, **(arguments or {"weights_share": 0.6})) as engine:
        assert differing(logits(engine.model), expected) == []
        assert engine.report().offloaded_bytes > 0
        assert engine.report().counters.read_bytes > 0
        return {name: parameter.is_meta for name, parameter in engine.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_traced_bytes_are_the_parameters(root: Path, architecture: str, dtype: torch.dtype) -> None:
    directory = shared(root, architecture, dtype)
    made, expected = skeleton(directory), plain(directory, dtype)
    traced = bytes_of(directory, made)
    assert sum(map(len, traced.values())) == sum(p.numel() * p.element_size() for p in expected.parameters())
    for name, data in traced.items():
        parameter = expected.get_parameter(name)
        assert data == parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_experts_are_read_into_one_parameter(root: Path) -> None:
    for architecture, matrices in (("qwen3-moe", 2), ("mixtral", 2)):
        directory = shared(root, architecture)
        assert len([name for name in load_file(directory / "model.safetensors") if ".experts." in name]) == 72
        weights = {weight.name: weight for weight in skeleton(directory).blocks.weights()}
        for layer in range(LAYERS):
            experts = f"model.layers.{layer}.mlp.experts"
            assert len(weights[f"{experts}.gate_up_proj"].parts) == 4 * matrices
            assert len(weights[f"{experts}.down_proj"].parts) == 4


def test_ten_experts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "qwen3-moe", num_experts=12, num_hidden_layers=3)
    on_disk = assert_same_bits(directory, weights_share=0.8)
    assert any(moved for name, moved in on_disk.items() if "gate_up_proj" in name)


def test_extra_tensors_are_ignored_and_told(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "something.else": torch.ones(3)}
    edit(directory, lambda tensors: {**tensors, **extra})
    assert set(skeleton(directory).ignored) == set(extra)
    assert_same_bits(directory)


@pytest.mark.parametrize("masks", [False, True], ids=["", "with masks"])
def test_gpt2_without_the_prefix(tmp_path: Path, masks: bool) -> None:
    """As the base model saves it, and as the original checkpoint is: its causal masks are stored as tensors."""
    directory = write(tmp_path / "m", "gpt2", torch.float32)

    def strip(tensors: Tensors) -> Tensors:
        stripped = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        assert stripped.keys() != tensors.keys()
        mask = torch.ones(256, 256).tril().reshape(1, 1, 256, 256)
        return stripped | {f"h.{layer}.attn.bias": mask.clone() for layer in range(LAYERS) if masks}

    edit(directory, strip)
    assert len(skeleton(directory).ignored) == LAYERS * masks
    assert any(assert_same_bits(directory, torch.float32).values())


def test_norms_in_float32_are_cast_and_stay(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "qwen3")
    edit(directory, lambda tensors: {n: t.float() + 1e-4 if "norm" in n else t for n, t in tensors.items()})
    for arguments in ({"weights_share": 0.5}, {}):
        on_disk = assert_same_bits(directory, **(arguments or {"weights_share": 0.8}))
        assert not any(moved for name, moved in on_disk.items() if "norm" in name)
        assert any(on_disk.values())


def test_a_table_stored_once_or_twice_is_one_weight(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "llama-tied")
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    once = skeleton(directory).shape.weight_bytes
    edit(directory, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert skeleton(directory).shape.weight_bytes == once
    assert_same_bits(directory)
    edit(directory, lambda tensors: {n: t for n, t in tensors.items() if n != "model.embed_tokens.weight"})
    assert skeleton(directory).shape.weight_bytes == once
    assert_same_bits(directory)


def test_a_tie_that_the_files_contradict(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "llama")
    edit_config(directory, tie_word_embeddings=True)
    made = skeleton(directory)
    assert made.model.lm_head.weight is not made.model.model.embed_tokens.weight
    assert_same_bits(directory, weights_share=0.6)


# --- conversions that are more than moving bytes ------------------------------------------------------------------


def made_by(directory: Path, model_type: str, **changes: Any) -> Path:
    values = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(values | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return write_tokenizer(directory)


def test_one_stored_matrix_that_becomes_several(tmp_path: Path) -> None:
    """Its layers also run several times in a pass, in the order of an inner and an outer loop."""
    directory = made_by(tmp_path / "m", "hrm_text")
    stored = load_file(directory / "model.safetensors")
    assert "model.H_module.layers.0.attn.gqkv_proj.weight" in stored
    expected = plain(directory)
    made = skeleton(directory)
    assert {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} == {name.split(".")[-2] for name in made.converters}
    for name, convert in made.converters.items():
        assert torch.equal(convert(), expected.get_parameter(name)), name
        assert convert().data_ptr() % 64 == 0
    with torch.inference_mode(), Engine.open(directory, weights_share=0.9) as engine:
        for _ in range(2):
            assert torch.equal(engine.model(input_ids=ids(1, 9)).logits, expected(input_ids=ids(1, 9)).logits)
        report = engine.report()
        assert report.offloaded_bytes > 0
        assert report.counters.read_bytes > 0
        assert report.counters.blocks_run > 2 * len(engine._backend.blocks)  # the loops
        converted = {name for name, p in engine.model.named_parameters() if not p.is_meta}
        assert converted >= set(made.converters)
        engine._backend.schedule.check_integrity()


def test_matrices_that_are_put_together(tmp_path: Path) -> None:
    directory = made_by(tmp_path / "m", "olmo_hybrid")
    made, expected = skeleton(directory), plain(directory)
    assert made.converters.keys() == {f"model.layers.{layer}.linear_attn.conv1d.weight" for layer in range(3)}
    for name, convert in made.converters.items():
        assert torch.equal(convert(), expected.get_parameter(name)), name
    with torch.inference_mode(), Engine.open(directory, weights_share=0.8) as engine:
        assert torch.equal(engine.model(input_ids=ids(1, 9)).logits, expected(input_ids=ids(1, 9)).logits)
        assert engine.report().offloaded_bytes > 0
        assert engine.report().counters.read_bytes > 0


# --- what does not fit --------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Tensors], Mapping[str, torch.Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


EXPERT = "model.layers.0.mlp.experts.3"


@pytest.mark.parametrize(
    ("architecture", "spoil", "reason", "names"),
    [
        ("llama", without("model.norm.weight"), "1 weights of the model are not in", ["model.norm.weight"]),
        (
            "llama",
            lambda tensors: {n: t for n, t in tensors.items() if ".mlp." not in n},
            "18 weights of the model are not in",
            ["model.layers.0.mlp.gate_proj.weight", "and 14 more"],
        ),
        ("llama", changed("model.norm.weight", lambda t: t[:-1]), "shapes differ", ["stored (255,), model (256,)"]),
        ("llama", changed("lm_head.weight", torch.t), "shapes differ", ["lm_head.weight"]),
        ("qwen3-moe", without(f"{EXPERT}.down_proj.weight"), "shapes differ", ["stored (3, 256, 128), model (4, "]),
        ("qwen3-moe", changed(f"{EXPERT}.down_proj.weight", torch.t), "shapes differ", ["stored in several shapes"]),
        (
            "qwen3-moe",
            lambda tensors: {n: t.t() if "experts" in n and "down_proj" in n else t for n, t in tensors.items()},
            "shapes differ",
            ["stored (4, 128, 256), model (4, 256, 128)", "and 2 more"],
        ),
        (
            "qwen3-moe",
            lambda tensors: {n: t.t() if "experts" in n and "down_proj" not in n else t for n, t in tensors.items()},
            "shapes differ",
            ["gate_up_proj: stored (4, 512, 128), model (4, 256, 256)"],
        ),
        ("gpt2", changed("transformer.h.1.attn.c_attn.weight", torch.t), "shapes differ", ["(768, 256), model (256,"]),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, architecture: str, spoil: Any, reason: str, names: list[str]) -> None:
    directory = edit(write(tmp_path / "m", architecture), spoil)
    with pytest.raises(TensorMismatch) as caught:
        skeleton(directory)
    assert caught.value.model == str(directory)
    assert reason in str(caught.value)
    for name in names:
        assert name in str(caught.value)


def test_an_expert_with_a_matrix_missing(tmp_path: Path) -> None:
    """Then it takes a conversion, and that does not come out right."""
    directory = edit(write(tmp_path / "m", "qwen3-moe"), without(f"{EXPERT}.up_proj.weight"))
    with pytest.raises(TensorMismatch, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        Engine.open(directory, weights_share=0.9)


def test_a_buffer_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaModel

    real = LlamaModel.__init__

    def with_buffer(self: Any, config: Any) -> None:
        real(self, config)
        self.register_buffer("steps", torch.zeros(4, dtype=torch.float32))

    monkeypatch.setattr(LlamaModel, "__init__", with_buffer)
    directory = write(tmp_path / "m", "llama", num_hidden_layers=2)
    values = torch.arange(4.0)
    edit(directory, lambda tensors: {**tensors, "model.steps": values})
    assert torch.equal(skeleton(directory).model.model.steps, values)
    edit(directory, lambda tensors: {**tensors, "model.steps": values[:2]})
    with pytest.raises(TensorMismatch, match=r"model\.steps: stored \(2,\), model \(4,\)"):
        skeleton(directory)


def test_a_weight_in_a_dtype_that_torch_has_no_name_for(tmp_path: Path) -> None:
    assert set(DTYPE_BITS) - set(TORCH_DTYPES) == {"F8_E8M0"}
    directory = write(tmp_path / "m", "llama", num_hidden_layers=1)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(256, dtype=torch.float8_e8m0fnu)
    save_file(tensors, file)
    made = skeleton(directory)
    assert torch.equal(made.converters["model.norm.weight"](), torch.ones(256, dtype=torch.bfloat16))
