"""What the user asked for, checked. Knows no model, no machine and no torch: names, numbers and the rules between them.

Names, defaults and rules are vLLM's, so that a config carries over. What cannot work is raised as one of our errors;
what is set but has no effect is warned about (`OffloadConfigWarning`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_serializer, model_validator

from headrace.errors import InvalidOffloadConfig, NothingOffloaded, Reason
from headrace.settings import Settings, flag, number_text, parse_size

__all__ = [
    "BACKENDS",
    "Backend",
    "OffloadConfig",
    "OffloadConfigWarning",
    "PrefetchOffloadConfig",
    "UVAOffloadConfig",
    "matches",
    "parse_size",
    "selected_layers",
]

Backend = Literal["auto", "uva", "prefetch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_LARGEST_GIB = 2.0**30
_EXAMPLE_GIB = 4.0
_SELECTOR = re.compile(r"[^\s.,*?-][^\s.,*?]*(\.[^\s.,*?]+)*")


class OffloadConfigWarning(UserWarning):
    """A setting was given that has no effect."""


# --- the settings -------------------------------------------------------------------------------------------------


def _usable_gib(value: float) -> float:
    if 0 < value < 2**-30:
        raise Reason("less than one byte")
    return value + 0.0  # -0.0 becomes 0.0: equal configs have equal hashes


def _usable_selectors(selectors: frozenset[str]) -> frozenset[str]:
    if not all(_SELECTOR.fullmatch(selector) for selector in selectors):
        raise Reason("a selector that can match nothing")
    return selectors


# Strict: True is no number of layers, and "8" is a mistake that should be seen where it is made.
_Count = Annotated[int, Field(strict=True)]
_Selectors = Annotated[
    frozenset[Annotated[str, Field(strict=True)]],
    AfterValidator(_usable_selectors),
    Field(description="a set of whole segments of parameter names, without wildcards (like experts.w2_weight)"),
]


def _suggested_selectors(value: object) -> str:
    texts = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple, set, frozenset)) else []
    cleaned = (".".join(re.findall(r"\w+", text)) for text in texts if isinstance(text, str))
    return " ".join(sorted({text for text in cleaned if text})) or "experts"


def _magnitude(value: object) -> float:
    """The number that a wrong value probably stands for, or 0."""
    try:
        number = abs(float(str(value)))
    except ValueError:
        return 0.0
    return number if number < _LARGEST_GIB else 0.0  # also False for nan


class UVAOffloadConfig(Settings):
    """Weights stay in host memory (on CPU: in the checkpoint file, mapped) and are used in place."""

    cpu_offload_gb: Annotated[
        float,
        Field(strict=True, ge=0, le=_LARGEST_GIB, allow_inf_nan=False),
        AfterValidator(_usable_gib),
        Field(description="a number of GiB that is 0 (off) or more, and at least one byte"),
    ] = 0.0
    """GiB of weights kept out of device memory: an upper bound that is never exceeded."""
    cpu_offload_params: _Selectors = frozenset()
    """Only parameters that match (see `matches`); empty is every parameter, until the budget is used up."""

    @property
    def budget_bytes(self) -> int:
        return int(self.cpu_offload_gb * 2**30)

    @classmethod
    def suggestion(cls, field: str, value: object, data: Mapping[str, Any]) -> str:
        if field == "cpu_offload_params":
            return _suggested_selectors(value)
        number = _magnitude(value)
        return number_text(number if number >= 2**-30 else _EXAMPLE_GIB)

    @field_serializer("cpu_offload_params", when_used="json")
    def _sorted(self, selectors: frozenset[str]) -> list[str]:
        return sorted(selectors)


class PrefetchOffloadConfig(Settings):
    """Whole layers are copied into a ring of slots ahead of their use."""

    offload_group_size: Annotated[_Count, Field(ge=0, description="a whole number that is 0 (off) or more")] = 0
    """Layers are grouped by this many."""
    offload_num_in_group: Annotated[_Count, Field(ge=1, description="a whole number that is 1 or more")] = 1
    """The last so many layers of each group are offloaded (see `selected_layers`)."""
    offload_prefetch_step: Annotated[
        _Count, Field(ge=0, description="a whole number that is 1 or more while prefetch is on")
    ] = 1
    """How many offloaded layers ahead to copy. Counts offloaded layers, not groups."""
    offload_params: _Selectors = frozenset()
    """Only parameters of those layers that match (see `matches`); empty is all of the layer."""

    @classmethod
    def suggestion(cls, field: str, value: object, data: Mapping[str, Any]) -> str:
        if field == "offload_params":
            return _suggested_selectors(value)
        if field != "offload_group_size":
            return "1"
        # At least what is taken out of each group, or the next error would be about that.
        taken = data.get("offload_num_in_group", 1)
        return str(max(int(_magnitude(value)), taken if type(taken) is int else 1, 1))

    @field_serializer("offload_params", when_used="json")
    def _sorted(self, selectors: frozenset[str]) -> list[str]:
        return sorted(selectors)


class OffloadConfig(Settings):
    """What to keep out of device memory, and how. Raises a `ConfigError` (a ValueError) on values that cannot work."""

    offload_backend: Annotated[Backend, Field(description="auto, uva or prefetch")] = "auto"
    uva: UVAOffloadConfig = UVAOffloadConfig()
    prefetch: PrefetchOffloadConfig = PrefetchOffloadConfig()

    @classmethod
    def suggestion(cls, field: str, value: object, data: Mapping[str, Any]) -> str:
        return (difflib.get_close_matches(str(value).lower(), BACKENDS, n=1, cutoff=0.5) or ["auto"])[0]

    @property
    def resolved_backend(self) -> Literal["auto", "uva", "prefetch"]:
        """The backend these settings lead to; `auto` leaves it to the planner and the memory budget."""
        return _resolve(self.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per setting, or group of settings, that has no effect."""
        return tuple(_notes(self.values()))

    def values(self) -> dict[str, Any]:
        """Every field by its own name, without the nesting; a field's flag is its name with dashes."""
        return {"offload_backend": self.offload_backend, **dict(self.uva), **dict(self.prefetch)}

    def to_flags(self) -> list[str]:
        """The command line that gives this config, without what is default anyway. vLLM reads it the same way."""
        return _flags(self.values())

    def compute_hash(self) -> str:
        """64 hex digits over every field: equal for equal configs, in every process."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @model_validator(mode="after")
    def validate_offload_config(self) -> Self:
        """The rules between fields. Raises all that is wrong at once, then warns of what is ignored."""
        values = self.values()
        contradictions, idle = list(_contradictions(values)), _nothing_offloaded(values)
        if contradictions:
            problems = contradictions + ([idle.what] if idle else [])
            raise InvalidOffloadConfig(problems=problems, remedies=list(_remedies(values)))
        if idle:
            raise idle
        for note in self.notes:
            # Frames: here, pydantic's __init__, ours, and then the line that asked.
            warnings.warn(note, OffloadConfigWarning, stacklevel=4)
        return self


# --- what the settings select -------------------------------------------------------------------------------------


def matches(selectors: frozenset[str], dotted_name: str) -> bool:
    """Whether any selector is a run of whole segments of `dotted_name`. No selector at all selects every name.

    `experts.w2_weight` matches `mlp.experts.w2_weight`; `w2` does not.
    """
    return not selectors or any(f".{selector}." in f".{dotted_name}." for selector in selectors)


def selected_layers(count: int, group_size: int, num_in_group: int) -> list[int]:
    """Of `count` layers those that are offloaded: `i % group_size >= group_size - num_in_group`. Size 0 is none."""
    if group_size == 0:
        return []
    return [layer for layer in range(count) if layer % group_size >= group_size - num_in_group]


# --- rules between fields -----------------------------------------------------------------------------------------
#
# They work on plain values by field name, so that a remedy can be checked before it is printed.


def _defaults() -> dict[str, Any]:
    nested = {**UVAOffloadConfig.model_fields, **PrefetchOffloadConfig.model_fields}
    return {"offload_backend": "auto", **{name: info.default for name, info in nested.items()}}


def _flags(values: Mapping[str, Any], always: set[str] | None = None) -> list[str]:
    """Flags for what is not default, and for the fields in `always`."""
    flags: list[str] = []
    for name, default in _defaults().items():
        value = values[name]
        if value != default or name in (always or ()):
            items = sorted(value) if isinstance(value, frozenset) else [value]
            flags += [flag(name), *(number_text(item) if isinstance(item, float) else str(item) for item in items)]
    return flags


def _line(values: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Flags to paste, with everything in them that differs from what was asked for."""
    return " ".join(_flags(values, always={name for name in values if values[name] != asked[name]}))


