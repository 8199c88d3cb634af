"""Every exception class of Headrace. Callers pass facts; the words live here. Below it: `units`, `error_ids`.

    HeadraceError
    ├── UserError (also a ValueError)      what was asked for cannot be done as asked
    │   ├── CannotOffload                  a module without blocks, or already offloaded
    │   ├── ConfigError                    a flag, a field, a size
    │   ├── ModelNotFound ...              a path or a hub id
    │   ├── BudgetError                    the memory asked for does not hold what was asked for
    │   └── RequestError                   a request to the server asks for what it cannot have
    ├── CheckpointError                    the files are not what a checkpoint should be
    ├── ReadError (also an OSError)        a read failed while weights were moving
    ├── WriteError (also an OSError)       an import could not be written
    ├── SpillFailed (also an OSError)      the file for weights without a checkpoint could not be written
    ├── NotWritable (also an OSError)      the cache for imports cannot be written
    ├── OutputFailed (also an OSError)     an answer or a trace could not be written
    ├── MissingPackage (also an ImportError)
    ├── EndpointFailed                 a model that was to write about errors does not answer
    ├── DemoFailed                         the demo's two runs disagree
    ├── BenchmarkFailed                    a file that a benchmark needs could not be made
    ├── NotComparable                      runs of a benchmark that were not made alike
    ├── CannotCap                          a memory limit for one process cannot be set here
    ├── GenerationFailed                   a pass of the server failed for a reason that nobody foresaw
    ├── OffloadedWeightsError (also a RuntimeError)   weights that live on disk were asked for as if they did not
    ├── StillRunning (also a RuntimeError)     an offloaded module was closed or saved by its own forward
    ├── WeightChanged (also a RuntimeError)    a block wrote to a weight that is only lent to it
    ├── GradientsNeeded (also a RuntimeError)  a backward pass through weights that move
    ├── CannotCapture (also a RuntimeError)    a graph of what comes from disk
    ├── OutOfDeviceMemory (also a RuntimeError)   an accelerator has no room for what moves
    └── ClosedError (also a RuntimeError)  a model was used after its engine was closed

Each class is a record: its annotated fields are the facts, `template` and `remedy` are filled from them with
`str.format`; `{field:size}` prints bytes as GiB, `{field:flag}` as a value to paste after a flag, `{field:list}` a
sequence with commas, `{field:lines}` each item on its own line. `example` holds facts that a test renders and lints.
"""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, dataclass_transform

from headrace import units
from headrace.error_ids import page_id


class _Words(string.Formatter):
    """`str.format` with the specs `size`, `flag`, `list` and `lines`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":
            return units.format_bytes(value)
        if format_spec == "flag":
            return units.format_flag_bytes(value)
        if format_spec == "list":
            return ", ".join(str(item) for item in value) if value else "nothing"
        if format_spec == "lines":
            return "\n".join(str(item) for item in value)
        return str(super().format_field(value, format_spec))


@dataclass_transform(kw_only_default=True)
class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose."""

    template: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    example: ClassVar[Mapping[str, Any]] = {}
    exit_code: ClassVar[int] = 2
    fields: ClassVar[tuple[str, ...]] = ()
    """Names of the facts: the annotations of the class and of those above it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not dataclasses: they compile code for each class, which was a tenth of the time of `headrace check`.
        cls.fields = (*cls.fields, *inspect.get_annotations(cls))

    def __init__(self, **facts: Any) -> None:
        assert self.template, f"{type(self).__name__} is a branch of the tree, not an error to raise"
        if facts.keys() != set(self.fields):
            raise TypeError(f"{type(self).__name__} takes the facts {self.fields}, not {tuple(facts)}")
        for name, fact in facts.items():
            setattr(self, name, fact)
        super().__init__(self.message)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts the caller passed, by field name."""
        return {name: getattr(self, name) for name in self.fields}

    @property
    def what(self) -> str:
        """What happened, with numbers."""
        return _Words().format(self.template, **self.facts)

    @property
    def fix(self) -> str:
        """What to do, with numbers."""
        return _Words().format(self.remedy, **self.facts)

    @property
    def message(self) -> str:
        """What happened, then what to do."""
        return f"{self.what}\n{self.fix}" if self.remedy else self.what

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial(type(self), **self.facts), ())

    @classmethod
    def error_id(cls) -> str:
        """16 hex digits that stay the same until the class is renamed or its template reworded.

        It is the id that the error reference gives to the page of the class.
        """
        words = _without_fields(cls.template)
        if not any(character.isalnum() for character in words):
            words = _without_fields(f"{cls.template}\n{cls.remedy}")
        return page_id("headrace", cls.__name__, " ".join(words.split()))


def _without_fields(template: str) -> str:
    """The words of a template, `{}` for each field."""
    parts = string.Formatter().parse(template)
    return "".join(literal + ("{}" if name is not None else "") for literal, name, _, _ in parts)


def concrete_errors(root: type[HeadraceError] = HeadraceError) -> Iterator[type[HeadraceError]]:
    """Every class below `root` that can be raised (it has a template)."""
    for child in root.__subclasses__():
        if child.template:
            yield child
        yield from concrete_errors(child)


def error_with_id(error_id: str) -> type[HeadraceError] | None:
    """Our own class with this id. Subclasses that others have made are not ours to describe."""
    return next((kind for kind in _our_own() if kind.error_id() == error_id), None)


