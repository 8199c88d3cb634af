"""A measured machine as a file: written once, read for every plan, also on another machine. Measures nothing itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cache import cache_directory
from headrace.core import Accelerator, Contention, Link, Machine, Products, Tier
from headrace.errors import NotWritable, Reason, UnusableMachineFile

VERSION = 5
"""Of the file; raised when a field changes its meaning."""


def cache_file() -> Path:
    """Where `headrace machine` keeps what it measured here."""
    return cache_directory("machine.json")


def to_json(machine: Machine) -> dict[str, Any]:
    """Plain data, with the version."""
    return {"version": VERSION, **dataclasses.asdict(machine)}


def read_cached() -> Machine | None:
    """What `headrace machine` measured here, if it did, and if this version can read it."""
    with contextlib.suppress(UnusableMachineFile):
        return read(cache_file())
    return None


def write(machine: Machine, path: Path) -> None:
    """Raises: NotWritable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(machine), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise NotWritable(path=str(path.parent), reason=error.strerror or str(error)) from error


def read(path: Path) -> Machine:
    """The machine in a file. Raises: UnusableMachineFile."""
    try:
        return _parsed(json.loads(path.read_bytes()))
    except OSError as error:
        raise UnusableMachineFile(file=str(path), reason=error.strerror or str(error)) from error
    except Reason as error:
        raise UnusableMachineFile(file=str(path), reason=str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UnusableMachineFile(file=str(path), reason=f"it is not JSON ({error})") from error


def _parsed(data: Any) -> Machine:
    if not isinstance(data, dict):
        raise Reason("it is JSON, but not an object")
    if data.get("version") != VERSION:
        raise Reason(f"its version is {data.get('version')!r}, and this Headrace reads version {VERSION}")
    _check_names(Machine, data.keys() - {"version"}, "")
    accelerator = data.get("accelerator")
    return Machine(
        memory_bytes=_count(data, "memory_bytes"),
        cores=_count(data, "cores"),
        disk=_link(data, "disk", Tier.DISK),
        compute_bytes_per_s=_rate(data, "compute_bytes_per_s"),
        compute_operations_per_s=_rate(data, "compute_operations_per_s", may_be_zero=True),
        layer_overhead_s=_rate(data, "layer_overhead_s", may_be_zero=True),
        pass_overhead_s=_rate(data, "pass_overhead_s", may_be_zero=True),
        expert_overhead_s=_rate(data, "expert_overhead_s", may_be_zero=True),
        copy_bytes_per_s=_rate(data, "copy_bytes_per_s", may_be_zero=True),
        contention=_contention(data.get("contention")),
        products=_products(data.get("products", {})),
        int8_bytes_per_s=_rate(data, "int8_bytes_per_s", may_be_zero=True),
        int4_bytes_per_s=_rate(data, "int4_bytes_per_s", may_be_zero=True),
        fast_row_bytes_per_s=_rate(data, "fast_row_bytes_per_s", may_be_zero=True),
        accelerator=None if accelerator is None else _accelerator(accelerator),
    )


def _contention(data: Any) -> Contention | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise Reason("contention is not an object")
    _check_names(Contention, data.keys(), "contention.")
    return Contention(_share(data, "disk_share"), _share(data, "compute_share"))


def _share(data: Mapping[str, Any], name: str) -> float:
    share = _rate(data, name, of="contention.")
    if share > 1:
        raise Reason(f"contention.{name} is {share!r}, and it must be at most 1")
    return share


def _products(data: Any) -> dict[str, Products]:
    if not isinstance(data, dict):
        raise Reason("products is not an object")
    return {str(dtype): _rates(value, f"products.{dtype}") for dtype, value in data.items()}


def _rates(data: Any, name: str) -> Products:
    pairs = data.get("rates") if isinstance(data, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise Reason(f"{name}.rates is missing, or not a list of pairs of rows and a rate")
    rates = tuple(
        (_count({"rows": rows}, "rows"), _rate({"rate": rate}, "rate", of=f"{name}.")) for rows, rate in pairs
    )
    if [rows for rows, _ in rates] != sorted({rows for rows, _ in rates}) or rates[:1] == () or rates[0][0] != 1:
        raise Reason(f"the rows of {name}.rates do not ascend from 1")
    return Products(
        rates,
        layer_overhead_s=_rate(data, "layer_overhead_s", of=f"{name}.", may_be_zero=True),
        attention_bytes_per_s=_rate(data, "attention_bytes_per_s", of=f"{name}.", may_be_zero=True),
    )


def _accelerator(data: Any) -> Accelerator:
    if not isinstance(data, dict):
        raise Reason("its accelerator is not an object")
    _check_names(Accelerator, data.keys(), "accelerator.")
    return Accelerator(
        name=str(data.get("name", "")),
        memory_bytes=_count(data, "memory_bytes"),
        link=_link(data, "link", Tier.HOST),
        memory_bytes_per_s=_rate(data, "memory_bytes_per_s"),
        operations_per_s=_rate(data, "operations_per_s"),
        source=str(data.get("source", "")),
    )


def _check_names(kind: type, names: Any, path: str) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(names) - known):
        raise Reason(f"it has the unknown field {path}{unknown[0]}")


def _link(data: Mapping[str, Any], name: str, source: Tier) -> Link:
    link = data.get(name)
    if not isinstance(link, dict):
        raise Reason(f"{name} is missing, or not an object")
    return Link(source, Tier.DEVICE, _rate(link, "bytes_per_s", of=f"{name}."))


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if type(value) is not int or value < 1:
        raise Reason(f"{name} is {value!r}, and it must be a whole number of at least 1")
    return value


def _rate(data: Mapping[str, Any], name: str, *, of: str = "", may_be_zero: bool = False) -> float:
    value = data.get(name, 0.0 if may_be_zero else None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Reason(f"{of}{name} is {value!r}, and it must be a number")
    if value < 0 or (value == 0 and not may_be_zero):
        raise Reason(f"{of}{name} is {value!r}, and it must be above 0")
    return float(value)
