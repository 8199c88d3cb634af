"""A machine survives its file; what is no machine is refused with the field that is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import machine

from headrace import machinefile
from headrace.core import Contention, Products
from headrace.datasheets import data_sheet
from headrace.errors import NotWritable, UnusableMachineFile


@pytest.mark.parametrize("device", [None, "l40s", "mi300x"])
def test_what_is_written_is_read(tmp_path: Path, device: str | None) -> None:
    accelerator = None if device is None else data_sheet(device).accelerator()
    products = {"bfloat16": Products(((1, 2e10), (4, 1.5e10)), 1e-3, 5e9), "float16": Products(((1, 4e10),))}
    here = dataclasses.replace(machine(), accelerator=accelerator, layer_overhead_s=1e-4, products=products)
    here = dataclasses.replace(here, contention=Contention(0.9, 0.8), fast_row_bytes_per_s=3e10)
    machinefile.write(here, tmp_path / "new" / "machine.json")
    assert machinefile.read(tmp_path / "new" / "machine.json") == here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 0}, "its version is 0, and this Headrace reads version 5"),
        ({"version": None}, "its version is None"),
        ({"compute_bytes_per_s": float("nan")}, "compute_bytes_per_s is nan"),
        ({"compute_bytes_per_s": 0}, "above 0"),
        ({"disk": {"bytes_per_s": 0.0}}, "disk.bytes_per_s is 0.0"),
        ({"disk": {"bytes_per_s": -1}}, "above 0"),
        ({"disk": {"bytes_per_s": "fast"}}, "'fast'"),
        ({"disk": None}, "disk is missing"),
        ({"cores": True}, "cores is True"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"layer_overhead_s": float("inf")}, "layer_overhead_s is inf"),
        ({"contention": [0.5, 1]}, "contention is not an object"),
        ({"contention": {"disk_share": 1.5, "compute_share": 1}}, "at most 1"),
        ({"contention": {"disk_share": 1, "compute_share": 0}}, "above 0"),
        ({"contention": {"rows": 1, "disk_share": 1, "compute_share": 1}}, "unknown field contention.rows"),
        ({"fast_row_bytes_per_s": -1}, "fast_row_bytes_per_s is -1"),
        ({"products": {"bfloat16": {"rates": [[1, 1e9]], "layer_overhead_s": -1}}}, "layer_overhead_s is -1"),
        ({"expert_overhead_s": -1}, "above 0"),
        ({"products": [1]}, "products is not an object"),
        ({"products": {"bfloat16": [[1, 1e9]]}}, "products.bfloat16.rates is missing"),
        ({"products": {"bfloat16": {"rates": [[1]]}}}, "products.bfloat16.rates is missing"),
        ({"products": {"bfloat16": {"rates": [[1, 0]]}}}, "products.bfloat16.rate is 0"),
        ({"products": {"bfloat16": {"rates": [[1.5, 1e9]]}}}, "rows is 1.5"),
        ({"products": {"bfloat16": {"rates": []}}}, "do not ascend from 1"),
        ({"products": {"bfloat16": {"rates": [[2, 1e9]]}}}, "do not ascend from 1"),
        ({"products": {"bfloat16": {"rates": [[1, 1e9], [1, 1e9]]}}}, "do not ascend from 1"),
        ({"accelerator": "l40s"}, "accelerator is not an object"),
        ({"accelerator": {"name": "x"}}, "memory_bytes is None"),
        ({"speed": 1}, "unknown field speed"),
    ],
)
def test_what_no_machine_has_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**machinefile.to_json(machine()), **change}))
    with pytest.raises(UnusableMachineFile, match=words):
        machinefile.read(file)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_what_is_no_machine_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UnusableMachineFile):
        machinefile.read(file)


def test_files_that_are_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnusableMachineFile, match="No such file"):
        machinefile.read(tmp_path / "none.json")
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable):
        machinefile.write(machine(), tmp_path / "file" / "machine.json")


def test_the_cache_is_where_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machinefile.cache_file() == tmp_path / "headrace" / "machine.json"


def test_what_is_kept_from_another_version_is_as_if_it_were_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machinefile, "cache_file", lambda: tmp_path / "machine.json")
    assert machinefile.read_cached() is None
    machinefile.write(machine(), machinefile.cache_file())
    assert machinefile.read_cached() == machine()
    machinefile.cache_file().write_text('{"version": 1}')
    assert machinefile.read_cached() is None
