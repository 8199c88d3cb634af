"""`headrace quantize`: what is written is what the kernels read, loads and streams bit for bit, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fakes import small_matrices
from safetensors.torch import load_file
from tiny_models import LAYERS, differing, ids, logits

from headrace import forecast
from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.engine import Engine
from headrace.errors import (
    AlreadyQuantized,
    InvalidSetting,
    NoDiskSpace,
    NothingToQuantize,
    OtherLayout,
    OutputExists,
)
from headrace.lowbit import packing, quantizer, rounding
from headrace.lowbit.modules import Int4Linear, Int8Embedding, Int8Linear
from headrace.quantize import job, write

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _small_matrices() -> Iterator[None]:
    with small_matrices():
        yield


def quiet(*progress: object) -> None:
    pass


def quantized(root: Path, architecture: str, bits: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A quantized tiny checkpoint that is made once and read by many tests, which leave it as it is."""
    target = root / f"tiny-{architecture}-{str(dtype).removeprefix('torch.')}-{bits}"
    if not target.exists():
        job.quantize(str(tiny_models.shared(root, architecture, dtype)), target, quiet, bits=bits, calibrate=False)
    return target


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


GROUPS = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1))
MAPPED = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1.0))
STREAMED: dict[str, dict[str, Any]] = {
    "groups": {"offload": GROUPS},
    "uva": {"offload": MAPPED},
    "memory": {"weights_share": 0.6},
}


# --- loads and streams like any other -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", STREAMED)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen3", "gemma3", "phi3", "qwen3-moe"])
def test_streamed_is_resident_bit_for_bit(architecture: str, bits: int, way: str, root: Path) -> None:
    directory = quantized(root, architecture, bits)
    with Engine.open(directory) as engine:
        assert engine.report().offloaded_bytes == 0
        resident = logits(engine.model)
    with Engine.open(directory, **STREAMED[way]) as engine:
        assert not differing(logits(engine.model), resident)
        report = engine.report()
        assert report.offloaded_bytes > 0
        assert way == "uva" or report.counters.read_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_dtype_runs_and_stays_near_the_original(dtype: torch.dtype, bits: int, root: Path) -> None:
    before = tiny_models.plain_logits(tiny_models.shared(root, "llama", dtype), dtype)
    with Engine.open(quantized(root, "llama", bits, dtype), offload=GROUPS) as engine:
        assert engine.model.dtype == dtype
        after = logits(engine.model)["whole"].float()
    error = (after - before["whole"].float()).norm() / before["whole"].float().norm()
    assert error < {8: 0.1, 4: 0.7}[bits]  # of random weights, through six layers


def test_what_is_on_disk_is_what_the_kernels_get(root: Path) -> None:
    for bits, kind in ((8, Int8Linear), (4, Int4Linear)):
        directory = quantized(root, "llama-tied", bits)
        tensors = stored(directory)
        with Engine.open(directory) as engine:
            state = engine.model.state_dict()
            layer = engine.model.model.layers[LAYERS - 1]
            assert type(layer.mlp.down_proj) is kind
            assert type(engine.model.model.embed_tokens) is Int8Embedding
            assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
            assert engine.model.lm_head.weight_scale is engine.model.model.embed_tokens.weight_scale
        assert tensors.keys() <= state.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_what_is_written_is_what_rounding_made(root: Path) -> None:
    name = "model.layers.2.mlp.up_proj"
    matrix = stored(tiny_models.shared(root, "llama"))[f"{name}.weight"]
    eight, four = stored(quantized(root, "llama", 8)), stored(quantized(root, "llama", 4))
    rounded = rounding.to_8_bits(matrix, torch.bfloat16)
    assert torch.equal(eight[f"{name}.weight"], rounded.numbers)
    assert torch.equal(eight[f"{name}.weight_scale"], rounded.scale)
    rounded = rounding.to_4_bits(matrix, 64, torch.bfloat16)
    assert torch.equal(packing.unpack(four[f"{name}.weight"], packing.layout_here()), rounded.numbers)
    both = four[f"{name}.weight_scale_and_zero"]
    assert torch.equal(both[..., 0].t(), rounded.scale)
    assert torch.equal(both[..., 1].t(), rounded.zero)
    for kept in ("model.norm.weight", "model.layers.2.input_layernorm.weight"):
        assert torch.equal(four[kept], stored(tiny_models.shared(root, "llama"))[kept])


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_transformers_itself_loads_it(architecture: str, root: Path) -> None:
    """With our quantizer registered, the bits are the same."""
    from transformers import AutoModelForCausalLM

    quantizer.register()
    directory = quantized(root, architecture, 4)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    with Engine.open(directory, offload=GROUPS) as engine, torch.inference_mode():
        assert engine.report().offloaded_bytes > 0
        assert torch.equal(engine.model(ids(1, 5)).logits, theirs(ids(1, 5)).logits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "gemma3"])