def error_with_name(name: str) -> type[HeadraceError] | None:
    """Our own class with this name."""
    return next((kind for kind in _our_own() if kind.__name__ == name), None)


def _our_own() -> Iterator[type[HeadraceError]]:
    return (kind for kind in concrete_errors() if kind.__module__ == __name__)


class Reason(ValueError):
    """Why something cannot be used, on its way to the `reason` of an error; never leaves the room that raised it."""


# --- what was asked for -------------------------------------------------------------------------------------------


class UserError(HeadraceError, ValueError):
    """What was asked for cannot be done as asked."""


class ConfigError(UserError):
    """A flag or a config field has a value that cannot be used."""


class CannotOffload(UserError):
    """The module given to offload() has nothing that can move, or not as asked."""

    reason: str
    suggestion: str
    template = "This module cannot be offloaded as asked: {reason}."
    remedy = "{suggestion}"
    example = {
        "reason": "it has no list of blocks named 'layer'",
        "suggestion": "Its lists are: layers, encoder.layers. Name one of them, or pass the blocks themselves.",
    }


class InvalidSize(ConfigError):
    """A size is negative, zero, without a unit or not a size."""

    setting: str
    value: str
    reason: str
    suggestion: str
    template = "{setting} {value!r} is not a usable size: {reason}."
    remedy = "Write {setting} {suggestion} (GiB is 2**30 bytes, GB is 10**9)."
    example = {
        "setting": "--memory",
        "value": "3",
        "reason": "it has no unit",
        "suggestion": "3GiB",
    }


class InvalidSetting(ConfigError):
    """A setting is outside of what it may be."""

    setting: str
    value: str
    allowed: str
    suggestion: str
    template = "{setting} is {value}, but it must be {allowed}."
    remedy = "Use {setting} {suggestion}."
    example = {"setting": "--top-p", "value": "1.5", "allowed": "above 0 and at most 1", "suggestion": "0.95"}


class UnknownSetting(ConfigError):
    """A config names a field that does not exist."""

    setting: str
    nearest: str
    known: Sequence[str]
    template = "There is no setting {setting!r}."
    remedy = "Did you mean {nearest!r}? The settings are: {known:list}."
    example = {"setting": "offload_groupsize", "nearest": "offload_group_size", "known": ["offload_group_size"]}


class InvalidOffloadConfig(ConfigError):
    """The offload settings contradict each other."""

    problems: Sequence[str]
    """Each begins with the sentence that users search for."""
    remedies: Sequence[str]
    """Complete flag lines; each was checked to be valid."""
    template = "{problems:lines}"
    remedy = "Flags that work instead:\n{remedies:lines}"
    example = {
        "problems": [
            "offload_num_in_group (8) must be <= offload_group_size (4): --offload-num-in-group 8 layers cannot "
            "be taken out of a group of --offload-group-size 4."
        ],
        "remedies": [
            "--offload-group-size 4 --offload-num-in-group 4",
            "--offload-group-size 8 --offload-num-in-group 8",
        ],
    }


class NothingOffloaded(ConfigError):
    """An offload was requested, and nothing in this model answers to it."""

    request: str
    reason: str
    suggestion: str
    template = "{request} would offload nothing: {reason}."
    remedy = "Use {suggestion}."
    example = {
        "request": "--offload-group-size 100",
        "reason": "the model has 32 layers, and layer i is offloaded only if i % 100 >= 99",
        "suggestion": "--offload-group-size 32 to offload the last layer, or 4 to offload every fourth",
    }


class ModelNotFound(UserError):
    """MODEL is neither a file, a directory nor a model that the hub has in its cache or can give."""

    model: str
    reason: str
    template = "{model!r} is not here: {reason}."
    remedy = (
        "Either give a directory with safetensors files or a .gguf file, or, on a machine that reaches the hub, run "
        "`hf download {model}` first and try again with the same name."
    )
    example = {"model": "org/name", "reason": "no such file or directory, and the hub could not be reached"}


class PathNotFound(UserError):
    """MODEL looks like a path, and nothing is there."""

    path: str
    nearest: str
    template = "{path!r} does not exist."
    remedy = (
        "The nearest thing that exists is {nearest!r}. Give a directory with safetensors files, a .gguf file, or the "
        "name of a model on the hub (org/name)."
    )
    example = {"path": "models/smollm", "nearest": "models"}


class UnsupportedModel(UserError):
    """The model's architecture, or a part of it, cannot be run here."""

    model: str
    reason: str
    suggestion: str
    template = "The model in {model!r} cannot be run: {reason}."
    remedy = "{suggestion}"
    example = {
        "model": "models/new",
        "reason": "transformers 5.24.0 does not know its model_type 'newmodel'",
        "suggestion": "Upgrade with `pip install -U transformers`, or use one of the supported model types.",
    }


class CannotSpeculate(UserError):
    """Drafts were asked for, and with this model, or this draft, they cannot be verified."""

    asked: str
    model: str
    reason: str
    suggestion: str
    template = "--speculate {asked} does not work for {model!r}: {reason}."
    remedy = "{suggestion}"
    example = {
        "asked": "lookup",
        "model": "models/mamba",
        "reason": "it keeps a state that no draft can be taken out of again",
        "suggestion": "Leave it out, or pass --speculate off.",
    }


