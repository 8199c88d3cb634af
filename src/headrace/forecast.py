"""A plan before anything is loaded: from a path, a config or a hub id to what would run, and how fast. Loads no weight.

Wires the light rooms. torch is asked only for the size of an architecture that no family here has.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import datasheets, errors, machine, machinefile, probing, sources, store
from headrace.config import OffloadConfig
from headrace.core import CHUNK_BYTES, READER_THREADS, Machine, ModelShape, Plan, StoredTensor
from headrace.importing.header import is_gguf, read_header
from headrace.planner import (
    DEFAULT_CONTEXT,
    MARGIN_BYTES,
    MEMORY_SHARE,
    Demand,
    least_memory_bytes,
    plan,
    resident_memory_bytes,
)
from headrace.settings import require
from headrace.sizing import families, gguf, stored
from headrace.sizing.fields import Fields, UnknownFamily
from headrace.sizing.outline import Outline
from headrace.sizing.quantized import UnknownQuantization, foreign, quantize
from headrace.sizing.scheme import QUANT_METHOD
from headrace.sizing.shape import model_shape

STAGING_BYTES = READER_THREADS * CHUNK_BYTES
"""Of the engine's reader."""
BASELINE_BYTES = 372 * 2**20
"""Interpreter, torch, transformers, before a tokenizer is loaded: measured (docs/log.md)."""
TOKENIZER_FACTOR = 7.8
"""Bytes in memory for one byte of tokenizer.json: measured (docs/log.md)."""
HOST_BASELINE_BYTES = 3 * 2**30
"""Interpreter and libraries beside an accelerator. An assumption: not measured yet."""
ANSWER_TOKENS = 256
"""Of the context, what `headrace run` leaves for the answer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan for, as far as it is known without its weights."""

    name: str
    fields: Fields
    dtype: str
    outline: Outline | None
    """As it is stored; None if only torch knew the architecture."""
    shape: ModelShape
    source: str
    """Where the sizes come from, in words."""
    notes: tuple[str, ...]
    tokenizer_bytes: int

    @property
    def quantization(self) -> str | None:
        """The method that the config names, or None."""
        settings = self.fields.values.get("quantization_config")
        return str(settings.get("quant_method", "unnamed")) if isinstance(settings, dict) else None

    @property
    def longest(self) -> int | None:
        """The longest sequence that the config allows, if it says."""
        value = self.fields.text.values.get("max_position_embeddings")
        return value if isinstance(value, int) and value > 0 else None


# --- the model ------------------------------------------------------------------------------------------------------


def read_subject(model: str, *, trust_remote_code: bool = False) -> Subject:
    """The model that `model` means: a directory, a config.json, a .gguf file, a hub id. No weight is read.

    Raises: UserError, CheckpointError.
    """
    path = Path(os.path.expanduser(model))
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return _from_gguf(path)
    if path.is_file() and path.suffix == ".json" and path.name != store.INDEX_NAME:
        return _from_config(path, model, {}, trust_remote_code)
    directory = path if path.is_dir() else path.parent if path.is_file() else sources.config_directory(model)
    tensors, note = _headers(directory)
    subject = subject_in(directory, model, tensors, trust_remote_code=trust_remote_code)
    return dataclasses.replace(subject, notes=(*subject.notes, *note))


def subject_in(
    directory: Path, name: str, tensors: Mapping[str, StoredTensor], *, trust_remote_code: bool = False
) -> Subject:
    """The model whose config is in `directory`, and whose headers list `tensors`. Raises: UserError."""
    subject = _from_config(directory / "config.json", name, tensors, trust_remote_code)
    shape = dataclasses.replace(subject.shape, copied_share=stored.copied_share(tensors.values()))
    return dataclasses.replace(subject, shape=shape, tokenizer_bytes=_tokenizer_bytes(directory))


def _headers(directory: Path) -> tuple[Mapping[str, StoredTensor], tuple[str, ...]]:
    """What the checkpoint's headers list; nothing if the weights are not here."""
    try:
        return store.open_checkpoint(directory).tensors, ()
    except errors.NoWeights:
        return {}, ()
    except errors.MissingShard as error:
        return {}, (f"{Path(error.shard).name} is not here, so the sizes are those of the config",)


def _tokenizer_bytes(directory: Path) -> int:
    try:
        return (directory / "tokenizer.json").stat().st_size
    except OSError:
        return 0


def _from_config(path: Path, name: str, tensors: Mapping[str, StoredTensor], trust_remote_code: bool) -> Subject:
    fields = Fields(sources.read_config(path.parent, name, path.name), name)
    dtype = stored.stored_dtype(tensors.values()) if tensors else fields.dtype or "float32"
    notes = () if tensors or fields.dtype else ("the config names no dtype: float32 is assumed",)
    source = "the config and the headers, which agree" if tensors else "the config"
    try:
        outline = quantize(families.outline(fields), fields, dtype)
        if tensors and (why := stored.unlike(outline, tensors, dtype)):
            raise UnknownFamily(why)
    except (UnknownFamily, UnknownQuantization) as unknown:
        return _without_family(path, name, fields, dtype, tensors, str(unknown), trust_remote_code)
    stuck = stored.converted(outline, tensors, dtype) if tensors else frozenset()
    return Subject(name, fields, dtype, outline, model_shape(outline, fields, dtype, stuck), source, notes, 0)


