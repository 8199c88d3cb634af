"""Run language models that are larger than memory by streaming their weights.

Public names are resolved when they are first used, so that `import headrace` loads neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
    from headrace.engine import load, report
    from headrace.errors import HeadraceError
    from headrace.offloading import Handle, offload

__version__ = "0.1.0"

__all__ = [
    "Handle",
    "HeadraceError",
    "OffloadConfig",
    "PrefetchOffloadConfig",
    "UVAOffloadConfig",
    "__version__",
    "load",
    "offload",
    "report",
]

_HOMES = {
    "Handle": "headrace.offloading",
    "HeadraceError": "headrace.errors",
    "OffloadConfig": "headrace.config",
    "PrefetchOffloadConfig": "headrace.config",
    "UVAOffloadConfig": "headrace.config",
    "load": "headrace.engine",
    "offload": "headrace.offloading",
    "report": "headrace.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
