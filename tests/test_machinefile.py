"""A machine survives its file; what is no machine is refused with the field that is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import machine

from headrace import machinefile
from headrace.datasheets import data_sheet
from headrace.errors import NotWritable, UnusableMachineFile


@pytest.mark.parametrize("device", [None, "l40s", "mi300x"])
def test_what_is_written_is_read(tmp_path: Path, device: str | None) -> None:
    accelerator = None if device is None else data_sheet(device).accelerator()
    here = dataclasses.replace(machine(), accelerator=accelerator, layer_overhead_s=1e-4)
    machinefile.write(here, tmp_path / "new" / "machine.json")
    assert machinefile.read(tmp_path / "new" / "machine.json") == here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 0}, "its version is 0, and this Headrace reads version 1"),
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