def _resolve(values: Mapping[str, Any]) -> Backend:
    asked: Backend = values["offload_backend"]
    if asked != "auto":
        return asked
    if values["offload_group_size"] > 0:
        return "prefetch"
    return "uva" if values["cpu_offload_gb"] > 0 else "auto"


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """Each begins with the words that users of vLLM search for."""
    size, taken = values["offload_group_size"], values["offload_num_in_group"]
    step = values["offload_prefetch_step"]
    if values["offload_backend"] != "prefetch" and size == 0:
        return
    if taken > size:
        why = (
            "--offload-backend prefetch needs groups of layers, and --offload-group-size 0 makes none"
            if size == 0
            else f"--offload-num-in-group {taken} layers cannot be taken out of a group of --offload-group-size {size}"
        )
        yield f"offload_num_in_group ({taken}) must be <= offload_group_size ({size}): {why}."
    if step < 1:
        yield (
            f"offload_prefetch_step ({step}) must be >= 1 when prefetch offloading is enabled "
            f"(offload_group_size > 0): --offload-prefetch-step {step} would never copy a layer ahead of its use."
        )


def _nothing_offloaded(values: Mapping[str, Any]) -> NothingOffloaded | None:
    """The error for a request that offloads nothing whatever the model is, or None."""
    backend = _resolve(values)
    no_budget = "--cpu-offload-gb is 0, so not one byte may be offloaded"
    works: dict[str, Any] = {"cpu_offload_gb": _EXAMPLE_GIB}
    if backend == "uva" and values["cpu_offload_gb"] == 0:
        wanted, reason = ["offload_backend", "cpu_offload_params"], no_budget
    elif backend == "auto" and values["cpu_offload_params"]:
        wanted, reason = ["cpu_offload_params"], no_budget
    elif backend == "auto" and values["offload_params"]:
        wanted, reason = ["offload_params"], "--offload-group-size is 0, which turns prefetch off"
        works = {"offload_group_size": values["offload_num_in_group"], "offload_prefetch_step": _step(values)}
    else:
        return None
    request = _flags({**_defaults(), **{name: values[name] for name in wanted}})
    return NothingOffloaded(request=" ".join(request), reason=reason, suggestion=_line({**values, **works}, values))


