"""Streamed is resident, bit for bit: each architecture and backend, any order, after every failure; and the books."""

from __future__ import annotations

import copy
import dataclasses
import errno
import gc
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from tiny_models import ARCHITECTURES, LAYERS, PASSES, differing, ids, logits, plain, plain_bytes, plain_logits, shared
from tiny_stacks import in_threads

import headrace
from headrace import machine, machinefile, store
from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.copying.disk import DiskReader
from headrace.core import DIRECT_ALIGNMENT
from headrace.engine import Engine, _with_what_was_kept
from headrace.errors import BudgetTooSmall, ClosedError, NotLoadedHere, OffloadedWeightsError, ReadError

pytestmark = pytest.mark.slow


def groups(size: int, number: int, step: int) -> dict[str, Any]:
    fields = {"offload_group_size": size, "offload_num_in_group": number, "offload_prefetch_step": step}
    return {"offload": OffloadConfig(prefetch=PrefetchOffloadConfig(**fields))}


def mapped(gib: float, *params: str) -> dict[str, Any]:
    return {"offload": OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=gib, cpu_offload_params=frozenset(params)))}


BACKENDS: dict[str, dict[str, Any]] = {
    "memory 90%": {"weights_share": 0.9},
    "memory 50%": {"weights_share": 0.5},
    "groups 1/1/1": groups(1, 1, 1),
    "groups 1/1/3": groups(1, 1, 3),
    "groups 2/1/1": groups(2, 1, 1),
    "groups 3/2/2": groups(3, 2, 2),
    "groups 4/3/1": groups(4, 3, 1),
    "groups 6/6/9": groups(6, 6, 9),
    "uva all": mapped(1.0),
    "uva some": mapped(3 * 2**20 / 2**30),
}


@pytest.fixture(autouse=True)
def _small_matrices(request: pytest.FixtureRequest) -> Iterator[None]:
    if "smollm" in request.fixturenames:
        yield
        return
    with fakes.small_matrices():
        yield


@pytest.fixture
def llama(root: Path) -> Path:
    return shared(root, "llama")


@pytest.fixture
def streamed(llama: Path) -> Iterator[Engine]:
    """Half of the layers' bytes and the table on disk."""
    with Engine.open(llama, weights_share=0.5) as engine:
        assert engine.report().offloaded_bytes > 0
        yield engine
        check(engine)


def check(engine: Engine) -> None:
    """The ring is consistent and at rest."""
    schedule = getattr(engine._backend, "schedule", None)
    if schedule is not None:
        schedule.check_integrity()
        assert not any(schedule._users)


