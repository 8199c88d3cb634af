"""The public model configurations in tests/data/configs, and transformers' own models of them on the meta device."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from headrace.sizing.fields import Fields

FOLDER = Path(__file__).parent / "data" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def fields(name: str, **changes: Any) -> Fields:
    return Fields({**config(name), **changes}, name)


QUANTIZED = [name for name in NAMES if "quantization_config" in config(name)]
PLAIN = [name for name in NAMES if name not in QUANTIZED]


@functools.cache
def meta_model(name: str) -> Any:
    """The class that the config names, without its quantization, in the config's dtype and without memory."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    values = {key: value for key, value in config(name).items() if key not in ("quantization_config", "auto_map")}
    kind: Any = getattr(transformers, values["architectures"][0])
    dtype = getattr(torch, Fields(values, name).dtype or "float32")
    with torch.device("meta"), no_init_weights():
        model = kind._from_config(kind.config_class.from_dict(values), dtype=dtype)
    model.tie_weights()
    return model
