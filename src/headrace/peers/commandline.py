"""A command line of vLLM, read as vLLM would read it, as far as offloading goes. Knows no model.

Flags are understood with dashes and with underscores, with `=` and with a blank. What has nothing to do with
offloading or memory is passed over.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.errors import InvalidSetting, UnknownSetting

_MODULE = "vllm.entrypoints."
_LISTS = ("cpu_offload_params", "offload_params")
_UVA, _PREFETCH = tuple(UVAOffloadConfig.model_fields), tuple(PrefetchOffloadConfig.model_fields)
OFFLOAD = ("offload_backend", *_UVA, *_PREFETCH)
"""Names of vLLM's offload settings."""

_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"}
_SWITCHES = ("enforce_eager", "trust_remote_code", "enable_lora", "enable_prefix_caching", "language_model_only")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class ServeLine:
    """What a command line asks of vLLM."""

    model: str
    values: Mapping[str, str]
    """By setting with underscores, the last value of each flag with one value."""
    offload: Mapping[str, Any]
    """The offload settings that were given, with the types that vLLM gives them."""

    @property
    def gpus(self) -> int:
        """Of one tensor-parallel group."""
        return self._count("tensor_parallel_size", 1)

    @property
    def stages(self) -> int:
        """Of the pipeline; each has its own layers, counted from 0."""
        return self._count("pipeline_parallel_size", 1)

    @property
    def sequences(self) -> int:
        return self._count("max_num_seqs", 1)

    @property
    def tokens(self) -> int | None:
        """The longest sequence, if it is given. `8k` is 8000 and `8K` is 8192, as for vLLM."""
        text = self.values.get("max_model_len")
        if text is None or text == "auto":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
        if match is None:
            raise _wrong("max_model_len", text, "a whole number, or one with k or K", "8192")
        return max(1, int(float(match[1]) * _DECIMAL.get(match[2], 1)))

    @property
    def utilization(self) -> float:
        """Part of a GPU's memory that vLLM may fill."""
        text = self.values.get("gpu_memory_utilization", "0.92")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise _wrong("gpu_memory_utilization", text, "above 0 and at most 1", "0.9")
        return value

    @property
    def has_graphs(self) -> bool:
        return "enforce_eager" not in self.values

    def nested(self) -> dict[str, Any]:
        """The offload settings as OffloadConfig takes them."""
        nested: dict[str, Any] = {
            "uva": {name: self.offload[name] for name in _UVA if name in self.offload},
            "prefetch": {name: self.offload[name] for name in _PREFETCH if name in self.offload},
        }
        if "offload_backend" in self.offload:
            nested["offload_backend"] = self.offload["offload_backend"]
        return nested

    def config(self) -> OffloadConfig:
        """Raises: ConfigError, where vLLM would refuse, and NothingOffloaded, where it would be silent."""
        import warnings

        from headrace.config import OffloadConfigWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadConfigWarning)
            return OffloadConfig.model_validate(self.nested())

    def _count(self, name: str, default: int) -> int:
        text = self.values.get(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise _wrong(name, text, "a whole number of at least 1", "1")
        return int(text)


def parse(words: Sequence[str]) -> ServeLine:
    """`vllm serve MODEL ...`, or `python -m vllm.entrypoints... --model MODEL ...`.

    Raises: InvalidSetting for what is no such line, UnknownSetting for an offload flag that vLLM does not have.
    """
    values: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    bare = []
    for name, given in _flags(_arguments(words)):
        if name == "":
            bare += given
        elif name in _LISTS:
            lists.setdefault(name, []).extend(piece for word in given for piece in word.split(",") if piece)
        elif name in _SWITCHES:
            values[name] = ""
            bare += given
        else:
            _refuse_unknown(name)
            values[name] = given[0] if given else ""
            bare += given[1:]
    model = values.get("model") or next(iter(bare), "")
    if not model:
        raise _no_line(words, "it names no model")
    offload: dict[str, Any] = {name: sorted(set(items)) for name, items in lists.items()}
    offload |= {name: _typed(name, values[name]) for name in OFFLOAD if name in values}
    return ServeLine(model, values, offload)


def _arguments(words: Sequence[str]) -> list[str]:
    """What comes after `vllm serve`, or after the module of a server."""
    rest = [word for word in words if not re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", word)] if words else []
    if len(rest) >= 2 and os.path.basename(rest[0]) == "vllm" and rest[1] == "serve":
        return rest[2:]
    for position, word in enumerate(rest[:-1]):
        if word == "-m" and rest[position + 1].startswith(_MODULE):
            return rest[position + 2 :]
    raise _no_line(words, "it is neither")


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with what follows it; words before the first flag under an empty name."""
    name, given = "", list[str]()
    for word in arguments:
        if not word.startswith("-") or re.fullmatch(r"-\d.*", word):
            given.append(word)
            continue
        yield name, given
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag) or flag.lstrip("-").replace("-", "_")
        given = [value] if equals else []
    yield name, given


def _refuse_unknown(name: str) -> None:
    if "offload" in name and name not in OFFLOAD and not name.startswith(("kv_offload", "swap", "mm_", "lora")):
        flags = [f"--{known.replace('_', '-')}" for known in OFFLOAD]
        asked = f"--{name.replace('_', '-')}"
        nearest = difflib.get_close_matches(asked, flags, n=1, cutoff=0.0)[0]
        raise UnknownSetting(setting=asked, nearest=nearest, known=flags)


def _typed(name: str, text: str) -> Any:
    """As vLLM's parser converts it; what cannot be converted stays text, and the config says what is wrong with it."""
    try:
        if name == "cpu_offload_gb":
            return float(text)
        return int(text) if name in _PREFETCH else text
    except ValueError:
        return text


def _wrong(name: str, value: str, allowed: str, suggestion: str) -> InvalidSetting:
    return InvalidSetting(
        setting=f"vLLM's --{name.replace('_', '-')}", value=repr(value), allowed=allowed, suggestion=suggestion
    )


def _no_line(words: Sequence[str], why: str) -> InvalidSetting:
    return InvalidSetting(
        setting="the command line after --",
        value=repr(" ".join(words)[:80]) + f" ({why})",
        allowed="`vllm serve MODEL ...` or `python -m vllm.entrypoints.openai.api_server --model MODEL ...`",
        suggestion="as in: headrace check -- vllm serve org/name --cpu-offload-gb 4",
    )