class BadBatchLine(UserError):
    """A line of a file of requests is no request."""

    file: str
    line: int
    reason: str
    template = "Line {line} of {file!r} is no request: {reason}."
    remedy = (
        'Write one JSON object a line, with "prompt" (a text) or "messages" (objects with "role" and "content"), and '
        'with "id", "max_tokens", "temperature", "top_p" and "seed" where wanted; or OpenAI\'s "custom_id" and "body".'
    )
    example = {"file": "questions.jsonl", "line": 7, "reason": "there is no field 'promt' here"}


class OtherBatch(UserError):
    """The file for answers holds answers to something else."""

    output: str
    line: int
    template = "Line {line} of {output!r} does not answer what is asked now: the questions or the settings are others."
    remedy = "Pass another file with -o; or give the same file of questions, model and settings to go on with it."
    example = {"output": "answers.jsonl", "line": 1}


class ForeignQuantization(UserError):
    """Weights that are quantized in a form that the kernels here do not read as it lies on disk."""

    model: str
    method: str
    suggestion: str
    template = (
        "The weights in {model!r} are quantized in the form {method!r}, and in that form they cannot be streamed."
    )
    remedy = "{suggestion} To plan for an engine that runs them as they are: headrace plan {model} --for vllm."
    example = {
        "model": "models/m-gptq",
        "method": "gptq",
        "suggestion": "Convert them once: headrace quantize models/m-gptq NEW --bits 4 (or 8).",
    }


class OtherLayout(UserError):
    """4-bit weights that were packed for a processor with other vectors."""

    model: str
    layout: str
    here: str
    template = "The 4-bit weights in {model!r} lie in the order {layout!r}, and the kernels here read {here!r}."
    remedy = "Put them in order once, which changes no number: headrace quantize {model} NEW; then use NEW."
    example = {"model": "models/m-int4", "layout": "avx512", "here": "avx2"}


class AlreadyQuantized(UserError):
    """`headrace quantize` was given what it has made."""

    model: str
    bits: int
    template = "{model!r} is quantized to {bits} bits already."
    remedy = "Use it as it is; for other bits or groups quantize the original again."
    example = {"model": "models/m-int4", "bits": 4}


class NothingToQuantize(UserError):
    """A model without a matrix that the kernels of few bits could take."""

    model: str
    reason: str
    template = "Nothing in {model!r} can be quantized: {reason}."
    remedy = "Use it as it is."
    example = {"model": "models/gpt2", "reason": "none of its layers has a linear module"}


class OutputExists(UserError):
    """The directory that should be written is there, and something is in it."""

    path: str
    found: Sequence[str]
    template = "{path!r} is not empty (it has: {found:list}), and nothing is overwritten."
    remedy = "Name a directory that does not exist yet, or remove this one."
    example = {"path": "models/m-int4", "found": ["config.json"]}


class NoDiskSpace(UserError):
    """The result would not fit on the disk; nothing was written."""

    path: str
    needed_bytes: int
    free_bytes: int
    template = "Writing {path!r} takes {needed_bytes:size}, and {free_bytes:size} are free there."
    remedy = "Free some space, or name a directory on another disk. Nothing was written."
    example = {"path": "models/m-int4", "needed_bytes": 2**32, "free_bytes": 2**30}


class ConfigLacksFields(UserError):
    """A config.json does not say how large the model is."""

    model: str
    model_type: str
    missing: Sequence[str]
    wrong: Sequence[str]
    template = (
        "The config of {model!r} (model_type {model_type}) does not say how large the model is: missing is "
        "{missing:list}; unusable is {wrong:list}."
    )
    remedy = "Copy config.json again from where the model came from; all of these fields are needed."
    example = {
        "model": "models/cut/config.json",
        "model_type": "llama",
        "missing": ["hidden_size", "num_hidden_layers"],
        "wrong": ["vocab_size is 'many'"],
    }


class RemoteCodeRefused(UserError):
    """The config asks for code that ships with the checkpoint."""

    model: str
    module: str
    template = "The config of {model!r} asks to run Python code that comes with the checkpoint ({module})."
    remedy = "Read that code; if you trust it, pass --trust-remote-code (in Python: trust_remote_code=True)."
    example = {"model": "models/custom", "module": "modeling_custom.CustomForCausalLM"}


class PickleRefused(UserError):
    """The checkpoint holds pickled weights, which can run code when they are read."""

    model: str
    files: Sequence[str]
    template = "{model!r} holds pickled weights ({files:list}) and no safetensors; pickles can run code when read."
    remedy = (
        "Convert it once, on a machine that may run it: AutoModelForCausalLM.from_pretrained({model!r})"
        ".save_pretrained('converted') writes safetensors; then use the directory 'converted'."
    )
    example = {"model": "models/old", "files": ["pytorch_model.bin"]}


class PromptTooLong(UserError):
    """The prompt, or what a chat's newest question makes of it, does not fit beside the answer."""

    tokens: int
    most_tokens: int
    context_tokens: int
    template = (
        "The prompt has {tokens} tokens; in a context of {context_tokens} there is room for {most_tokens} beside "
        "the answer."
    )
    remedy = "Shorten the prompt; or pass a smaller --max-tokens, or a larger --context if the model allows it."
    example = {"tokens": 3000, "most_tokens": 1792, "context_tokens": 2048}