def test_a_plan_from_the_config_alone_has_the_sizes_of_the_engine(architecture: str, bits: int, root: Path) -> None:
    directory = quantized(root, architecture, bits)
    subject = forecast.read_subject(str(directory))
    with Engine.open(directory) as engine:
        shape = engine._skeleton.shape
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in engine.model.buffers())
    assert subject.source == "the config and the headers, which agree"
    assert subject.shape.fixed_bytes == shape.fixed_bytes - buffers
    assert subject.shape.blocks == shape.blocks
    assert {param.bits for block in shape.blocks for param in block.params} == {0, 8, bits}


def test_a_large_model_is_written_in_little_memory(root: Path, tmp_path: Path) -> None:
    """As a process of its own: its peak above what it takes before it writes is that of a few pieces of a matrix."""
    source = tiny_models.write(
        tmp_path / "large", "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8
    )
    code = (
        "import sys; from pathlib import Path; from headrace import machine; from headrace.quantize import job, write\n"
        "machine.tune_allocator(return_memory=True)\n"
        "real, seen = write.write_shards, []\n"
        "def spy(*args): seen.append(machine.resident_bytes()); real(*args)\n"
        "write.write_shards = spy\n"
        "job.quantize(sys.argv[1], Path(sys.argv[2]), lambda *a: None, bits=4, calibrate=False)\n"
        "print(machine.peak_resident_bytes() - seen[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "small")], capture_output=True, text=True, check=True
    )
    layer_bytes = (source / "model.safetensors").stat().st_size // 8
    assert layer_bytes > 30 * 2**20
    assert int(done.stdout) < 2 * layer_bytes


# --- whole or not at all --------------------------------------------------------------------------------------------


def test_an_interrupt_leaves_nothing(root: Path, tmp_path: Path) -> None:
    source, target = tiny_models.shared(root, "llama"), tmp_path / "new"

    def interrupt(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.quantize(str(source), target, interrupt, bits=8)
    assert not list(tmp_path.iterdir())


def test_after_a_kill_it_is_done_again(root: Path, tmp_path: Path) -> None:
    source, target = tiny_models.shared(root, "llama"), tmp_path / "new"
    code = (
        "import os, signal, sys; from pathlib import Path; from headrace.quantize import job\n"
        "def kill(what, done, total):\n    if done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "job.quantize(sys.argv[1], Path(sys.argv[2]), kill, bits=8)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(source), str(target)], check=False).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["new.partial"]
    job.quantize(str(source), target, quiet, bits=8)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert stored(target).keys() == stored(quantized(root, "llama", 8)).keys()


def test_an_empty_directory_is_taken_and_a_full_one_is_not(root: Path, tmp_path: Path) -> None:
    source, target = str(tiny_models.shared(root, "llama")), tmp_path / "new"
    target.mkdir()
    job.quantize(source, target, quiet, bits=8)
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    with pytest.raises(OutputExists, match="not empty"):
        job.quantize(source, target, quiet, bits=4)
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_a_full_disk_is_noticed_before_anything_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = write.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(NoDiskSpace) as caught:
        job.quantize(str(tiny_models.shared(root, "llama")), tmp_path / "new", quiet, bits=8)
    assert caught.value.needed_bytes > caught.value.free_bytes == 2**20
    assert not list(tmp_path.iterdir())


# --- what cannot be asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"bits": 5}, "--bits is 5"),
        ({"bits": 4, "group_size": 48}, "--group-size is 48"),
        ({"bits": 4, "group_size": 256}, "rows of 384 numbers"),
        ({"bits": 8, "group_size": 64}, "--bits 8"),
    ],
)
def test_settings_that_cannot_be(asked: dict[str, int], says: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=says):
        job.quantize(str(tiny_models.shared(root, "llama")), tmp_path / "new", quiet, **asked)
    assert not list(tmp_path.iterdir())


def test_the_group_sizes_that_are_named_instead_work(root: Path, tmp_path: Path) -> None:
    source = str(tiny_models.shared(root, "llama"))
    with pytest.raises(InvalidSetting, match="Use --group-size 32 or 64 or 128"):
        job.quantize(source, tmp_path / "new", quiet, bits=4, group_size=256)
    for size in (32, 64, 128):
        job.quantize(source, tmp_path / str(size), quiet, bits=4, group_size=size, calibrate=False)
        assert stored(tmp_path / str(size))["model.layers.0.mlp.up_proj.weight_scale_and_zero"].shape[0] == 256 // size


def test_a_model_without_linear_modules_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToQuantize):
        job.quantize(str(tiny_models.shared(root, "gpt2")), tmp_path / "new", quiet)


