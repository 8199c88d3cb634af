"""How a wrong setting is told: what pydantic finds, and sizes that are no sizes, become our errors. Knows no field.

A model built on `Settings` says in each field's description what the field may be, and in `suggestion` what to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace import units
from headrace.errors import ConfigError, InvalidOffloadConfig, InvalidSetting, InvalidSize, UnknownSetting

_LARGEST_BYTES = 2**60


class Settings(BaseModel):
    """A frozen pydantic model that raises a `ConfigError` at each way in, and refuses fields it does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Whatever is raised inside of a validator comes out wrapped, so it is unwrapped at the ways in.
    # Because there is an __init__, pydantic calls it for nested models too: each model tells of its own fields.
    def __init__(self, /, **data: Any) -> None:
        with _our_errors(type(self), data):
            super().__init__(**data)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with _our_errors(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with _our_errors(cls):
            return super().model_validate_json(json_data, **options)

    @classmethod
    def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
        with _our_errors(cls):
            return super().model_validate_strings(obj, **options)

    @classmethod
    def suggestion(cls, field: str, value: object, data: Mapping[str, Any]) -> str:
        """What to use for `field` instead of `value`; valid together with the other fields in `data`."""
        return str(cls.model_fields[field].default)


def flag(field: str) -> str:
    """The command line's name of a field."""
    return "--" + field.replace("_", "-")


def number_text(value: float) -> str:
    """`4` for 4.0, `0.5` for 0.5: what a user would write."""
    return repr(value).removesuffix(".0")


@contextmanager
def _our_errors(model: type[Settings], data: Mapping[str, Any] | None = None) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise _combined([_told(model, line, data or {}) for line in error.errors(include_url=False)]) from None


def _combined(errors: list[ConfigError]) -> ConfigError:
    """One error for all: names are told before values, since a value under a wrong name says nothing."""
    unknown = [error for error in errors if isinstance(error, UnknownSetting)]
    if unknown or len(errors) == 1:
        return (unknown or errors)[0]
    problems: list[str] = []
    changes: list[str] = []
    for error in errors:
        if isinstance(error, InvalidOffloadConfig):
            problems += error.problems
            changes.append(error.remedies[0])
        elif isinstance(error, InvalidSetting):
            problems.append(error.what)
            changes.append(f"{error.setting} {error.suggestion}")
    return InvalidOffloadConfig(problems=problems, remedies=[" ".join(changes)])


def _told(model: type[Settings], line: Mapping[str, Any], data: Mapping[str, Any]) -> ConfigError:
    """One finding of pydantic as our error."""
    inner = line.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        return inner
    name = str(line["loc"][0]) if line["loc"] else ""
    if line["type"] == "extra_forbidden":
        return _unknown(model, name)
    value = data.get(name, line["input"])
    field = model.model_fields.get(name)
    if field is not None and field.description is not None:
        return InvalidSetting(
            setting=flag(name),
            value=_shown(value),
            allowed=field.description,
            suggestion=model.suggestion(name, value, data),
        )
    whole: Any = model if field is None else field.annotation
    return InvalidSetting(
        setting=name or model.__name__,
        value=_shown(value),
        allowed=f"an object with some of the fields {', '.join(_known(whole))}",
        suggestion="{}",
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unknown(model: type[Settings], name: str) -> UnknownSetting:
    known = list(_known(model))
    by_last_segment = {each.rpartition(".")[2]: each for each in known}
    nearest = difflib.get_close_matches(name, by_last_segment, n=1, cutoff=0.0)[0]
    return UnknownSetting(setting=name, nearest=by_last_segment[nearest], known=known)


def _known(model: type[Settings]) -> Iterator[str]:
    """Names of all fields, those of nested models with their path."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            yield from (f"{name}.{inner}" for inner in _known(info.annotation))
        else:
            yield name


def require(valid: bool, setting: str, value: object, allowed: str, suggestion: str) -> None:
    """Raises: InvalidSetting, unless the value is valid."""
    if not valid:
        raise InvalidSetting(setting=setting, value=str(value), allowed=allowed, suggestion=suggestion)


# --- sizes --------------------------------------------------------------------------------------------------------


def parse_size(text: str | int, setting: str = "--memory") -> int:
    """Bytes of a size like `3GiB` (3 * 2**30), `3GB` (3 * 10**9) or `512 mib`; an int is bytes already.

    Raises InvalidSize for everything else, also for a number without a unit.
    """
    if isinstance(text, str):
        return _parse_text(text, setting)
    if isinstance(text, bool) or not isinstance(text, int):
        raise _no_size(text, setting, "it is neither text with a unit nor a whole number of bytes")
    if text <= 0:
        meant = units.format_flag_bytes(-text) if 0 < -text <= _LARGEST_BYTES else ""
        raise _no_size(text, setting, "it is zero" if text == 0 else "it is negative", meant)
    if text > _LARGEST_BYTES:
        raise _no_size(text, setting, "no machine has that much")
    return text


def _parse_text(text: str, setting: str) -> int:
    split = units.split_size(text)
    if split is None:
        raise _no_size(text, setting, "it is not a number with a unit" if text.strip() else "it is empty")
    number, unit = split
    per_unit = units.unit_bytes(unit)
    meant = _meant(abs(number), unit)
    if number <= 0:
        raise _no_size(text, setting, "it is zero" if number == 0 else "it is negative", meant)
    if not unit:
        raise _no_size(text, setting, "it has no unit", meant)
    if per_unit is None and unit.upper() in ("K", "M", "G", "T"):
        both = f"{unit.upper()}iB or {unit.upper()}B".replace("KB", "kB")
        raise _no_size(text, setting, f"{unit!r} is ambiguous, it could be {both}", meant)
    if per_unit is None:
        raise _no_size(text, setting, f"there is no unit {unit!r}", meant)
    if number * per_unit > _LARGEST_BYTES:
        raise _no_size(text, setting, "no machine has that much")
    if number * per_unit < 1:
        raise _no_size(text, setting, "it is less than one byte")
    return int(number * per_unit)


def _meant(number: float, unit: str) -> str:
    """The size that was probably meant by a number whose unit is missing or unknown; "" if there is no telling."""
    if not 0 < number < 2**40:
        return ""
    if not unit and number >= 2**20:
        return units.format_flag_bytes(int(number))  # nobody has that many GiB: it was bytes
    letter = unit[:1].upper() if unit[:1].upper() in ("K", "M", "T") else "M" if number >= 1024 else "G"
    written = f"{number:.6f}".rstrip("0").rstrip(".")
    nbytes = float(written) * (units.unit_bytes(f"{letter}iB") or 0)
    return f"{written}{letter}iB" if 1 <= nbytes <= _LARGEST_BYTES else ""


def _no_size(value: object, setting: str, reason: str, meant: str = "") -> InvalidSize:
    return InvalidSize(setting=setting, value=str(value), reason=reason, suggestion=meant or "3GiB")
