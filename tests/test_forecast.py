"""Plans before anything is loaded: whatever there is of a model, and equal to what the engine plans."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from fakes import entry, machine, write_by_hand
from public_configs import FOLDER, config
from tiny_cli import write_checkpoint

from headrace import forecast, machinefile, probing, sources
from headrace.config import OffloadConfig, PrefetchOffloadConfig
from headrace.core import Plan
from headrace.datasheets import data_sheet
from headrace.errors import (
    BudgetTooSmall,
    ConfigLacksFields,
    ForeignQuantization,
    HostBudgetTooSmall,
    InvalidSetting,
    MissingConfig,
    PathNotFound,
    UnsupportedModel,
)
from headrace.planner import least_memory_bytes, resident_memory_bytes

GIB, MIB = 2**30, 2**20
AUTO = OffloadConfig()
HERE = probing.Probed(machine(), ())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def planned(
    subject: forecast.Subject, probed: probing.Probed = HERE, offload: OffloadConfig = AUTO, **wanted: Any
) -> forecast.Forecast:
    values: dict[str, Any] = {"memory": None, "host_memory": None, "context": None, "batch": 1, **wanted}
    return forecast.forecast(subject, probed, forecast.demand_for(subject, probed.machine, **values), offload)


def public(name: str) -> forecast.Subject:
    return forecast.read_subject(str(FOLDER / f"{name}.json"))


# --- the model ------------------------------------------------------------------------------------------------------


def test_a_config_alone_is_enough() -> None:
    subject = public("llama-3.1-8b")
    assert subject.shape.weight_bytes == 16060522496
    assert subject.source == "the config"
    assert subject.longest == 131072


@pytest.mark.slow
def test_config_and_headers_agree(checkpoint: Path) -> None:
    subject = forecast.read_subject(str(checkpoint))
    assert subject.source == "the config and the headers, which agree"
    assert subject.dtype == "bfloat16"
    assert not subject.notes
    from headrace.model import build
    from headrace.store import open_checkpoint

    theirs = build(checkpoint, open_checkpoint(checkpoint)).shape
    assert subject.shape.blocks == theirs.blocks
    rest = {"fixed_bytes": 0}
    assert dataclasses.replace(subject.shape, **rest) == dataclasses.replace(theirs, **rest)  # but for tables of angles


def test_the_index_of_a_checkpoint_whose_weights_are_elsewhere(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "llama-3.1-8b.json", tmp_path / "config.json")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00004.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    subject = forecast.read_subject(str(tmp_path))
    assert subject.shape == public("llama-3.1-8b").shape
    assert "model-00001-of-00004.safetensors is not here" in subject.notes[0]


def headers_only(directory: Path, layers: int = 3) -> Path:
    """A model that no family knows, with a table, three layers of two matrices, and a head."""
    sizes = {"backbone.embed_tokens.weight": (100, 8), "lm_head.weight": (100, 8)}
    for layer in range(layers):
        sizes |= {f"backbone.layers.{layer}.mix.weight": (8, 8), f"backbone.layers.{layer}.mlp.weight": (32, 8)}
    header, offset = {}, 0
    for name, shape in sizes.items():
        nbytes = 2 * shape[0] * shape[1]
        header[name] = entry("BF16", shape, offset, offset + nbytes)
        offset += nbytes
    directory.mkdir(exist_ok=True)
    write_by_hand(directory / "model.safetensors", header, bytes(offset))
    (directory / "config.json").write_text(json.dumps({"model_type": "newmodel", "vocab_size": 100, "hidden_size": 8}))
    return directory


def test_an_unknown_architecture_falls_back_to_the_headers_and_says_so(tmp_path: Path) -> None:
    subject = forecast.read_subject(str(headers_only(tmp_path)))
    assert subject.source == "the headers"
    assert "'newmodel'" in subject.notes[0]
    assert [block.kind for block in subject.shape.blocks] == ["embedding", "layer", "layer", "layer", "head"]
    assert subject.shape.weight_bytes == 2 * (2 * 100 * 8 + 3 * (8 * 8 + 32 * 8))


def test_headers_that_are_not_the_config_s_win_and_say_so(tmp_path: Path) -> None:
    directory = headers_only(tmp_path)
    shutil.copy(FOLDER / "llama-3.2-1b.json", directory / "config.json")
    subject = forecast.read_subject(str(directory))
    assert subject.source == "the headers"
    assert "its config describes" in subject.notes[0]


@pytest.mark.slow
def test_an_unknown_architecture_without_weights_is_asked_of_transformers(tmp_path: Path) -> None:
    values = {**config("pythia-6.9b"), "model_type": "persimmon", "architectures": ["PersimmonForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 2}))
    subject = forecast.read_subject(str(tmp_path))
    assert subject.outline is None
    assert "transformers' own definition" in subject.notes[0]
    assert sum(block.kind == "layer" for block in subject.shape.blocks) == 2


def test_without_torch_an_unknown_architecture_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "newmodel"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match="'newmodel'"):
        forecast.read_subject(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny_gguf.SHAPES)
def test_a_gguf_file_is_planned_from_its_header_as_what_it_is_imported_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "m.gguf"
    tiny_gguf.write(file, architecture)
    subject = forecast.read_subject(str(file))
    assert subject.source == "the .gguf header"
    assert "imported once" in subject.notes[0]
    imported = forecast.read_subject(str(sources.resolve(file)))
    assert imported.source == "the config and the headers, which agree"
    assert subject.dtype == imported.dtype
    assert subject.shape == imported.shape


def test_a_gguf_architecture_without_a_family_is_planned_from_its_tensors(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tiny_gguf.write(file, "llama")
    whole = forecast.read_subject(str(file)).shape
    file.write_bytes(file.read_bytes().replace(b"llama", b"newer"))  # keys and architecture alike
    subject = forecast.read_subject(str(file))
    assert "'newer'" in subject.notes[-1]
    assert subject.shape.weight_bytes == whole.weight_bytes
    assert [block.kind for block in subject.shape.blocks] == [block.kind for block in whole.blocks]


@pytest.mark.parametrize(("name", "error"), [("none/at/all", PathNotFound), ("./none", PathNotFound)])
def test_what_is_not_there(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        forecast.read_subject(name)


def test_configs_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(MissingConfig):
        forecast.read_subject(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigLacksFields, match="hidden_size, vocab_size"):
        forecast.read_subject(str(tmp_path))


# --- the plan -------------------------------------------------------------------------------------------------------


def test_steps_up_are_plans_that_fit_and_the_last_one_holds_everything() -> None:
    made = planned(public("llama-3.1-8b"), memory=6 * GIB)
    assert made.plan.backend == "prefetch"
    budgets = [made.demand.memory_bytes or 0, *(step.memory_bytes for step in made.steps)]
    assert budgets == sorted(set(budgets))
    assert all(step.plan.memory.total_bytes <= step.memory_bytes for step in made.steps)
    speeds = [made.plan.tokens_per_s, *(step.plan.tokens_per_s for step in made.steps)]
    assert speeds == sorted(speeds)
    assert made.steps[-1].plan.backend == "resident"
    assert made.steps[-1].plan.memory.total_bytes == made.steps[-1].memory_bytes


def test_nothing_is_above_a_plan_that_holds_everything() -> None:
    made = planned(public("llama-3.2-1b"), memory=16 * GIB)
    assert made.plan.backend == "resident"
    assert made.steps == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-405b", "qwen3-30b-a3b", "gemma-2-9b", "gpt2"])
def test_the_curve_begins_where_something_runs_and_never_falls(name: str) -> None:
    made = planned(public(name), memory=1000 * GIB)
    curve = forecast.curve(made, AUTO, points=12)
    speeds = [step.plan.tokens_per_s for step in curve]
    assert speeds == sorted(speeds)
    with pytest.raises(BudgetTooSmall) as caught:
        planned(public(name), memory=curve[0].memory_bytes - MIB)
    assert caught.value.needed_bytes == curve[0].memory_bytes
    assert curve[0].memory_bytes == least_memory_bytes(made.subject.shape, made.demand)
    assert curve[-1].memory_bytes == resident_memory_bytes(made.subject.shape, made.demand)


def gpu(host_bytes: int = 64 * GIB) -> probing.Probed:
    here = dataclasses.replace(machine(), accelerator=data_sheet("l40s").accelerator(), memory_bytes=host_bytes)
    return probing.Probed(here, ())


def tiers(plan: Plan) -> tuple[int, int, int]:
    assert plan.host is not None
    return plan.memory.resident_bytes, plan.host.tier_bytes, plan.offloaded_bytes - plan.host.tier_bytes


@pytest.mark.parametrize(("device", "host"), [(16, 64), (8, 64), (8, 10), (8, 6), (4, 5)])
def test_three_tiers_hold_the_model_and_keep_their_budgets(device: int, host: int) -> None:
    subject = public("llama-3.1-8b")
    made = planned(subject, gpu(), memory=device * GIB, host_memory=host * GIB)
    assert sum(tiers(made.plan)) == subject.shape.weight_bytes
    assert made.plan.memory.total_bytes <= device * GIB
    assert made.plan.host is not None
    assert made.plan.host.total_bytes <= host * GIB
    streamed = {name: set(params) for name, params in made.plan.streamed}
    assert all(set(params) <= streamed[name] for name, params in made.plan.on_host)
    bound = made.plan.bound
    assert bound.link == "link"
    assert bound.disk_bytes <= bound.moved_bytes
    assert (bound.disk_bytes > 0) == (host <= 10 and device < 16)
    assert made.plan.memory.staging_bytes == 0


@pytest.mark.slow
def test_more_host_memory_never_plans_slower() -> None:
    subject = public("llama-3.1-8b")
    speeds = [
        planned(subject, gpu(), memory=8 * GIB, host_memory=host * GIB).plan.tokens_per_s for host in range(5, 16)
    ]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1]


def test_a_host_budget_that_holds_nothing_names_the_smallest_that_does() -> None:
    subject = public("llama-3.1-8b")
    with pytest.raises(HostBudgetTooSmall) as caught:
        planned(subject, gpu(), memory=8 * GIB, host_memory=GIB)
    planned(subject, gpu(), memory=8 * GIB, host_memory=caught.value.needed_bytes)
    with pytest.raises(HostBudgetTooSmall):
        planned(subject, gpu(), memory=8 * GIB, host_memory=caught.value.needed_bytes - MIB)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"batch": 0}, "--batch"),
        ({"context": 0}, "--context"),
        ({"context": 200000}, "at most 131072"),
        ({"host_memory": GIB}, "--host-memory"),
    ],
)
def test_what_contradicts_itself(wanted: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        planned(public("llama-3.1-8b"), **wanted)


def test_weights_that_others_quantized_are_to_be_converted() -> None:
    with pytest.raises(ForeignQuantization, match="headrace quantize"):
        planned(public("qwen2.5-7b-gptq-int4"))


def test_offload_flags_are_planned_as_they_are() -> None:
    config = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=8))
    made = planned(public("llama-3.1-8b"), offload=config, memory=30 * GIB)
    assert [name for name, _ in made.plan.streamed] == [f"model.layers.{index}" for index in (7, 15, 23, 31)]


def test_everything_is_plain_data() -> None:
    made = forecast.to_json(planned(public("llama-3.1-8b"), gpu(), memory=8 * GIB, host_memory=8 * GIB))
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    plan = made["plan"]
    assert plan["total_bytes"] == plan["memory"]["total_bytes"] <= 8 * GIB
    assert plan["host"]["total_bytes"] <= 8 * GIB
    assert plan["tokens_per_s"] > 0


# --- the machine ----------------------------------------------------------------------------------------------------


def test_devices_are_measured_or_by_their_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machinefile.write(machine(), machinefile.cache_file())
    assert forecast.machine_for(None, None).machine.accelerator is None
    sheet = forecast.machine_for(None, "l40s").machine.accelerator
    assert sheet is not None
    assert sheet.name == "L40S"
    with pytest.raises(InvalidSetting, match="it has none"):
        forecast.machine_for(None, "cuda:0")
    file = tmp_path / "gpu.json"
    machinefile.write(gpu().machine, file)
    assert forecast.machine_for(file, "cuda:0").machine == gpu().machine
    assert forecast.machine_for(file, "cpu").machine.accelerator is None


@pytest.mark.slow
def test_a_machine_that_was_never_measured_is_estimated_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "guess" in forecast.machine_for(None, None).notes[0]


def test_the_staging_is_that_of_the_engine_s_reader() -> None:
    from headrace.copying.disk import CHUNK_BYTES, READER_THREADS

    assert forecast.STAGING_BYTES == CHUNK_BYTES * READER_THREADS