def _without_family(
    path: Path,
    name: str,
    fields: Fields,
    dtype: str,
    tensors: Mapping[str, StoredTensor],
    why: str,
    trust_remote_code: bool,
) -> Subject:
    """Sizes from the headers; without weights from the model's own definition, which takes torch."""
    if tensors:
        outline = stored.stored_outline(tensors)
        notes = (f"sizes and layers are those of the checkpoint's headers: {why}",)
        return Subject(name, fields, dtype, outline, model_shape(outline, fields, dtype), "the headers", notes, 0)
    if any(importlib.util.find_spec(package) is None for package in ("torch", "transformers", "accelerate")):
        raise errors.UnsupportedModel(
            model=name,
            reason=f"{why}, and without weights there are no headers to read",
            suggestion="Install headrace[engine], so that transformers can be asked, or give a directory with weights.",
        )
    from headrace.model import shape_without_weights

    shape = shape_without_weights(path.parent, fields, trust_remote_code=trust_remote_code)
    notes = (f"sizes are those of transformers' own definition: {why}",)
    return Subject(name, fields, dtype, None, shape, "transformers on the meta device", notes, 0)


def _from_gguf(path: Path) -> Subject:
    header = read_header(path)
    rows = header.rows
    config = gguf.config_of(header.architecture, header.metadata, rows, header.vocabulary_size)
    if why := gguf.why_impossible(config):
        raise errors.CorruptGguf(file=str(path), reason=why)
    fields = Fields(config, str(path))
    dtype = gguf.dtype_of(rows)
    own = gguf.outline_of(rows)
    notes = [f"a .gguf file is imported once, as {dtype}: {own.nbytes(dtype)} bytes of weights"]
    try:
        outline = families.outline(fields)
        if outline.nbytes(dtype) != own.nbytes(dtype):
            raise UnknownFamily("its tensors are not those that its metadata describes")
    except UnknownFamily as unknown:
        outline = own
        notes.append(f"sizes and layers are those of the file's header: {unknown}")
    shape = model_shape(outline, fields, dtype)
    # The vocabulary becomes a tokenizer.json; the header holds it, and little else.
    return Subject(str(path), fields, dtype, outline, shape, "the .gguf header", tuple(notes), 2 * header.data_offset)


# --- the machine ----------------------------------------------------------------------------------------------------


def machine_for(file: Path | None, device: str | None) -> probing.Probed:
    """The machine to plan for: from a file, as `headrace machine` measured it here, or estimated; with its device.

    `device` is cpu, cuda:0, a GPU by its data sheet, or any: what the machine has.

    Raises: UnusableMachineFile, InvalidSetting.
    """
    if file is not None:
        probed = probing.Probed(machinefile.read(file), (f"the machine is that of {str(file)!r}",))
    elif machinefile.cache_file().exists():
        measured = machinefile.read(machinefile.cache_file())
        here = dataclasses.replace(measured, memory_bytes=machine.available_bytes())
        probed = probing.Probed(here, ("the machine is this one, as `headrace machine` measured it",))
    else:
        probed = probing.estimate()
    return _with_device(probed, device)


def _with_device(probed: probing.Probed, device: str | None) -> probing.Probed:
    here = probed.machine
    if device == "any":
        return probed
    if device is None or device == "cpu":
        return dataclasses.replace(probed, machine=dataclasses.replace(here, accelerator=None))
    if device == "cuda" or device.startswith("cuda:"):
        if here.accelerator is None:
            raise errors.InvalidSetting(
                setting="--device",
                value=repr(device),
                allowed="a device that this machine has, as far as it was measured (it has none)",
                suggestion=f"cpu, or a GPU by its data sheet ({', '.join(datasheets.known_names())})",
            )
        return probed
    accelerator = datasheets.data_sheet(device).accelerator()
    note = f"{accelerator.name}: figures of the {accelerator.source}"
    return probing.Probed(dataclasses.replace(here, accelerator=accelerator), (*probed.notes, note))


# --- the plan -------------------------------------------------------------------------------------------------------


