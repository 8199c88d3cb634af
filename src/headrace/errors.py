"""Every exception class of Headrace. Callers pass facts; the words live here. Imports nothing of ours but `units`.

    HeadraceError
    ├── UserError (also a ValueError)      what was asked for cannot be done as asked
    │   ├── CannotOffload                  a module without blocks, or already offloaded
    │   ├── ConfigError                    a flag, a field, a size
    │   ├── ModelNotFound ...              a path or a hub id
    │   └── BudgetError                    the memory asked for does not hold what was asked for
    ├── CheckpointError                    the files are not what a checkpoint should be
    ├── ReadError (also an OSError)        a read failed while weights were moving
    ├── WriteError (also an OSError)       an import could not be written
    ├── SpillFailed (also an OSError)      the file for weights without a checkpoint could not be written
    ├── NotWritable (also an OSError)      the cache for imports cannot be written
    ├── OutputFailed (also an OSError)     an answer or a trace could not be written
    ├── MissingPackage (also an ImportError)
    ├── DemoFailed                         the demo's two runs disagree
    ├── OffloadedWeightsError (also a RuntimeError)   weights that live on disk were asked for as if they did not
    ├── StillRunning (also a RuntimeError)     an offloaded module was closed or saved by its own forward
    ├── WeightChanged (also a RuntimeError)    a block wrote to a weight that is only lent to it
    ├── GradientsNeeded (also a RuntimeError)  a backward pass through weights that move
    ├── CannotCapture (also a RuntimeError)    a graph of what comes from disk
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
        """16 hex digits that stay the same until the class is renamed or its template reworded."""
        import hashlib  # late: it loads a library that nothing else here needs

        return hashlib.sha256(f"headrace:{cls.__name__}:{cls.template}".encode()).hexdigest()[:16]


def concrete_errors(root: type[HeadraceError] = HeadraceError) -> Iterator[type[HeadraceError]]:
    """Every class below `root` that can be raised (it has a template)."""
    for child in root.__subclasses__():
        if child.template:
            yield child
        yield from concrete_errors(child)


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


class ClosedError(HeadraceError, RuntimeError):
    """A model was used after its engine was closed."""

    template = "This model was closed, and its streamed weights are no longer there."
    remedy = "Load it again with headrace.load(...)."
    example = {}
    exit_code = 1
