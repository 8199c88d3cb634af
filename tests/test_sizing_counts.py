"""What a config's counts can be; and that an impossible one ends as the same error in whatever reads a config."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from public_configs import FOLDER, NAMES, config
from tiny_models import edit_config, shared

import headrace
from headrace import forecast, sources
from headrace.cli import app as cli
from headrace.errors import ConfigLacksFields, CorruptGguf, MissingConfig
from headrace.sizing.counts import limit, wrong_counts

LLAMA = "llama-3.2-1b"
ABSURD = [
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1 (at least 1)"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0 (at least 1)"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 (at most 4096)"),
    ({"num_hidden_layers": 16.0}, "num_hidden_layers is 16.0"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"num_hidden_layers": [6]}, "num_hidden_layers is [6]"),
    ({"hidden_size": "many"}, "hidden_size is 'many'"),
    ({"hidden_size": 2**30}, "hidden_size is 1073741824 (at most 1048576)"),
    ({"intermediate_size": -5}, "intermediate_size is -5 (at least 1)"),
    ({"intermediate_size": [384, False]}, "intermediate_size is False"),
    ({"intermediate_size": []}, "intermediate_size is []"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0 (at least 1)"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0 (at least 1)"),
    ({"num_key_value_heads": 10**9}, "num_key_value_heads is 1000000000 (at most 16384)"),
    ({"head_dim": 0}, "head_dim is 0 (at least 1)"),
    ({"head_dim": float("nan")}, "head_dim is nan"),
    ({"vocab_size": -1}, "vocab_size is -1 (at least 1)"),
    ({"vocab_size": 10**18}, "vocab_size is 1000000000000000000 (at most 16777216)"),
    ({"num_experts": -1}, "num_experts is -1 (at least 0)"),
    ({"num_experts": 10**9}, "num_experts is 1000000000 (at most 65536)"),
    ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers is 1000000000 (at most 4096)"),
    ({"vision_config": {"depth": -2}}, "vision_config.depth is -2 (at least 1)"),
]  # fmt: skip
IDS = [why for _, why in ABSURD]


@pytest.mark.parametrize("name", NAMES)
def test_no_public_model_is_refused_or_near_a_limit_of_layers(name: str) -> None:
    values = config(name)
    assert wrong_counts(values) == []
    text = values.get("text_config") or values
    layers = text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers") or 1
    assert 8 * layers <= limit("num_hidden_layers").most


@pytest.mark.slow
def test_no_causal_language_model_of_transformers_is_refused() -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    checked = 0
    for model_type in sorted(sources.models.causal_model_types().intersection(CONFIG_MAPPING.keys())):
        # A few have defaults that they refuse themselves.
        with warnings.catch_warnings(), contextlib.suppress(StrictDataclassError):
            warnings.simplefilter("ignore")
            values = CONFIG_MAPPING[model_type]().to_dict()
            assert wrong_counts(values) == [], model_type
            checked += 1
    assert checked > 100


@pytest.mark.parametrize(("changes", "why"), ABSURD, ids=IDS)
def test_what_no_model_has_is_wrong(changes: dict[str, Any], why: str) -> None:
    assert wrong_counts({**config(LLAMA), **changes}) == [why]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None},
        {"num_experts": 0, "n_shared_experts": 0, "moe_intermediate_size": 0},
        {"intermediate_size": [8192, 16384]},
        {"head_dim": 0, "kv_lora_rank": 512, "qk_rope_head_dim": 0},
        {"num_hidden_layers": limit("num_hidden_layers").most},
        {"id2label": {"depth": "deep"}},
    ],
)
def test_what_a_model_may_have_is_not(changes: dict[str, Any]) -> None:
    assert wrong_counts({**config(LLAMA), **changes}) == []


def test_all_that_is_wrong_is_told_at_once_and_shortened() -> None:
    wrong = wrong_counts({"hidden_size": "x" * 10**6, "vocab_size": -1, "num_hidden_layers": 10**100})
    assert len(wrong) == 3
    assert all(len(each) < 100 for each in wrong)


# --- whatever reads a config ------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(root: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own: with weights, whose headers say how large it is."""
    return Path(shutil.copytree(shared(root, "llama"), tmp_path / "tiny"))


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    return Path(shutil.copy(FOLDER / f"{LLAMA}.json", tmp_path / "config.json"))


