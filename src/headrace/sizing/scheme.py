"""How a checkpoint that `headrace quantize` wrote holds its matrices. Pure: names, dtypes and shapes; no bytes.

What lies on disk is what torch's kernels for weights of few bits read, so that nothing is repacked on its way:

- 8 bits: `weight` int8 (rows, columns), `weight_scale` (rows), in the model's dtype. A number is `q * scale`.
- 4 bits: `weight` uint8 (rows, columns / 2) in the kernel's order (`lowbit.packing`), `weight_scale_and_zero`
  (columns / group, rows, 2), in the model's dtype. A number is `(q - 8) * scale + zero`, q from 0 to 15.

The config's `quantization_config` says which modules are stored so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import Reason

QUANT_METHOD = "headrace"
VERSION = 1
BITS = (8, 4)
GROUP_SIZES = (32, 64, 128, 256)
"""Numbers of a row that share a scale, that the 4-bit kernel has."""
BLOCK_ROWS = 64
"""The 4-bit kernel takes rows by so many."""
READABLE_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""Forms of others that `headrace quantize` reads."""
SCALE, SCALE_AND_ZERO = "weight_scale", "weight_scale_and_zero"


class UnknownScheme(Reason):
    """A quantization_config of ours that this version does not read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in place of a matrix; the dtype is torch's name, empty for the model's own."""

    attribute: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """Which modules are stored in how many bits."""

    bits: int
    """As asked for; single modules may have others."""
    group_size: int
    """Of what has 4 bits."""
    layout: str
    """The order of packed 4-bit rows (`lowbit.packing`); empty if there are none."""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Bits by the name of a module, in which `*` stands for the number of a layer. Whole names come before those."""

    def bits_of(self, module: str) -> int | None:
        """None for a module that is stored as it was."""
        exact = self.modules.get(module)
        return exact if exact is not None else self.modules.get(_any_layer(module))

    def stored(self, module: str, rows: int, columns: int) -> tuple[Stored, ...] | None:
        """What is stored of a module's matrix; None if it is left as it was."""
        bits = self.bits_of(module)
        if bits is None:
            return None
        if bits == 8:
            return (Stored("weight", "int8", (rows, columns)), Stored(SCALE, "", (rows,)))
        groups = columns // self.group_size
        return (Stored("weight", "uint8", (rows, columns // 2)), Stored(SCALE_AND_ZERO, "", (groups, rows, 2)))

    def to_json(self) -> dict[str, Any]:
        """The `quantization_config` of a config.json."""
        return {
            "quant_method": QUANT_METHOD,
            "version": VERSION,
            "bits": self.bits,
            "group_size": self.group_size,
            "layout": self.layout,
            "modules": dict(self.modules),
        }


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config` of ours. Raises: UnknownScheme."""
    if settings.get("version") != VERSION:
        raise UnknownScheme(
            f"its quantization has version {settings.get('version')!r}, and this Headrace reads {VERSION}"
        )
    bits, group, layout = settings.get("bits"), settings.get("group_size"), settings.get("layout")
    modules = settings.get("modules")
    if bits not in BITS or group not in GROUP_SIZES or not isinstance(layout, str) or not isinstance(modules, Mapping):
        raise UnknownScheme("its quantization_config lacks usable bits, group_size, layout or modules")
    if wrong := [name for name, some in modules.items() if some not in BITS]:
        raise UnknownScheme(f"its quantization_config gives {wrong[0]!r} {modules[wrong[0]]!r} bits")
    return Scheme(bits, group, layout, dict(modules))


def folded(modules: Mapping[str, int], others: Iterable[str] = ()) -> dict[str, int]:
    """The same with one entry for all layers where they agree; `others` are modules that must not be named by it."""
    by_pattern: dict[str, set[int | None]] = {_any_layer(name): {None} for name in others}
    for name, bits in modules.items():
        by_pattern.setdefault(_any_layer(name), set()).add(bits)
    return {
        (_any_layer(name) if len(by_pattern[_any_layer(name)]) == 1 else name): bits for name, bits in modules.items()
    }


@functools.cache
def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