def test_what_is_quantized_already_is_refused(root: Path, tmp_path: Path) -> None:
    for bits in (8, 4):
        with pytest.raises(AlreadyQuantized, match=f"{bits} bits"):
            job.quantize(str(quantized(root, "llama", bits)), tmp_path / "new", quiet)


# --- other processors -----------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that was packed on a processor with other vectors."""
    from headrace.quantize import choice

    quantized(root, "llama", 4)  # as it is packed here
    other = next(layout for layout in packing.HALVES if layout != packing.layout_here())
    monkeypatch.setattr(choice, "layout_here", lambda: other)
    job.quantize(str(tiny_models.shared(root, "llama")), tmp_path / "elsewhere", quiet, bits=4, calibrate=False)
    return tmp_path / "elsewhere"


def test_another_layout_is_refused_and_can_be_repacked(elsewhere: Path, root: Path, tmp_path: Path) -> None:
    with pytest.raises(OtherLayout, match="headrace quantize"):
        Engine.open(elsewhere)
    assert job.quantize(str(elsewhere), tmp_path / "here", quiet) is None
    here, expected = stored(tmp_path / "here"), stored(quantized(root, "llama", 4))
    assert here.keys() == expected.keys()
    assert all(torch.equal(here[name], tensor) for name, tensor in expected.items())
    with Engine.open(tmp_path / "here", offload=GROUPS) as engine:
        assert engine.report().offloaded_bytes > 0
        logits(engine.model)


def test_files_beside_the_weights_come_along(root: Path) -> None:
    source, target = tiny_models.shared(root, "llama"), quantized(root, "llama", 4)
    theirs = {path.name for path in source.iterdir() if not path.name.startswith("model")}
    assert {path.name for path in target.iterdir()} == {*theirs, "model.safetensors"}
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["modules"]["model.layers.*.mlp.down_proj"] == 4
    assert {key: value for key, value in config.items() if key != "quantization_config"} == json.loads(
        (source / "config.json").read_text()
    )


# --- where rounding hurts least -------------------------------------------------------------------------------------