def meta_bytes(model: Any) -> int:
    """Of the parameters that hold no data, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.is_meta)


def wait_idle(engine: Engine) -> None:
    for entry in getattr(engine._backend, "_deliveries", []):
        entry[1].wait_idle()


def assert_streamed(engine: Engine, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """What a model on disk computes is what transformers computes, and it really was on disk."""
    wait_idle(engine)
    before = engine.report().counters
    report = engine.report()
    assert report.offloaded_bytes == meta_bytes(engine.model) > 0
    assert differing(logits(engine.model), plain_logits(directory, dtype)) == []
    wait_idle(engine)
    after = engine.report().counters
    assert after.passes - before.passes == PASSES
    assert after.slot_misses == after.overflow_slots == after.read_errors == 0
    assert after.blocks_run - before.blocks_run == PASSES * len(moving(engine))
    plan = engine.plan
    if report.looked_up_bytes:
        assert after.gathered_rows > before.gathered_rows
    if plan.backend == "prefetch":
        streams = plan.slots < len(plan.streamed)
        assert after.read_bytes - before.read_bytes >= (report.offloaded_bytes - report.looked_up_bytes) * streams
        assert after.read_bytes > 0 or not streams
    check(engine)


def moving(engine: Engine) -> list[str]:
    return [block.name for block in engine._backend.blocks]


# --- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resident_is_what_transformers_loads(root: Path, architecture: str, dtype: torch.dtype) -> None:
    directory = shared(root, architecture, dtype)
    with Engine.open(directory) as engine:
        assert differing(logits(engine.model), plain_logits(directory, dtype)) == []
        report = engine.report()
    assert report.backend == "resident"
    assert report.offloaded_bytes == meta_bytes(engine.model) == report.ring_bytes == report.net_saving_bytes == 0
    assert report.counters.read_bytes == 0  # since it was opened


def assert_adds_up(engine: Engine, directory: Path) -> None:
    """Resident and offloaded are all of the weights, tied ones once; the plan said so."""
    weights, buffers = plain_bytes(directory)
    report = engine.report()
    here = sum(p.numel() * p.element_size() for p in engine.model.parameters() if not p.is_meta)
    assert report.offloaded_bytes == meta_bytes(engine.model) > 0
    assert report.resident_bytes == here + buffers
    assert report.resident_bytes + report.offloaded_bytes == weights + buffers
    assert report.buffer_bytes == buffers
    assert report.net_saving_bytes == report.offloaded_bytes - report.ring_bytes
    assert report.offloaded_bytes == report.plan.offloaded_bytes
    assert report.resident_bytes == report.plan.memory.resident_bytes
    if report.backend == "prefetch":
        planned = report.plan.memory.ring_bytes
        assert planned == report.plan.slots * report.plan.slot_bytes
        runs = max(len(names) for _, names in report.plan.streamed)  # each may need a page for where it begins in one
        assert planned <= report.ring_bytes <= planned + report.plan.slots * runs * DIRECT_ALIGNMENT
    assert report.looked_up_bytes <= report.offloaded_bytes
    assert report.staging_bytes > 0
    assert report.peak_memory_bytes > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streamed_is_resident(root: Path, architecture: str, backend: str) -> None:
    directory = shared(root, architecture)
    with Engine.open(directory, **BACKENDS[backend]) as engine:
        assert_streamed(engine, directory)
        assert_adds_up(engine, directory)


@pytest.mark.parametrize("backend", ["memory 50%", "groups 3/2/2", "uva all"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streamed_is_resident_in_float32(root: Path, architecture: str, backend: str) -> None:
    """Here kernels give other last bits at another alignment."""
    directory = shared(root, architecture, torch.float32)
    with Engine.open(directory, **BACKENDS[backend]) as engine:
        assert_streamed(engine, directory, torch.float32)


@pytest.mark.parametrize("backend", ["memory 50%", "groups 1/1/1", "uva all"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_several_files(root: Path, architecture: str, backend: str) -> None:
    directory = shared(root, architecture, shard_size="1500KB")
    assert len(list(directory.glob("*.safetensors"))) >= 4
    with Engine.open(directory, **BACKENDS[backend]) as engine:
        assert_streamed(engine, directory)


@pytest.mark.parametrize("backend", ["memory 50%", "uva all"])
def test_streamed_is_resident_in_float16(root: Path, backend: str) -> None:
    directory = shared(root, "llama", torch.float16)
    with Engine.open(directory, **BACKENDS[backend]) as engine:
        assert_streamed(engine, directory, torch.float16)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "gemma3"])
def test_a_head_that_has_to_move(root: Path, architecture: str) -> None:
    directory = shared(root, architecture, vocab_size=2048)
    with Engine.open(directory, weights_share=0.36) as engine:
        assert "lm_head" in moving(engine)
        assert engine.model.lm_head.weight.is_meta
        assert engine.model.get_input_embeddings().weight.is_meta
        assert_streamed(engine, directory)


def test_only_the_table_is_on_disk(root: Path) -> None:
    directory = shared(root, "llama", vocab_size=8192)
    with Engine.open(directory, weights_share=0.75) as engine:
        report = engine.report()
        assert moving(engine) == []
        assert report.offloaded_bytes == report.looked_up_bytes == 8192 * 256 * 2
        assert_streamed(engine, directory)
        counters = engine.report().counters
        assert 0 < counters.read_bytes < report.offloaded_bytes / 4
        with pytest.raises(IndexError, match="index out of range"):
            engine.model(input_ids=torch.tensor([[8192]]))
        assert_streamed(engine, directory)
    with pytest.raises(ClosedError):
        engine.model(input_ids=ids(1, 3))


def test_selected_parameters_only(root: Path) -> None:
    directory = shared(root, "qwen3-moe")
    experts = PrefetchOffloadConfig(offload_group_size=1, offload_params=frozenset({"experts"}))
    for arguments in ({"offload": OffloadConfig(prefetch=experts)}, mapped(1.0, "experts")):
        with Engine.open(directory, **arguments) as engine:
            assert_streamed(engine, directory)
            names = [name for name, parameter in engine.model.named_parameters() if parameter.is_meta]
            assert len(names) == 2 * LAYERS
            assert all(".experts." in name for name in names)


def test_layers_skipped_repeated_and_reversed(llama: Path, streamed: Engine) -> None:
    resident = plain(llama)
    layers, plain_layers = list(streamed.model.model.layers), list(resident.model.layers)
    in_order = list(range(LAYERS))
    for order in ([0, 2, 3, 5], [0, 0, 1, 2, 3, 4, 5, 5], in_order[::-1], [3], in_order):
        streamed.model.model.layers = torch.nn.ModuleList([layers[index] for index in order])
        resident.model.layers = torch.nn.ModuleList([plain_layers[index] for index in order])
        with torch.inference_mode():
            made = streamed.model(input_ids=ids(2, 5), use_cache=False).logits
            expected = resident(input_ids=ids(2, 5), use_cache=False).logits
        assert torch.equal(made, expected)
        check(streamed)
    misses = streamed.report().counters.slot_misses
    assert misses > 0
    assert differing(logits(streamed.model), plain_logits(llama)) == []
    assert streamed.report().counters.slot_misses <= misses + 1


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_whatever_the_grad_mode(llama: Path, streamed: Engine, grad: Callable[[], Any]) -> None:
    with grad():
        made = streamed.model(input_ids=ids(1, 13)).logits
    assert torch.equal(made, plain_logits(llama)["whole"])
    assert not made.requires_grad


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("backend", ["memory 50%", "groups 1/1/3", "uva all"])
def test_an_exception_in_the_middle_of_a_pass(llama: Path, backend: str, error: type[BaseException]) -> None:
    def fail(module: Any, inputs: Any) -> None:
        handle.remove()
        raise error("from inside")

    with Engine.open(llama, **BACKENDS[backend]) as engine:
        handle = engine.model.model.layers[3].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error, match="from inside"):
            engine.model(input_ids=ids(1, 4))
        check(engine)
        assert engine.report().offloaded_bytes == meta_bytes(engine.model) > 0  # nothing is left bound
        assert differing(logits(engine.model), plain_logits(llama)) == []
        assert engine.report().counters.slot_misses <= 1


def test_a_read_error_in_the_middle_of_a_pass(llama: Path, streamed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(logits(streamed.model), plain_logits(llama)) == []
    wait_idle(streamed)
    packing = streamed._backend.packings[3]
    bad = packing.reads[-1]
    real, failed = DiskReader._pread, threading.Event()

    def fail_once(self: DiskReader, file: Any, into: memoryview, offset: int) -> int:
        if offset == bad.offset and not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        return real(self, file, into, offset)

    monkeypatch.setattr(DiskReader, "_pread", fail_once)
    with pytest.raises(ReadError, match="Input/output error") as caught:
        logits(streamed.model)
    assert caught.value.file == str(llama / "model.safetensors")
    assert caught.value.offset == bad.offset
    check(streamed)
    assert differing(logits(streamed.model), plain_logits(llama)) == []
    assert streamed.report().counters.read_errors == 1


def test_two_models_interleaved(root: Path, llama: Path, streamed: Engine) -> None:
    other = shared(root, "gpt2")
    with Engine.open(other, **groups(2, 1, 1)) as second, torch.inference_mode():
        outputs = [engine.model(input_ids=ids(1, 9, seed=8), logits_to_keep=1) for engine in (streamed, second)]
        for step in range(3):
            for number, (engine, directory) in enumerate(((streamed, llama), (second, other))):
                token = outputs[number].logits[:, -1:].argmax(-1)
                outputs[number] = engine.model(input_ids=token, cache=outputs[number].cache)
                assert torch.equal(outputs[number].logits, plain_logits(directory)[f"decode {step}"])
        for engine in (streamed, second):
            assert engine.report().offloaded_bytes > 0
            assert engine.report().counters.slot_misses == 0


@pytest.mark.parametrize("backend", ["memory 50%", "uva all"])
def test_two_threads_on_one_model(llama: Path, backend: str) -> None:
    expected = plain_logits(llama)
    with Engine.open(llama, **BACKENDS[backend]) as engine:
        jobs = [lambda: [differing(logits(engine.model), expected) for _ in range(3)]] * 2
        assert in_threads(*jobs) == [[[]] * 3] * 2
        assert engine.report().offloaded_bytes > 0
        assert engine.report().counters.slot_misses == 0
        check(engine)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-")]


@pytest.mark.parametrize("backend", ["memory 50%", "uva all"])
def test_closed(llama: Path, backend: str) -> None:
    before = len(reader_threads())
    engine = Engine.open(llama, **BACKENDS[backend])
    assert engine.report().offloaded_bytes > 0
    assert len(reader_threads()) > before
    for _ in range(2):
        engine.close()
        assert len(reader_threads()) == before
        with pytest.raises(ClosedError):
            engine.model(input_ids=ids(1, 3))
    assert engine.report().offloaded_bytes > 0  # it still tells


def test_a_resident_model_goes_on_after_close(llama: Path) -> None:
    with Engine.open(llama) as engine:
        pass
    assert differing(logits(engine.model), plain_logits(llama)) == []


def test_a_model_that_is_forgotten_ends_its_threads(llama: Path) -> None:
    before = len(reader_threads())
    model, _ = headrace.load(llama, offload=OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1)))
    assert len(reader_threads()) > before
    del model
    gc.collect()
    assert len(reader_threads()) == before


def test_a_failed_open_leaves_no_threads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(reader_threads())
    with pytest.raises(BudgetTooSmall):
        Engine.open(llama, memory="1MiB")
    assert len(reader_threads()) == before

    def fail(self: DiskReader, file: Any, into: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskReader, "_pread", fail)
    with pytest.raises(ReadError):
        Engine.open(llama)
    assert len(reader_threads()) == before


# --- what moves, in bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pass_reads_what_is_offloaded_and_writes_nothing(root: Path, architecture: str) -> None:
    directory = shared(root, architecture)
    files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(directory.iterdir())}
    with Engine.open(directory, weights_share=0.6) as engine, torch.inference_mode():
        engine.model(input_ids=ids(1, 3))
        wait_idle(engine)
        before = engine.report()
        for _ in range(3):
            engine.model(input_ids=ids(1, 1))
        wait_idle(engine)
        after = engine.report()
        runs = sum(len(packing.reads) for packing in engine._backend.packings)
    streamed_bytes = before.offloaded_bytes - before.looked_up_bytes
    read = (after.counters.read_bytes - before.counters.read_bytes) / 3
    assert streamed_bytes > 0
    assert streamed_bytes <= read <= 1.02 * streamed_bytes + 2 * 4096 * runs + 2 * 4096  # and the row of the token
    assert after.bound.moved_bytes == streamed_bytes
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(directory.iterdir())} == files


@pytest.mark.parametrize("backend", ["memory 50%", "groups 2/1/1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3-moe"])
def test_tensors_are_aligned(root: Path, architecture: str, dtype: torch.dtype, backend: str) -> None:
    """In slots and residents alike; after a bias of 418 numbers the next tensor would not be by itself.

    Where that changes no bit, of 16-bit floats, tensors lie in their page as they do in the file, also in both.
    """
    changes = {"n_inner": 418} if architecture == "gpt2" else {"vocab_size": 517}
    directory = shared(root, architecture, dtype, **changes)
    with Engine.open(directory, **BACKENDS[backend]) as engine:
        assert_streamed(engine, directory, dtype)
        in_slots = [parameter for views in engine._backend._views.values() for parameter in views]
        resident = [parameter for parameter in engine.model.parameters() if not parameter.is_meta]
        assert len({parameter.data_ptr() for parameter in in_slots}) >= LAYERS / 2
        assert len(resident) > LAYERS
        at_64 = [p.data_ptr() % 64 == 0 for p in (*in_slots, *resident)]
        assert all(at_64) == (dtype == torch.float32)
        stored = store.open_checkpoint(directory).tensors
        in_page = {tensor.segment.offset % 4096 for tensor in stored.values()}
        others = [p for p in (*in_slots, *resident) if p.data_ptr() % 64 and p.data_ptr() % 4096 not in in_page]
        assert others == []


# --- what a model answers -----------------------------------------------------------------------------------------


def test_what_needs_all_weights_is_refused(streamed: Engine, tmp_path: Path) -> None:
    model = streamed.model
    for act in (
        model.state_dict,
        lambda: model.save_pretrained(tmp_path / "saved"),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        model.half,
        lambda: model.to(torch.float32),
    ):
        with pytest.raises(OffloadedWeightsError):
            act()
    assert not (tmp_path / "saved").exists()
    assert model.to("cpu") is model
    assert model.device == torch.device("cpu")


def test_the_class_is_the_one_of_transformers(llama: Path, streamed: Engine) -> None:
    from transformers import LlamaForCausalLM

    assert isinstance(streamed.model, LlamaForCausalLM)
    assert type(streamed.model).__name__ == "LlamaForCausalLM"
    assert streamed.model.dtype == torch.bfloat16
    assert streamed.model.training is False
    assert streamed.model.num_parameters() == plain(llama).num_parameters()


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen3-moe", "gpt2"])
def test_a_resident_model_can_do_everything(root: Path, architecture: str, tmp_path: Path) -> None:
    directory = shared(root, architecture)
    expected = plain(directory).state_dict()
    model, tokenizer = headrace.load(directory)
    assert headrace.report(model).offloaded_bytes == 0
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert differing(logits(plain(tmp_path / "saved")), plain_logits(directory)) == []
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert differing(logits(twin), plain_logits(directory)) == []
        with pytest.raises(NotLoadedHere):
            headrace.report(twin)
    assert model.float().dtype == torch.float32


# --- the report ---------------------------------------------------------------------------------------------------


def test_the_report_is_plain_data(streamed: Engine) -> None:
    streamed.model(input_ids=ids(1, 3))
    report = streamed.report()
    data = json.loads(json.dumps(report.to_json()))
    assert data["offloaded_bytes"] == report.offloaded_bytes > 0
    assert data["counters"]["passes"] == 1
    assert data["read_bytes_per_pass"] == report.read_bytes_per_pass > 0
    assert data["bound"]["seconds"] > 0
    assert data["plan"]["memory"]["total_bytes"] == report.plan.memory.total_bytes
    fields = {field.name for field in dataclasses.fields(report)}
    assert set(data) == fields | {"bound", "read_bytes_per_pass"}


def test_a_report_of_a_model_that_is_not_ours(llama: Path) -> None:
    with pytest.raises(NotLoadedHere, match="LlamaForCausalLM"):
        headrace.report(plain(llama))
    with pytest.raises(NotLoadedHere, match="int"):
        headrace.report(3)


# --- load ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> int:
    """The process of the tests grows; here its size stays what it is, so that budgets can be compared."""
    monkeypatch.setattr(machine, "resident_bytes", lambda: 400 * 2**20)
    return 400 * 2**20


def budget(directory: Path, share: float) -> int:
    with Engine.open(directory, weights_share=share) as engine:
        assert engine.memory_bytes is not None
        return engine.memory_bytes


def test_a_budget_decides_what_stays(llama: Path, steady: int) -> None:
    reports = []
    for share in (0.5, 0.9):
        model, _ = headrace.load(llama, memory=budget(llama, share))
        report = headrace.report(model)
        assert differing(logits(model), plain_logits(llama)) == []
        assert report.requested_bytes is not None
        assert report.plan.memory.total_bytes <= report.requested_bytes
        assert report.resident_bytes + report.ring_bytes <= share * (report.resident_bytes + report.offloaded_bytes)
        assert headrace.report(model).counters.read_bytes > 0
        model.headrace_engine.close()
        reports.append(report)
    small, large = reports
    assert small.resident_bytes < large.resident_bytes
    assert small.offloaded_bytes > large.offloaded_bytes > 0
    model, tokenizer = headrace.load(llama, memory="64GiB")
    assert headrace.report(model).offloaded_bytes == 0
    assert headrace.report(model).requested_bytes == 64 * 2**30
    assert tokenizer.decode(tokenizer("the weights").input_ids) == "the weights"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_budget_that_is_too_small_is_refused_and_the_suggested_one_works(
    root: Path, architecture: str, steady: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shared(root, architecture)
    labels: list[str] = []
    real = DiskReader.submit

    def submit(self: DiskReader, reads: Any, address: int, label: str, **options: Any) -> Any:
        labels.append(label)
        return real(self, reads, address, label, **options)

    monkeypatch.setattr(DiskReader, "submit", submit)
    with pytest.raises(BudgetTooSmall) as caught:
        headrace.load(directory, memory=steady)
    assert set(labels) <= {"probe"}  # no weight was read
    assert caught.value.memory_bytes == steady < caught.value.needed_bytes
    model, _ = headrace.load(directory, memory=caught.value.needed_bytes)
    report = headrace.report(model)
    assert report.plan.memory.total_bytes <= caught.value.needed_bytes
    assert report.offloaded_bytes == meta_bytes(model) >= 0
    assert differing(logits(model), plain_logits(directory)) == []
    model.headrace_engine.close()


@pytest.mark.parametrize("arguments", [groups(1, 1, 1), mapped(1.0)], ids=["groups", "uva"])
def test_settings_and_a_budget_together(llama: Path, steady: int, arguments: dict[str, Any]) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        headrace.load(llama, memory=steady, **arguments)
    model, _ = headrace.load(llama, memory=caught.value.needed_bytes, **arguments)
    assert headrace.report(model).offloaded_bytes == meta_bytes(model) > 0
    assert differing(logits(model), plain_logits(llama)) == []
    model.headrace_engine.close()


def test_opening_tells_what_it_does(llama: Path) -> None:
    plans: list[Any] = []
    progress: list[tuple[str, int, int]] = []
    contexts: list[Any] = []

    def context(tokenizer: Any, longest: int | None) -> tuple[int, int]:
        contexts.append((tokenizer.vocab_size, longest))
        return 64, 32

    with Engine.open(
        llama,
        weights_share=0.5,
        context=context,
        tracing=True,
        on_plan=lambda plan: plans.append((plan, list(progress))),
        on_progress=lambda *step: progress.append(step),
    ) as engine:
        assert engine.report().offloaded_bytes > 0
        assert plans == [(engine.plan, [])]  # before any weight is read
        assert contexts == [(engine.tokenizer.vocab_size, 256)]
        label, done, total = progress[-1]
        assert (label, done) == ("loading weights", total)
        engine.model(input_ids=ids(1, 3))
        categories = {span.category for span in engine.metrics.spans()}
    assert {"pass", "run", "read"} <= categories


# --- real weights -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headrace import sources

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return sources.resolve(sources.demo_gguf())


def test_real_weights_answer_the_same_from_disk(smollm: Path) -> None:
    answers = []
    for arguments in ({}, {"weights_share": 0.5}):
        with Engine.open(smollm, context=64, **arguments) as engine:
            chat = [{"role": "user", "content": "What is the capital of France?"}]
            inputs = engine.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            output = engine.model.generate(**inputs, max_new_tokens=16, do_sample=False)
            answers.append(output[0].tolist())
            report = engine.report()
            text = engine.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answers[0] == answers[1]
    assert "Paris" in text
    assert report.offloaded_bytes == meta_bytes(engine.model) > 0.4 * 269e6
    assert report.counters.read_bytes > (report.counters.passes - 1) * report.plan.bound.moved_bytes > 0
    assert report.counters.slot_misses == 0


def test_rates_that_were_kept_serve_unless_they_were_measured_while_others_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = fakes.machine(compute_bytes_per_s=1e10)
    assert _with_what_was_kept(now) == now, "nothing was kept"
    slower = dataclasses.replace(now, compute_bytes_per_s=5e9, layer_overhead_s=1e-3)
    machinefile.write(slower, machinefile.cache_file())
    made = _with_what_was_kept(now)
    assert (made.compute_bytes_per_s, made.layer_overhead_s) == (5e9, 1e-3)
    machinefile.write(dataclasses.replace(slower, compute_bytes_per_s=1e9), machinefile.cache_file())
    assert _with_what_was_kept(now) == now
    machinefile.write(dataclasses.replace(slower, cores=now.cores + 1), machinefile.cache_file())
    assert _with_what_was_kept(now) == now
