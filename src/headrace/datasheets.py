"""GPUs by their makers' data sheets, for plans on machines that are not here. Knows no model and measures nothing.

Memory is the nominal size in bytes (GB is 10**9), which is what a driver reports within a few per cent; rates are the
data sheets', of dense products in 16-bit floats. A link copies less than its data sheet says: see LINK_SHARE.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from headrace.core import Accelerator, Link, Tier
from headrace.errors import InvalidSetting

LINK_SHARE = 0.8
"""Of a PCIe link's raw rate: what packets and their headers leave of it for large copies, as a rule of thumb."""

CONTEXT_BYTES = 600 * 2**20
"""What a CUDA context and the workspaces of its libraries take of a GPU. An assumption: not measured yet."""

_PCIE_GB_PER_S = {3: 15.75, 4: 31.5, 5: 63.0}
"""Of 16 lanes, one way, by generation."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One GPU."""

    name: str
    memory_gb: float
    memory_gb_per_s: float
    dense_tflops: float
    """bfloat16 or float16, without sparsity."""
    pcie: int
    """Generation of its link, with 16 lanes."""
    source: str

    def accelerator(self) -> Accelerator:
        return Accelerator(
            name=self.name,
            memory_bytes=int(self.memory_gb * 1e9),
            link=Link(Tier.HOST, Tier.DEVICE, LINK_SHARE * _PCIE_GB_PER_S[self.pcie] * 1e9),
            memory_bytes_per_s=self.memory_gb_per_s * 1e9,
            operations_per_s=self.dense_tflops * 1e12,
            source=self.source,
        )


def _nvidia(name: str, memory_gb: float, memory_gb_per_s: float, dense_tflops: float, pcie: int) -> DataSheet:
    return DataSheet(name, memory_gb, memory_gb_per_s, dense_tflops, pcie, f"NVIDIA {name} data sheet")


_SHEETS = (
    _nvidia("T4", 16, 320, 65, 3),
    _nvidia("V100", 32, 900, 125, 3),
    _nvidia("A10", 24, 600, 125, 4),
    _nvidia("L4", 24, 300, 121, 4),
    _nvidia("A40", 48, 696, 149.7, 4),
    _nvidia("L40S", 48, 864, 362, 4),
    _nvidia("A100-40GB", 40, 1555, 312, 4),
    _nvidia("A100-80GB", 80, 1935, 312, 4),
    _nvidia("H100", 80, 3350, 989, 5),
    _nvidia("H200", 141, 4800, 989, 5),
    _nvidia("B200", 180, 8000, 2250, 5),
    _nvidia("RTX-3090", 24, 936, 71, 4),
    _nvidia("RTX-4090", 24, 1008, 165.2, 4),
    _nvidia("RTX-5090", 32, 1792, 209.5, 5),
    _nvidia("RTX-6000-Ada", 48, 960, 182.2, 4),
    DataSheet("MI300X", 192, 5300, 1307.4, 5, "AMD Instinct MI300X data sheet"),
)


def known_names() -> list[str]:
    """As a user may write them after --device."""
    return [sheet.name.lower() for sheet in _SHEETS]


def data_sheet(name: str) -> DataSheet:
    """The GPU that `name` means: `L40S`, `rtx 4090`. Raises: InvalidSetting with the nearest names."""
    wanted = _plain(name)
    for sheet in _SHEETS:
        if _plain(sheet.name) == wanted:
            return sheet
    near = [known for known in known_names() if _plain(known).startswith(wanted)] if wanted else []
    near = near or difflib.get_close_matches(name.lower(), known_names(), n=1, cutoff=0.0)
    raise InvalidSetting(
        setting="--device",
        value=repr(name),
        allowed=f"cpu, cuda:0, or a GPU by its data sheet ({', '.join(known_names())})",
        suggestion=near[0],
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", name.lower())