def test_moments_are_the_mean_products_of_what_the_matrix_is_given(root: Path) -> None:
    """Streamed and resident say the same, and it is what a plain model sees."""
    from headrace.model import load_tokenizer
    from headrace.quantize import calibration

    source = tiny_models.shared(root, "llama")
    columns = {f"model.layers.{layer}.mlp.down_proj": 384 for layer in range(LAYERS)}
    found = calibration.second_moments(source, columns, quiet)
    with Engine.open(source, weights_share=0.5) as engine:
        assert engine.report().offloaded_bytes > 0
        budget = f"{engine.report().requested_bytes}B"
    streamed = calibration.second_moments(source, columns, quiet, memory=budget)
    assert found.keys() == streamed.keys() == columns.keys()
    assert all(torch.equal(found[name], streamed[name]) for name in columns)

    loaded, given = tiny_models.plain(source), []
    name = f"model.layers.{LAYERS - 1}.mlp.down_proj"
    loaded.get_submodule(name).register_forward_pre_hook(lambda module, inputs: given.append(inputs[0][0]))
    tokens = torch.tensor(load_tokenizer(source)(calibration.text())["input_ids"][: calibration.MOST_TOKENS])
    with torch.inference_mode():
        for window in tokens.split(calibration.WINDOW):
            loaded(window[None])
    block = torch.cat(given)[:, 64:128].double()
    expected = block.t() @ block / len(tokens)
    assert found[name].shape == (6, 64, 64)
    torch.testing.assert_close(found[name][1].double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_calibration_reads_nothing_of_what_damage_is_measured_with() -> None:
    """No sentence of one text is in the other."""
    from headrace.quantize import calibration, damage

    def sentences(text: str) -> set[str]:
        parts = (" ".join(part.split()) for part in text.replace("\n", ".").split("."))
        return {part for part in parts if len(part) > 20}

    assert min(len(sentences(text)) for text in (calibration.text(), damage.shipped_text())) > 80
    assert not sentences(calibration.text()) & sentences(damage.shipped_text())


def test_value_projections_have_8_bits(root: Path) -> None:
    tensors = stored(quantized(root, "llama", 4))
    kinds = {name.split(".")[-2]: tensor.dtype for name, tensor in tensors.items() if name.endswith("proj.weight")}
    assert {kind for kind, dtype in kinds.items() if dtype == torch.int8} == {"v_proj"}
    assert len(kinds) == 7


def test_the_command_calibrates_unless_it_is_told_not_to(root: Path, tmp_path: Path) -> None:
    source, seen = str(tiny_models.shared(root, "llama")), []
    job.quantize(source, tmp_path / "new", lambda what, *_: seen.append(what), bits=4)
    assert any(what.startswith("calibrating") for what in seen)
    calibrated, plain = stored(tmp_path / "new"), stored(quantized(root, "llama", 4))
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(calibrated[name], plain[name])
    assert torch.equal(calibrated["lm_head.weight"], plain["lm_head.weight"])


@pytest.mark.parametrize(
    ("asked", "says"), [([], "on a text of its own"), (["--no-calibrate"], "what was rounded to 4 bits loses more")]
)
def test_the_command_says_whether_it_calibrated(
    asked: list[str], says: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.app import main

    source = str(tiny_models.shared(root, "llama"))
    assert main(["quantize", source, str(tmp_path / "new"), "--bits", "4", "--no-damage", *asked]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


# --- what it costs --------------------------------------------------------------------------------------------------


def test_damage_is_none_for_the_same_model_and_grows_with_fewer_bits(root: Path) -> None:
    from headrace.quantize import damage

    original = tiny_models.shared(root, "llama")
    before = damage.score(original, None, quiet, memory=None, tokens=400)
    same, eight, four = (
        damage.compare(before, damage.score(directory, before, quiet, memory=None, tokens=400))
        for directory in (original, quantized(root, "llama", 8), quantized(root, "llama", 4))
    )
    assert (same.change, same.same_choice) == (0, 1)
    assert same.divergence == pytest.approx(0, abs=1e-9)
    assert 0 < eight.divergence < four.divergence
    assert eight.tokens == 399
    # By hand, for the first window.
    loaded = tiny_models.plain(original)
    assert before.likeliest.shape == (399, tiny_models.VOCABULARY)
    window = before.tokens[: damage.WINDOW]
    first = torch.tensor(damage_first_token(original))
    with torch.inference_mode():
        scores = loaded(torch.cat([first[None], window])[None, :-1]).logits[0].float().log_softmax(-1)
    assert torch.equal(before.log_likelihoods[: damage.WINDOW], scores.gather(1, window[:, None])[:, 0])


def damage_first_token(directory: Path) -> int:
    from headrace.model import load_tokenizer
    from headrace.quantize import damage

    return int(load_tokenizer(directory)(damage.shipped_text())["input_ids"][0])


def test_damage_can_be_measured_within_a_budget(root: Path) -> None:
    """Both stream: neither model has to fit."""
    from headrace.quantize import damage

    with Engine.open(tiny_models.shared(root, "llama"), weights_share=0.5) as engine:
        budget = f"{engine.report().requested_bytes}B"
    seen: list[str] = []
    made = damage.measure(
        tiny_models.shared(root, "llama"),
        quantized(root, "llama", 8),
        lambda what, done, total: seen.append(what),
        memory=budget,
        tokens=300,
    )
    assert made.tokens == 299
    assert any("reading with" in what for what in seen)


def test_the_text_is_long_and_names_its_source() -> None:
    import importlib.resources

    from headrace.quantize import damage

    raw = (importlib.resources.files("headrace.quantize") / "data" / "text.txt").read_text()
    assert 20_000 <= len(raw) <= 60_000
    assert "Public domain" in raw.splitlines()[0]
    assert "Public domain" not in damage.shipped_text()


def test_the_command_prints_sizes_and_damage(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.app import main

    source, target = tiny_models.shared(root, "llama"), tmp_path / "new"
    assert main(["quantize", str(source), str(target), "--bits", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["damage"]["perplexity_after"] > 0
    assert document["written"]["calibrated"] is True
    assert document["written"]["bytes_after"] < 0.4 * document["written"]["bytes_before"]
    assert main(["quantize", str(source), str(target), "--bits", "4"]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_fewer_bytes_is_planned_to_be_faster(bits: int, root: Path) -> None:
    before, after = (
        forecast.read_subject(str(path)).shape
        for path in (tiny_models.shared(root, "llama"), quantized(root, "llama", bits))
    )
    from headrace.core import Link, Machine, Tier
    from headrace.planner import Demand, plan

    here = Machine(
        2**34, 2, Link(Tier.DISK, Tier.DEVICE, 2e9), 1e10, 1e11, int8_bytes_per_s=1.2e10, int4_bytes_per_s=1.1e10
    )
    demand = Demand(memory_bytes=None, baseline_bytes=0, staging_bytes=0, context_tokens=64, prefill_tokens=32)
    times = [plan(shape, here, demand, OffloadConfig()).bound.compute_s for shape in (before, after)]
    assert times[1] < times[0] * {8: 0.6, 4: 0.45}[bits]
    slow = dataclasses.replace(here, int8_bytes_per_s=1e9, int4_bytes_per_s=1e9)
    assert plan(after, slow, demand, OffloadConfig()).bound.compute_s > times[0]


def test_other_engines_are_not_planned_with_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.app import main

    assert main(["plan", str(quantized(root, "llama", 8)), "--for", "vllm", "--device", "l40s"]) == 2
    assert "no other engine reads that" in capsys.readouterr().err