def _step(values: Mapping[str, Any]) -> int:
    step: int = values["offload_prefetch_step"]
    return max(1, step)


def _remedies(values: Mapping[str, Any]) -> Iterator[str]:
    """Complete flag lines near to what was asked for; each is valid."""
    size, taken = values["offload_group_size"], values["offload_num_in_group"]
    fixed = {**values, "offload_prefetch_step": _step(values)}
    if _resolve(values) == "uva" and values["cpu_offload_gb"] == 0:
        fixed["cpu_offload_gb"] = _EXAMPLE_GIB
    if taken <= size:
        ways = [(size, taken)]
    elif size == 0:
        ways = [(4 * taken, taken), (taken, taken)]  # a quarter of the layers, or all of them
    else:
        ways = [(size, size), (taken, taken)]
    for new_size, new_taken in ways:
        line = {**fixed, "offload_group_size": new_size, "offload_num_in_group": new_taken}
        assert not list(_contradictions(line))
        assert _nothing_offloaded(line) is None
        yield _line(line, values)


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on the settings that have no effect, if there are any."""
    defaults, backend = _defaults(), _resolve(values)
    uva, prefetch = (
        ", ".join(name for name in family.model_fields if values[name] != defaults[name])
        for family in (UVAOffloadConfig, PrefetchOffloadConfig)
    )
    if backend == "uva" and prefetch:
        yield (
            f"Prefetch settings will be ignored, since the backend is uva: {prefetch}. Leave them out, or offload "
            "whole layers instead: --offload-group-size above 0, without --offload-backend uva."
        )
    elif backend == "prefetch" and uva and values["offload_backend"] == "auto" and values["cpu_offload_gb"] > 0:
        yield (
            f"Both UVA and prefetch offload fields are set (cpu_offload_gb {number_text(values['cpu_offload_gb'])}, "
            f"offload_group_size {values['offload_group_size']}). Prefetch backend will be selected, and these will be "
            f"ignored: {uva}. Leave them out, or pass --offload-backend uva."
        )
    elif backend == "prefetch" and uva:
        yield (
            f"UVA settings will be ignored, since the backend is prefetch: {uva}. Leave them out; --offload-params "
            "selects parameters for prefetch."
        )
    elif backend == "auto" and prefetch:
        yield (
            f"Prefetch settings will be ignored, since offload_group_size is 0: {prefetch}. Leave them out, or pass "
            "--offload-group-size."
        )
