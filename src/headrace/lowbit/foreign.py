"""Weights that others have quantized, read as transformers' converters: each becomes a matrix in the model's dtype.

compressed-tensors, fp8 and MXFP4 are read by transformers' own operations. GPTQ and AWQ are unpacked here, since the
packages that transformers needs for them run on GPUs only. Knows transformers; keeps nothing in memory.

GPTQ: https://github.com/AutoGPTQ/AutoGPTQ (qlinear_cuda_old.py).
AWQ: https://github.com/casper-hansen/AutoAWQ (gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from headrace.errors import Reason

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of an int32's eight places each of eight columns lies."""


class UnreadableQuantization(Reason):
    """A form that is known, in a variant that is not."""


def dequantizer(settings: Mapping[str, Any]) -> HfQuantizer:
    """What transformers asks for the conversions of a checkpoint with this `quantization_config`.

    Raises: UnreadableQuantization.
    """
    method = settings.get("quant_method")
    if method in ("gptq", "awq"):
        reader = _GptqReader(settings) if method == "gptq" else _AwqReader(settings)
        reader.check()
        return reader
    try:
        made: HfQuantizer = AutoHfQuantizer.from_config({**settings, "dequantize": True}, pre_quantized=True)
        made.validate_environment()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever transformers and the packages below it raise
        raise UnreadableQuantization(f"transformers cannot read its quantization ({error})") from error
    return made


class _Settings:
    """What a quantizer asks of its config."""

    dequantize = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.quant_method = settings["quant_method"]
        self.bits = settings.get("bits", 4)
        self.version = settings.get("version", "gemm")
        self.zeros_are_one_less = settings.get("checkpoint_format", "gptq") != "gptq_v2"


class _Reader(HfQuantizer):
    """The conversions alone: modules stay the model's own."""

    allowed_bits: tuple[int, ...] = (4,)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        made: Any = _Settings(settings)  # no config of transformers: those check for packages
        super().__init__(made)

    def check(self) -> None:
        """Raises: UnreadableQuantization."""
        settings: Any = self.quantization_config
        if settings.bits not in self.allowed_bits or settings.version != "gemm":
            raise UnreadableQuantization(
                f"{settings.quant_method} with {settings.bits} bits (version {settings.version!r}) is not read here"
            )

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


class _Unpack(ConversionOps):
    """A matrix out of the tensors of its module."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.settings = hf_quantizer.quantization_config

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        name = kwargs["full_layer_name"]
        return {name: self.matrix(parts).to(kwargs["model"].get_parameter(name).dtype)}

    def matrix(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


class _UnpackGptq(_Unpack):
    """(q - zero) * scale; q along the inputs, zeros along the outputs, in int32 from the lowest bits on."""

    def matrix(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        bits, scales = self.settings.bits, parts["scales"].float()
        numbers = _unpacked(parts["qweight"], bits).transpose(1, 2).reshape(-1, scales.shape[1])  # (inputs, outputs)
        zeros = _unpacked(parts["qzeros"], bits).reshape(scales.shape)
        if self.settings.zeros_are_one_less:
            zeros = zeros + 1
        inputs = torch.arange(len(numbers))
        group = parts["g_idx"].long() if "g_idx" in parts else inputs * len(scales) // len(numbers)
        return ((numbers - zeros[group]) * scales[group]).t()


class _UnpackAwq(_Unpack):
    """(q - zero) * scale; both along the outputs, in int32 whose places are shuffled."""

    def matrix(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scales = parts["scales"].float()
        places = torch.tensor(_AWQ_ORDER)
        numbers = _unpacked(parts["qweight"], 4)[..., places].reshape(-1, scales.shape[1])
        zeros = _unpacked(parts["qzeros"], 4)[..., places].reshape(scales.shape)
        size = len(numbers) // len(scales)
        return ((numbers - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).t()


class _GptqReader(_Reader):
    allowed_bits = (2, 4, 8)
    serialized_names: Mapping[str, list[str]] = {"weight": ["qweight", "qzeros", "scales", "g_idx"]}  # type: ignore[assignment]

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _UnpackGptq}


class _AwqReader(_Reader):
    serialized_names: Mapping[str, list[str]] = {"weight": ["qweight", "qzeros", "scales"]}  # type: ignore[assignment]

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _UnpackAwq}


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of each int32, the lowest first, in a dimension of their own, as float32."""
    shifts = torch.arange(0, 32, bits)
    numbers: torch.Tensor = (packed[..., None].long() >> shifts) & (2**bits - 1)
    return numbers.float()
