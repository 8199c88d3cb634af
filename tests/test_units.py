"""Sizes as people read them, and sizes that can be pasted after a flag and are never too small."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.settings import parse_size
from headrace.units import format_bytes, format_flag_bytes, format_rate, format_seconds, split_size, unit_bytes

SIZES = st.one_of(st.integers(1, 2**50), st.integers(0, 50).map(lambda power: 2**power))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (288 * 2**20, "288 MiB"),
        (3.25 * 2**30, "3.25 GiB"),
        (9.99 * 2**30, "9.99 GiB"),
        (9.996 * 2**30, "10.0 GiB"),
        (99.94 * 2**30, "99.9 GiB"),
        (99.96 * 2**30, "100 GiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**40, "1.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_as_text(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(SIZES)
@example(2**20 - 1)
@example(2**30 - 2**19)
def test_bytes_as_text_are_right_to_half_of_the_last_digit(nbytes: int) -> None:
    text = format_bytes(nbytes)
    split = split_size(text)
    assert split is not None
    number, unit = split
    scale = unit_bytes(unit)
    assert scale is not None
    assert abs(number * scale - nbytes) <= 0.00501 * nbytes
    assert number < 1024 or unit == "TiB"


@given(SIZES)
@example(2**30)
@example(2**30 + 1)
@example(2**30 - 1)
@example(round(3.26 * 2**30))
def test_a_size_to_paste_after_a_flag_is_enough_and_hardly_more(nbytes: int) -> None:
    text = format_flag_bytes(nbytes)
    assert " " not in text
    assert nbytes <= parse_size(text, "memory") <= nbytes + max(2**20, 2**30 // 100 + 1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1MiB"), (820 * 2**20, "820MiB"), (820 * 2**20 + 1, "821MiB"), (3 * 2**30, "3GiB"), (3.25 * 2**30, "3.25GiB")],
)
def test_a_size_to_paste_is_short(nbytes: float, text: str) -> None:
    assert format_flag_bytes(int(nbytes)) == text


def test_rates() -> None:
    assert format_rate(1.91 * 2**30) == "1.91 GiB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.86, "1.86 s"),
        (75, "75.00 s"),
        (0.99999, "1.00 s"),
        (0.9994, "999.4 ms"),
        (0.0352, "35.2 ms"),
        (0.001, "1.0 ms"),
        (0.0009999, "1.0 ms"),
        (12e-6, "12 us"),
        (0, "0 us"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("3GiB", (3.0, "GiB")),
        (" 3.5 gb ", (3.5, "gb")),
        ("3", (3.0, "")),
        ("-1MiB", (-1.0, "MiB")),
        ("+1B", (1.0, "B")),
        ("3 furlongs", (3.0, "furlongs")),
        ("", None),
        ("GiB", None),
        ("1e3", None),
        ("1,5GiB", None),
        ("3GiB of it", None),
        (".5GiB", None),
        ("0x10", None),
    ],
)
def test_a_size_in_two(text: str, split: tuple[float, str] | None) -> None:
    assert split_size(text) == split


def test_units() -> None:
    assert [unit_bytes(unit) for unit in ("B", "KiB", "MiB", "GiB", "TiB")] == [1, 2**10, 2**20, 2**30, 2**40]
    assert [unit_bytes(unit) for unit in ("kB", "MB", "GB", "TB")] == [10**3, 10**6, 10**9, 10**12]
    assert unit_bytes("gib") == unit_bytes("GIB") == 2**30
    assert unit_bytes("furlongs") is None
    assert unit_bytes("") is None