class NotLoadedHere(UserError):
    """A report was asked of something that `headrace.load` did not make."""

    given: str
    template = "This {given} was not loaded by headrace, so there is nothing to report."
    remedy = "Load it with headrace.load(path, memory=...)."
    example = {"given": "LlamaForCausalLM"}


class UnusableMachineFile(UserError):
    """A machine file that is not one, of another version, or with rates that no machine has."""

    file: str
    reason: str
    template = "The machine file {file!r} cannot be used: {reason}."
    remedy = "Write it again on that machine with `headrace machine --output FILE`."
    example = {"file": "machine.json", "reason": "its version is 0, and this Headrace reads version 1"}


class BudgetError(UserError):
    """The memory asked for does not hold what was asked for."""


class BudgetTooSmall(BudgetError):
    """Even with everything that can move on disk, the process does not fit into the budget."""

    memory_bytes: int
    needed_bytes: int
    baseline_bytes: int
    fixed_bytes: int
    ring_bytes: int
    kv_bytes: int
    working_bytes: int
    template = (
        "A memory budget of {memory_bytes:size} is too small: the least that runs this is {needed_bytes:size} "
        "(interpreter and libraries {baseline_bytes:size}, weights that stay {fixed_bytes:size}, "
        "ring of slots {ring_bytes:size}, KV cache {kv_bytes:size}, activations and staging {working_bytes:size})."
    )
    remedy = "Use --memory {needed_bytes:flag} or more; fewer tokens (--max-tokens) make the KV cache smaller."
    example = {
        "memory_bytes": 2**29,
        "needed_bytes": 3 * 2**29,
        "baseline_bytes": 2**29,
        "fixed_bytes": 2**20,
        "ring_bytes": 2**29,
        "kv_bytes": 2**26,
        "working_bytes": 2**28,
    }


class ModuleBudgetTooSmall(BudgetError):
    """Even with everything that can move elsewhere, the module does not fit into the budget given to offload()."""

    memory_bytes: int
    needed_bytes: int
    fixed_bytes: int
    ring_bytes: int
    staging_bytes: int
    template = (
        "A memory budget of {memory_bytes:size} is too small: the least that runs this module is {needed_bytes:size} "
        "(weights and buffers that stay {fixed_bytes:size}, ring of slots {ring_bytes:size}, "
        "staging {staging_bytes:size})."
    )
    remedy = "Use memory='{needed_bytes:flag}' or more; smaller blocks (blocks=) need a smaller ring."
    example = {
        "memory_bytes": 2**20,
        "needed_bytes": 2**24,
        "fixed_bytes": 2**22,
        "ring_bytes": 2**22,
        "staging_bytes": 2**23,
    }


class HostBudgetTooSmall(BudgetError):
    """The host's budget beside an accelerator does not even hold what passes through it."""

    host_bytes: int
    needed_bytes: int
    baseline_bytes: int
    ring_bytes: int
    staging_bytes: int
    template = (
        "A host budget of {host_bytes:size} is too small: the least that runs this is {needed_bytes:size} (interpreter "
        "and libraries {baseline_bytes:size}, ring of slots {ring_bytes:size}, staging {staging_bytes:size})."
    )
    remedy = "Use --host-memory {needed_bytes:flag} or more; weights that do not fit then stay on disk."
    example = {
        "host_bytes": 2**29,
        "needed_bytes": 2**30,
        "baseline_bytes": 2**29,
        "ring_bytes": 2**28,
        "staging_bytes": 2**24,
    }


class BudgetBeyondMemory(BudgetError):
    """What was planned for a generous budget does not fit into what this process can have; a smaller budget does."""

    planned_bytes: int
    free_bytes: int
    works_bytes: int
    template = (
        "This would take {planned_bytes:size}, and this process can have only {free_bytes:size} here (what is free, or "
        "what its control group allows)."
    )
    remedy = "Use --memory {works_bytes:flag}, or leave it out: weights that do not fit then stay on disk."
    example = {"planned_bytes": 2**35, "free_bytes": 2**34, "works_bytes": 2**33}


class NotEnoughMemory(BudgetError):
    """Not even with everything that can move on disk does the process fit into what it can have."""

    needed_bytes: int
    free_bytes: int
    template = (
        "The least that runs this is {needed_bytes:size}, and this process can have only {free_bytes:size} here (what "
        "is free, or what its control group allows)."
    )
    remedy = (
        "End other programs, raise the limit of the control group, or take a smaller model; fewer tokens "
        "(--max-tokens, --context) make the KV cache smaller."
    )
    example = {"needed_bytes": 2**30, "free_bytes": 2**29}


