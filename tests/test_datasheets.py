"""GPUs by name, however it is written."""

import pytest

from headrace.datasheets import data_sheet, known_names
from headrace.errors import InvalidSetting


@pytest.mark.parametrize("name", ["l40s", "L40S", "NVIDIA L40S", "rtx-4090", "RTX 4090", "GeForce RTX 4090", "mi300x"])
def test_names_are_found_however_they_are_written(name: str) -> None:
    assert data_sheet(name).name.lower().replace("-", "") in name.lower().replace(" ", "").replace("-", "")


def test_every_sheet_names_its_source_and_has_rates() -> None:
    for name in known_names():
        made = data_sheet(name).accelerator()
        assert "data sheet" in made.source
        assert min(made.memory_bytes, made.memory_bytes_per_s, made.operations_per_s, made.link.bytes_per_s) > 1e9
        assert made.link.bytes_per_s < made.memory_bytes_per_s


@pytest.mark.parametrize(
    ("name", "nearest"), [("a100", "a100-40gb"), ("l40z", "l40s"), ("", "l4"), ("rtx4080", "rtx-4090")]
)
def test_an_unknown_name_suggests_one_that_is_known(name: str, nearest: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        data_sheet(name)
    assert caught.value.suggestion in known_names()
    if name:
        assert caught.value.suggestion == nearest
