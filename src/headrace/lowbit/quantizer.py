"""transformers' name for checkpoints of ours: with this registered it builds their modules. Knows transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from headrace.lowbit.modules import replace
from headrace.sizing.scheme import QUANT_METHOD, Scheme, scheme_of


class HeadraceConfig(QuantizationConfigMixin):
    """A config.json's `quantization_config` that `headrace quantize` wrote."""

    def __init__(self, **settings: Any) -> None:
        self.quant_method: Any = QUANT_METHOD
        self.settings = {**settings, "quant_method": QUANT_METHOD}

    @property
    def scheme(self) -> Scheme:
        """Raises: UnknownScheme."""
        return scheme_of(self.settings)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        made = cls(**config_dict)
        return (made, kwargs) if return_unused_kwargs else made


class HeadraceQuantizer(HfQuantizer):
    """Replaces modules before weights are loaded; the weights then fit as they are."""

    requires_calibration = True
    """That is: transformers cannot make such a checkpoint, only read it."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config: Any = self.quantization_config
        replace(model, config.scheme, model.dtype)
        return model

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


def register() -> None:
    """Make the quantizer known to transformers; once is enough."""
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(QUANT_METHOD)(HeadraceConfig)
        register_quantizer(QUANT_METHOD)(HeadraceQuantizer)
