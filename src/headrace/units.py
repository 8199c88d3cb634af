"""Sizes, rates and times as text, and sizes from text. Knows nothing of models, files or tensors.

GiB in text is always 2**30 bytes; GB is accepted from users as 10**9 and never printed.
"""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*(?P<number>[+-]?\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*$")
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def split_size(text: str) -> tuple[float, str] | None:
    """The number and the unit (as written, maybe empty) of a size, or None if `text` is not a size at all."""
    match = _SIZE.match(text)
    return (float(match["number"]), match["unit"]) if match else None


def unit_bytes(unit: str) -> int | None:
    """Bytes in one `unit` ("GiB" is 2**30, "GB" is 10**9), or None for a unit nobody knows."""
    return _UNITS.get(unit.lower())


def format_bytes(nbytes: float) -> str:
    """`3.25 GiB`, `288 MiB`, `512 B`: three significant digits (four from 1000 on), binary units."""
    size, sign = abs(nbytes), "-" if nbytes < 0 else ""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        value = size / scale
        if value >= 0.9995:  # 1024 MiB is 1 GiB, and so is what would be rounded to it
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{size:.0f} B"


def format_flag_bytes(nbytes: int) -> str:
    """A size that can be pasted after a flag and is never below `nbytes`: `3.25GiB`, `820MiB`."""
    if nbytes < 2**30:
        return f"{-(-nbytes // 2**20)}MiB"
    hundredths = -(-nbytes * 100 // 2**30)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + "GiB"


def format_rate(bytes_per_s: float) -> str:
    """`1.91 GiB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_seconds(seconds: float) -> str:
    """`1.86 s`, `35.2 ms`, `12 us`."""
    if seconds >= 0.99995:  # 1000.0 ms is 1 s, and so is what would be rounded to it
        return f"{seconds:.2f} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