class GpuTooSmall(BudgetError):
    """Even with everything offloaded that vLLM or SGLang can offload, a GPU does not hold the rest."""

    engine: str
    gpus: int
    device: str
    capacity_bytes: int
    needed_bytes: int
    stays_bytes: int
    around_bytes: int
    kv_bytes: int
    tokens: int
    other_bytes: int
    ways: Sequence[str]
    """Each was worked out and fits."""
    template = (
        "No offload flags of {engine} make this fit on {gpus} x {device}: one may fill {capacity_bytes:size}, and the "
        "least that is needed is {needed_bytes:size} (layers and buffers {stays_bytes:size}, embeddings, head and what "
        "else is never offloaded {around_bytes:size}, KV cache for {tokens} tokens {kv_bytes:size}, activations, "
        "graphs and context {other_bytes:size})."
    )
    remedy = "What would do, one of: {ways:list}."
    example = {
        "engine": "vllm",
        "gpus": 1,
        "device": "L4",
        "capacity_bytes": 2**34,
        "needed_bytes": 2**35,
        "stays_bytes": 2**34,
        "around_bytes": 2**33,
        "kv_bytes": 2**33,
        "tokens": 131072,
        "other_bytes": 2**30,
        "ways": ["--gpus 2", "--context 8192"],
    }


class HostTooSmall(BudgetError):
    """What would have to leave the GPUs does not fit into the host's memory as vLLM and SGLang pin it."""

    engine: str
    needed_bytes: int
    payload_bytes: int
    host_bytes: int
    gpus: int
    ways: Sequence[str]
    """Each was worked out and fits."""
    template = (
        "{engine} would pin {needed_bytes:size} of host memory for {payload_bytes:size} of weights (for {gpus} GPU in "
        "all; each tensor takes the next power of two), and {host_bytes:size} may be used."
    )
    remedy = "On a host that has it, pass --host-memory {needed_bytes:flag}; {ways:list}."
    example = {
        "engine": "vllm",
        "needed_bytes": 2**38,
        "payload_bytes": 2**37,
        "host_bytes": 2**36,
        "gpus": 2,
        "ways": ["--gpus 4 would do here"],
    }


# --- the files ----------------------------------------------------------------------------------------------------


class CheckpointError(HeadraceError):
    """The files are not what a checkpoint should be."""


class NoWeights(CheckpointError):
    """A directory without weights."""

    directory: str
    found: Sequence[str]
    template = "{directory!r} holds no weights: there is no *.safetensors file in it (it has: {found:list})."
    remedy = "Give the directory that holds config.json and the *.safetensors files, or a .gguf file."
    example = {"directory": "models/empty", "found": ["README.md"]}


class MissingConfig(CheckpointError):
    """A directory with weights and no config.json, or one that is not JSON."""

    directory: str
    reason: str
    template = "{directory!r} has no usable config.json: {reason}."
    remedy = "Copy the model's config.json into that directory; without it the architecture is unknown."
    example = {"directory": "models/no-config", "reason": "the file is missing"}


class MissingShard(CheckpointError):
    """The index names a file that is not there."""

    index: str
    shard: str
    tensors: int
    template = "{index!r} says that {tensors} tensors are in {shard!r}, and that file is not there."
    remedy = "Download that file again into the same directory; the other shards can stay."
    example = {
        "index": "models/m/model.safetensors.index.json",
        "shard": "model-00002-of-00002.safetensors",
        "tensors": 9,
    }


class CorruptIndex(CheckpointError):
    """The index is not a JSON object with a weight map, or disagrees with the shards."""

    index: str
    reason: str
    template = "{index!r} cannot be used: {reason}."
    remedy = "Download the index again, or delete it if all tensors are in one model.safetensors."
    example = {"index": "models/m/model.safetensors.index.json", "reason": "it has no weight_map"}


class TruncatedFile(CheckpointError):
    """A safetensors file ends before the bytes that its header promises."""

    file: str
    expected_bytes: int
    actual_bytes: int
    template = "{file!r} is cut off: its header describes {expected_bytes} bytes and the file has {actual_bytes}."
    remedy = "Download that file again; the other shards can stay."
    example = {"file": "model.safetensors", "expected_bytes": 1000, "actual_bytes": 900}


class CorruptHeader(CheckpointError):
    """A safetensors header that lies: bad JSON, overlapping or impossible ranges, sizes that contradict shapes."""

    file: str
    reason: str
    template = "The safetensors header of {file!r} cannot be trusted: {reason}."
    remedy = "Download that file again; if it came out of a converter, convert again with safetensors' save_file."
    example = {"file": "model.safetensors", "reason": "tensor 'b' overlaps tensor 'a' by 16 bytes"}


class UnknownDtype(CheckpointError):
    """A tensor has a dtype that this version does not know."""

    file: str
    tensor: str
    dtype: str
    known: Sequence[str]
    template = "Tensor {tensor!r} in {file!r} has the dtype {dtype!r}, which is not known here."
    remedy = "Known dtypes are {known:list}. Convert the checkpoint to one of them."
    example = {"file": "model.safetensors", "tensor": "w", "dtype": "F7", "known": ["BF16", "F32"]}


class TensorMismatch(CheckpointError):
    """The checkpoint's tensors do not match the model that its config describes."""

    model: str
    reason: str
    names: Sequence[str]
    template = "The weights in {model!r} do not fit the model that its config describes: {reason} ({names:list})."
    remedy = "Check that config.json and the weights come from the same release of the model."
    example = {"model": "models/m", "reason": "2 tensors are missing", "names": ["model.norm.weight"]}


class ChatTemplateFailed(CheckpointError):
    """The checkpoint's chat template is no template, or refuses the conversation."""

    model: str
    reason: str
    template = "The chat template of {model!r} cannot be used: {reason}."
    remedy = "Pass --raw to continue the text without it, or correct the template beside the weights."
    example = {"model": "models/m", "reason": "unexpected 'end of template'"}


