"""Where the weights of blocks live and how they get to the device. A backend is a name, loaded late."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.backends.base import Backend

REGISTRY = {
    "resident": "headrace.backends.resident:ResidentBackend",
    "prefetch": "headrace.backends.prefetch:PrefetchBackend",
    "uva": "headrace.backends.uva:UvaBackend",
}


def backend_class(name: str) -> type[Backend]:
    """The class behind a backend's name."""
    module, _, attribute = REGISTRY[name].partition(":")
    loaded: type[Backend] = getattr(importlib.import_module(module), attribute)
    return loaded