@pytest.mark.parametrize(("changes", "why"), ABSURD, ids=IDS)
def test_a_plan_from_a_config_alone(config_alone: Path, changes: dict[str, Any], why: str) -> None:
    edit_config(config_alone.parent, **changes)
    for model in (config_alone, config_alone.parent):
        with pytest.raises(ConfigLacksFields) as caught:
            forecast.read_subject(str(model))
        assert caught.value.wrong == [why]
        assert str(model) in caught.value.what


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "why"), ABSURD, ids=IDS)
def test_loading_a_checkpoint_and_planning_it(tiny: Path, changes: dict[str, Any], why: str) -> None:
    edit_config(tiny, **changes)
    for reader in (headrace.load, forecast.read_subject):
        with pytest.raises(ConfigLacksFields) as caught:
            reader(str(tiny))
        assert caught.value.wrong == [why]


@pytest.mark.parametrize("model_type", ["newmodel", None])
def test_a_family_that_is_not_known_is_not_asked_of_transformers(config_alone: Path, model_type: str | None) -> None:
    edit_config(config_alone.parent, model_type=model_type, num_hidden_layers=10**9)
    with pytest.raises(ConfigLacksFields, match=r"model_type (newmodel|none)"):
        forecast.read_subject(str(config_alone))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [-1, 10**9])
@pytest.mark.parametrize(
    "line",
    [
        "plan MODEL",
        "plan MODEL --for vllm --device l40s",
        "check -- vllm serve MODEL --cpu-offload-gb 4",
        "run MODEL --prompt hello",
        "serve MODEL",
        "quantize MODEL OUT --bits 4",
    ],
)
def test_every_command_ends_with_one_error(
    tiny: Path, capsys: pytest.CaptureFixture[str], line: str, layers: int
) -> None:
    edit_config(tiny, num_hidden_layers=layers)
    names = {"MODEL": str(tiny), "OUT": str(tiny.parent / "out")}
    code = cli.main([names.get(word, word) for word in shlex.split(line)])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"error: The config of {str(tiny)!r} (model_type llama)")
    assert f"num_hidden_layers is {layers}" in captured.err
    assert captured.err.count("error:") == 1
    assert not (tiny.parent / "out").exists()


@pytest.mark.slow
def test_more_layers_than_the_checkpoint_has_are_those_of_its_headers_in_a_plan(tiny: Path) -> None:
    layers = json.loads((tiny / "config.json").read_text())["num_hidden_layers"]
    edit_config(tiny, num_hidden_layers=layers + 2)
    subject = forecast.read_subject(str(tiny))
    assert subject.source == "the headers"
    assert sum(block.kind == "layer" for block in subject.shape.blocks) == layers


def test_a_number_that_python_does_not_read(config_alone: Path) -> None:
    text = config_alone.read_text()
    config_alone.write_text(text.replace('"hidden_size": ', '"hidden_size": ' + 5000 * "9"))
    with pytest.raises(MissingConfig, match="4300 digits"):
        forecast.read_subject(str(config_alone))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_file_with_impossible_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    from transformers import AutoConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tiny_gguf.write(tmp_path / "m.gguf", architecture)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **kwargs: pytest.fail("it would list the layers"))
    whole = file.read_bytes()
    key = architecture.encode() + b".block_count" + (4).to_bytes(4, "little")  # the type of an uint32
    assert whole.count(key) == 1
    before, after = whole.split(key)
    file.write_bytes(before + key + (10**9).to_bytes(4, "little") + after[4:])
    for reader in (forecast.read_subject, sources.resolve):
        with pytest.raises(CorruptGguf, match="num_hidden_layers is 1000000000"):
            reader(str(file))