class CorruptGguf(CheckpointError):
    """A .gguf file that cannot be read or converted."""

    file: str
    reason: str
    template = "{file!r} cannot be imported: {reason}."
    remedy = "Download the file again, or take a .gguf of a supported architecture and quantization."
    example = {"file": "model.gguf", "reason": "it does not begin with the GGUF magic"}


# --- the error reference ------------------------------------------------------------------------------------------


class PackageNotFound(UserError):
    """The package whose errors are asked for is not installed here."""

    package: str
    nearest: str
    template = "There is no installed package {package!r}."
    remedy = (
        "Did you mean {nearest!r}? For a package that is not installed, give its wheel (--wheel FILE) or its source "
        "(--source DIR)."
    )
    example = {"package": "headrase", "nearest": "headrace"}


class VersionUnavailable(ConfigError):
    """A version of a package that was to be compared cannot be had as a wheel."""

    package: str
    version: str
    reason: str
    template = "There is no wheel of {package} {version}: {reason}."
    remedy = (
        "Try `pip download --no-deps --only-binary :all: {package}=={version}`, or give the files: --wheel FILE for "
        "each version. If pip knows {package} by another name, say --distribution NAME."
    )
    example = {"package": "vllm", "version": "0.31.9", "reason": "No matching distribution found for vllm==0.31.9"}


class SourceUnusable(UserError):
    """The Python source of a package cannot be read."""

    source: str
    reason: str
    template = "The source {source!r} cannot be used: {reason}."
    remedy = "Give a wheel (--wheel FILE) or the directory of the package (--source DIR) with its .py files."
    example = {"source": "vllm.whl", "reason": "File is not a zip file"}


class NotInReference(UserError):
    """The error reference of a package was not built yet, or its database cannot be read."""

    package: str
    reason: str
    template = "There is no error reference of {package} yet: {reason}."
    remedy = "Run: headrace reference build {package}"
    example = {"package": "vllm", "reason": "it was not built"}


class EndpointFailed(HeadraceError):
    """The model that was to write about errors does not answer, or not as an API like OpenAI's does."""

    url: str
    reason: str
    written: int
    template = "The model at {url} did not answer: {reason}. What it wrote before, about {written} errors, is kept."
    remedy = "See whether {url}/models answers, then run the same command again: it goes on where it stopped."
    example = {"url": "http://127.0.0.1:8000/v1", "reason": "[Errno 111] Connection refused", "written": 3}
    exit_code = 1


class UnknownErrorId(UserError):
    """An id was asked for that no page of the error references has."""

    id: str
    nearest: Sequence[str]
    packages: Sequence[str]
    template = "No error of {packages:list} has the id {id!r}."
    remedy = "The nearest ids are: {nearest:list}. Another package's errors are found after `headrace reference build`."
    example = {"id": "f56c538f6aa629ce", "nearest": ["f56c538f6aa629cd"], "packages": ["headrace", "vllm"]}


# --- while it runs ------------------------------------------------------------------------------------------------


class ReadError(HeadraceError, OSError):
    """A read failed while weights were moving: this pass is lost, the next one reads again."""

    file: str
    offset: int
    nbytes: int
    reason: str
    template = "Reading {nbytes} bytes at offset {offset} of {file!r} failed: {reason}."
    remedy = "This pass failed and nothing else was lost; the next pass reads again. Check the disk and the file."
    example = {"file": "model.safetensors", "offset": 4096, "nbytes": 8192, "reason": "Input/output error"}
    exit_code = 1


class WriteError(HeadraceError, OSError):
    """An import could not be written; what was written of it is gone again."""

    path: str
    needed_bytes: int
    free_bytes: int
    reason: str
    template = (
        "Writing to {path!r} failed: {reason} (needed {needed_bytes:size}, free {free_bytes:size}). "
        "The half-written import was removed."
    )
    remedy = "Free some space, or put the cache elsewhere with XDG_CACHE_HOME=/path/with/room."
    example = {"path": "/cache", "needed_bytes": 2**30, "free_bytes": 2**20, "reason": "No space left on device"}
    exit_code = 1


class SpillFailed(HeadraceError, OSError):
    """The file for weights that have no checkpoint could not be written; the module is as it was."""

    directory: str
    needed_bytes: int
    free_bytes: int
    reason: str
    template = (
        "Weights could not be spilled to {directory!r}: {reason} (needed {needed_bytes:size}, free {free_bytes:size})."
    )
    remedy = "Free some space, or name another directory with TMPDIR=/path/with/room. The module is as it was before."
    example = {"directory": "/var/tmp", "needed_bytes": 2**30, "free_bytes": 2**20, "reason": "No space left on device"}
    exit_code = 1


class NotWritable(HeadraceError, OSError):
    """The cache for imported models cannot be written."""

    path: str
    reason: str
    template = "The cache directory {path!r} cannot be written: {reason}."
    remedy = "Make it writable, or put the cache elsewhere with XDG_CACHE_HOME=/path/you/may/write."
    example = {"path": "/cache", "reason": "Permission denied"}
    exit_code = 1


class OutputFailed(HeadraceError, OSError):
    """The answer or the trace could not be written to where it should go."""

    output: str
    reason: str
    template = "Writing {output} failed: {reason}."
    remedy = "Send it to a place that can be written and has room."
    example = {"output": "the trace to 'trace.json'", "reason": "No space left on device"}
    exit_code = 1