def demand_for(
    subject: Subject,
    here: Machine,
    *,
    memory: int | None,
    host_memory: int | None,
    context: int | None,
    batch: int,
    fast: bool = False,
) -> Demand:
    """What running takes, as the engine counts it. Raises: InvalidSetting."""
    require(batch >= 1, "--batch", batch, "at least 1", "1")
    longest = subject.longest
    tokens = context if context is not None else min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    require(tokens >= 1, "--context", tokens, "at least 1", str(DEFAULT_CONTEXT))
    most = f"at most {longest} for this model"
    require(longest is None or tokens <= longest, "--context", tokens, most, str(longest))
    common: dict[str, Any] = {
        "staging_bytes": STAGING_BYTES,
        "context_tokens": tokens,
        "prefill_tokens": max(1, tokens - min(ANSWER_TOKENS, tokens // 2)),
        "batch": batch,
        "margin_bytes": MARGIN_BYTES,
    }
    if here.accelerator is None:
        needless = host_memory is None
        require(
            needless, "--host-memory", "given without an accelerator", "given with --device", "together with --device"
        )
        baseline = BASELINE_BYTES + int(TOKENIZER_FACTOR * subject.tokenizer_bytes)
        budget = memory if memory is not None else int(here.memory_bytes * MEMORY_SHARE)
        return Demand(memory_bytes=budget, baseline_bytes=baseline, fast_rows=fast, **common)
    require(not fast, "--fast", "given", "left out with --device: it is for the processor", "without --device")
    return Demand(
        memory_bytes=memory if memory is not None else int(here.accelerator.memory_bytes * MEMORY_SHARE),
        baseline_bytes=datasheets.CONTEXT_BYTES,
        has_accelerator=True,
        host_bytes=host_memory if host_memory is not None else int(here.memory_bytes * MEMORY_SHARE),
        host_baseline_bytes=HOST_BASELINE_BYTES,
        **common,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Another budget, and what it would give: planned, not guessed."""

    memory_bytes: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan, and what more memory would give."""

    subject: Subject
    machine: Machine
    demand: Demand
    plan: Plan
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def forecast(subject: Subject, probed: probing.Probed, demand: Demand, config: OffloadConfig) -> Forecast:
    """Raises: BudgetTooSmall, HostBudgetTooSmall, NothingOffloaded, UnsupportedModel."""
    if (method := subject.quantization) not in (None, QUANT_METHOD):
        raise foreign(subject.name, str(method))
    here = probed.machine
    made = plan(subject.shape, here, demand, config)
    steps = tuple(
        Step(budget, plan(subject.shape, here, dataclasses.replace(demand, memory_bytes=budget), config))
        for budget in _larger_budgets(subject.shape, demand, made)
    )
    return Forecast(subject, here, demand, made, steps, (*subject.notes, *probed.notes))


def _larger_budgets(shape: ModelShape, demand: Demand, made: Plan) -> list[int]:
    """A few rounded budgets between this one and the one that holds everything, which is the last."""
    if made.backend == "resident" or demand.memory_bytes is None:
        return []
    last = resident_memory_bytes(shape, demand)
    unit = 2**30 if last >= 4 * 2**30 else 2**28
    ways = {(demand.memory_bytes + (last - demand.memory_bytes) * part // 4) // unit * unit for part in (1, 2, 3)}
    return [*sorted(budget for budget in ways if demand.memory_bytes < budget < last), last]


def curve(forecast: Forecast, config: OffloadConfig, points: int = 40) -> list[Step]:
    """Plans from the smallest budget that works to one that holds everything, evenly spaced."""
    shape, demand = forecast.subject.shape, forecast.demand
    least, most = least_memory_bytes(shape, demand), resident_memory_bytes(shape, demand)
    budgets = [least + (most - least) * number // points for number in range(points + 1)]
    return [
        Step(budget, plan(shape, forecast.machine, dataclasses.replace(demand, memory_bytes=budget), config))
        for budget in dict.fromkeys(budgets)
    ]


def to_json(made: Forecast) -> dict[str, Any]:
    """Every figure as plain data."""
    document = {
        "model": made.subject.name,
        "sizes_from": made.subject.source,
        "weight_bytes": made.subject.shape.weight_bytes,
        "dtype": made.subject.dtype,
        "notes": list(made.notes),
        "machine": machinefile.to_json(made.machine),
        "demand": dataclasses.asdict(made.demand),
        "plan": plan_json(made.plan),
        "steps": [{"memory_bytes": step.memory_bytes, **_speed(step.plan)} for step in made.steps],
    }
    return json.loads(json.dumps(document))  # type: ignore[no-any-return]


def plan_json(made: Plan) -> dict[str, Any]:
    """A plan as plain data, with what follows from its fields."""
    data = dataclasses.asdict(made)
    data["bound"] = made.bound.to_json()
    data["prefill"] = None if made.prefill is None else made.prefill.to_json()
    data["memory"]["total_bytes"] = made.memory.total_bytes
    if made.host is not None:
        data["host"]["total_bytes"] = made.host.total_bytes
    return data | _speed(made)


def _speed(made: Plan) -> dict[str, Any]:
    return {
        "tokens_per_s": made.tokens_per_s,
        "seconds_to_first_token": made.seconds_to_first_token,
        "limited_by": made.bound.limited_by,
        "moved_bytes_per_pass": made.bound.moved_bytes,
        "backend": made.backend,
        "total_bytes": made.memory.total_bytes,
    }