class DemoFailed(HeadraceError):
    """The demo's two runs did not give the same tokens, or nothing was offloaded."""

    tokens: int
    offloaded_bytes: int
    template = (
        "The demo failed: its {tokens} streamed tokens differ from the resident ones, or nothing was offloaded "
        "({offloaded_bytes:size} on disk)."
    )
    remedy = "This is a fault of Headrace. Please report it with the output of headrace demo --json."
    example = {"tokens": 60, "offloaded_bytes": 0}
    exit_code = 1


class BenchmarkFailed(HeadraceError):
    """A file that a benchmark needs could not be made."""

    step: str
    reason: str
    template = "The benchmark ended while {step}: {reason}."
    remedy = "What was made before is kept, and the next run goes on from there."
    example = {"step": "converting for llama.cpp", "reason": "GGUF has no name for 'model.extra.weight'"}
    exit_code = 1


class NotComparable(HeadraceError):
    """Runs that a benchmark would compare were not made alike."""

    reason: str
    template = "These figures cannot be compared: {reason}."
    remedy = "Measure all candidates in one run of `headrace bench`."
    example = {"reason": "mapped ran under no cap, the cap of this benchmark is 3221225472 bytes"}


class CannotCap(HeadraceError):
    """A process cannot be put under a memory limit, or not with a cold page cache."""

    reason: str
    template = "No memory limit can be set for one process: {reason}."
    remedy = (
        "Run `headrace bench` as root on Linux with control groups, or with --memory none to measure without a cap."
    )
    example = {"reason": "Permission denied: /sys/fs/cgroup/memory/headrace-bench-4711"}


class MissingPackage(HeadraceError, ImportError):
    """A part of Headrace needs a package that is not installed."""

    package: str
    purpose: str
    extra: str
    template = "{purpose} needs the package {package!r}, which is not installed."
    remedy = "Run: pip install 'headrace[{extra}]'"
    example = {"package": "torch", "purpose": "Running a model", "extra": "engine"}


class OffloadedWeightsError(HeadraceError, RuntimeError):
    """Weights that live on disk were asked for as if they were in memory."""

    action: str
    count: int
    names: Sequence[str]
    template = "{action} is not possible: the data of {names:list} is offloaded and not in memory ({count} in all)."
    remedy = (
        "To save them, use state_dict() of what offload() gave, which reads them back; its close() gives the module "
        "all its weights again. Of a model from load(), copy the checkpoint directory instead, or load it with "
        "everything resident (a larger memory=)."
    )
    example = {"action": "state_dict()", "count": 3, "names": ["model.layers.0.mlp.up_proj.weight"]}
    exit_code = 1


class StillRunning(HeadraceError, RuntimeError):
    """Something that needs an offloaded module at rest was called from inside of its forward."""

    action: str
    template = "{action} was called from inside of a forward pass of the offloaded module, which still needs it."
    remedy = "Call it after the pass."
    example = {"action": "close()"}
    exit_code = 1


class WeightChanged(HeadraceError, RuntimeError):
    """A block wrote to one of its own weights, and what moves is read again from where it came."""

    name: str
    template = "{name} was changed in place while its block ran, but it is a copy that is dropped after each run."
    remedy = "Close the offloaded module, change the weight and offload it again, or let this weight stay in memory."
    example = {"name": "layers.3.weight"}
    exit_code = 1


class GradientsNeeded(HeadraceError, RuntimeError):
    """Autograd recorded a run of a block whose weights move."""

    block: str
    template = (
        "The output of {block} is part of an autograd graph, and the weights that a backward pass would need are gone "
        "by then."
    )
    remedy = "Run it under torch.inference_mode() or torch.no_grad(): offloaded modules are for inference."
    example = {"block": "layers.3"}
    exit_code = 1


class CannotCapture(HeadraceError, RuntimeError):
    """A graph was to be captured of a block that comes from disk."""

    block: str
    template = "A graph cannot be captured: {block} is read from disk, which a replay would not do."
    remedy = "Give the module enough host memory for everything that is offloaded (host_memory=), or run it eagerly."
    example = {"block": "layers.3"}
    exit_code = 1


class OutOfDeviceMemory(HeadraceError, RuntimeError):
    """An accelerator has no room for what was to be allocated on it."""

    purpose: str
    requested_bytes: int
    free_bytes: int
    total_bytes: int
    template = (
        "The device has no room for {purpose}: {requested_bytes:size} were asked for, and {free_bytes:size} of "
        "{total_bytes:size} are free."
    )
    remedy = (
        "Keep fewer weights on it (a smaller memory=), bring fewer blocks ahead (--offload-prefetch-step 1), or end "
        "other programs that use it."
    )
    example = {"purpose": "a ring of 2 slots", "requested_bytes": 2**30, "free_bytes": 2**29, "total_bytes": 24 * 2**30}
    exit_code = 1


class ClosedError(HeadraceError, RuntimeError):
    """A model was used after its engine was closed."""

    template = "This model was closed, and its streamed weights are no longer there."
    remedy = "Load it again with headrace.load(...)."
    example = {}
    exit_code = 1


# --- the server -----------------------------------------------------------------------------------------------------


class NoRoomForRequests(BudgetError):
    """The server's KV cache does not fit beside everything else; less of it would."""

    memory_bytes: int
    needed_bytes: int
    kv_bytes: int
    num_seqs: int
    model_len: int
    fits: Sequence[str]
    """Flags that were computed to fit, one line each."""
    template = (
        "A KV cache for {num_seqs} requests of {model_len} tokens takes {kv_bytes:size}, and with it the server needs "
        "{needed_bytes:size}; it can have {memory_bytes:size}."
    )
    remedy = "Any of these fits instead:\n{fits:lines}"
    example = {
        "memory_bytes": 2**31,
        "needed_bytes": 3 * 2**30,
        "kv_bytes": 2**30,
        "num_seqs": 16,
        "model_len": 2048,
        "fits": ["--max-num-seqs 4 --max-model-len 2048", "--max-num-seqs 16 --max-model-len 512", "--memory 3GiB"],
    }


class AddressNotUsable(UserError):
    """The server cannot listen where it was told to."""

    host: str
    port: int
    reason: str
    template = "The server cannot listen on {host} port {port}: {reason}."
    remedy = "Pass another --port (0 takes any that is free), or another --host; 127.0.0.1 is this machine alone."
    example = {"host": "127.0.0.1", "port": 8000, "reason": "Address already in use"}


class RequestError(UserError):
    """A request to the server asks for what it cannot have."""


class UnsupportedField(RequestError):
    """A request names a field, or a value of one, that the server does not implement."""

    field: str
    reason: str
    template = "The field {field!r} is not supported: {reason}."
    remedy = "Leave it out: the server never ignores a field in silence."
    example = {"field": "logit_processors", "reason": "there is no such field"}


class InvalidField(RequestError):
    """A field of a request is missing or has a value that cannot be used."""

    field: str
    reason: str
    template = "The field {field!r} cannot be used: {reason}."
    remedy = "Correct it, and send the request again."
    example = {"field": "temperature", "reason": "it should be less than or equal to 2"}


class MalformedBody(RequestError):
    """The body of a request is not a JSON object."""

    reason: str
    template = "The body of the request is not a JSON object: {reason}."
    remedy = "Send one JSON object, with Content-Type: application/json."
    example = {"reason": "Expecting value at character 0"}


class ContextLengthExceeded(RequestError):
    """A prompt and its answer are longer than a request may be."""

    field: str
    prompt_tokens: int
    answer_tokens: int
    context_tokens: int
    template = (
        "With {field!r} as it is, the prompt has {prompt_tokens} tokens and the answer may have {answer_tokens}; a "
        "request can have {context_tokens} tokens in all."
    )
    remedy = "Shorten the prompt or ask for a shorter answer; who runs the server can raise --max-model-len."
    example = {"field": "max_tokens", "prompt_tokens": 1500, "answer_tokens": 1000, "context_tokens": 2048}


class ModelNotServed(RequestError):
    """A request names a model that this server does not have."""

    model: str
    served: str
    template = "The model {model!r} is not served here."
    remedy = "This server has one model, and its name is {served!r}."
    example = {"model": "gpt-9", "served": "SmolLM2-135M-Instruct"}


class RouteNotFound(RequestError):
    """There is no such route, or not with this method."""

    method: str
    path: str
    template = "There is no {method} {path} here."
    remedy = "The routes are listed in /openapi.json."
    example = {"method": "GET", "path": "/v1/embeddings"}


class KeyRefused(RequestError):
    """The server asks for a key, and the request has none, or another one."""

    reason: str
    template = "The request was refused: {reason}."
    remedy = "Send the key that the server was started with: Authorization: Bearer KEY."
    example = {"reason": "it has no key"}


class RequestTooLarge(RequestError):
    """The body of a request is larger than the server reads."""

    limit_bytes: int
    template = "The body of the request is larger than {limit_bytes:size}, which is all that the server reads."
    remedy = "Send less; who runs the server can raise --max-request-size."
    example = {"limit_bytes": 2**20}


class HeadersTooLarge(RequestError):
    """The headers of a request are larger than the server reads."""

    limit_bytes: int
    template = "The headers of the request are larger than {limit_bytes:size}, which is all that the server reads."
    remedy = "Send fewer headers, or shorter ones."
    example = {"limit_bytes": 2**14}


class QueueFull(RequestError):
    """So many requests wait already that another one would wait for too long."""

    waiting: int
    limit: int
    retry_after_s: int
    template = "{waiting} requests wait already, and at most {limit} may."
    remedy = "Try again in {retry_after_s} seconds; who runs the server can raise --max-waiting."
    example = {"waiting": 256, "limit": 256, "retry_after_s": 20}


class NotReady(RequestError):
    """The server is up and cannot answer: it loads, it stops, or it has lost its disk."""

    reason: str
    template = "The server cannot answer now: {reason}."
    remedy = "Ask /ready, which turns green when it can."
    example = {"reason": "the model is being loaded"}


class GenerationFailed(HeadraceError):
    """A pass of the server failed for a reason that nobody foresaw: its requests are lost, the next pass runs."""

    reason: str
    template = "The pass that this request was part of failed: {reason}."
    remedy = "Send it again. If it fails again, this is a fault of Headrace: please report it with the server's log."
    example = {"reason": "RuntimeError"}
    exit_code = 1
