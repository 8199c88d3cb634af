"""From what the user named to the new checkpoint: which kind of original it is, and what may not be asked of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from headrace import sources
from headrace.errors import AlreadyQuantized, InvalidSetting, UnsupportedModel
from headrace.importing.header import is_gguf
from headrace.lowbit.modules import candidates
from headrace.lowbit.packing import layout_here
from headrace.quantize.calibration import second_moments
from headrace.quantize.choice import DEFAULT_GROUP_SIZE, choose
from headrace.quantize.gguf import GROUP_SIZE, GgufOriginal
from headrace.quantize.originals import CheckpointOriginal
from headrace.quantize.repack import can_repack, repack
from headrace.quantize.write import Progress, Written, check_output, write
from headrace.sizing.quantized import foreign
from headrace.sizing.scheme import BITS, GROUP_SIZES, QUANT_METHOD, READABLE_METHODS, UnknownScheme, scheme_of

DEFAULT_BITS = 8


def quantize(
    model: str,
    target: Path,
    on_progress: Progress,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    calibrate: bool = True,
    memory: str | None = None,
    trust_remote_code: bool = False,
) -> Written | None:
    """Write `model` with fewer bits into the directory `target`; None if it was only put into another order.

    Without `bits`: those of a .gguf file's own types (4 where they have 4, else 8), 8 for everything else. With 4 bits
    an original that runs here reads a text first, within `memory`, unless `calibrate` is False.

    Raises: UserError, CheckpointError, ReadError, NotWritable, OutputFailed.
    """
    _check_settings(bits, group_size)
    check_output(target)
    file = Path(model).expanduser()
    if file.is_file() and (file.suffix == ".gguf" or is_gguf(file)):
        with tempfile.TemporaryDirectory() as scratch:
            return _quantize_gguf(GgufOriginal(file, model, Path(scratch)), target, on_progress, bits, group_size)
    directory = sources.resolve(model, trust_remote_code=trust_remote_code, on_progress=on_progress)
    settings = sources.read_config(directory, model).get("quantization_config") or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == QUANT_METHOD:
        _repack(model, directory, settings, target, on_progress)
        return None
    if method is not None and method not in READABLE_METHODS:
        raise foreign(model, str(method))
    original = CheckpointOriginal(directory, model, trust_remote_code=trust_remote_code)
    bits, group_size = bits or DEFAULT_BITS, group_size or DEFAULT_GROUP_SIZE
    scheme = choose(original.model, original.name, bits=bits, group_size=group_size)
    if bits == 4 and calibrate and method is None:
        columns = {name: each.weight.shape[1] for name, each in candidates(original.model) if scheme.bits_of(name) == 4}
        original.moments = second_moments(directory, columns, on_progress, memory=memory)
    return write(original, scheme, target, on_progress)


def runs(model: str) -> bool:
    """Whether what was quantized can be run to be compared: not if others have quantized it before."""
    path = Path(model).expanduser()
    return path.is_file() or not sources.read_config(sources.resolve(model), model).get("quantization_config")


def _check_settings(bits: int | None, group_size: int | None) -> None:
    if bits is not None and bits not in BITS:
        raise InvalidSetting(setting="--bits", value=str(bits), allowed="8 or 4", suggestion="8, or 4 for half of it")
    if group_size is not None and group_size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        nearest = min(GROUP_SIZES, key=lambda size: abs(size - group_size))
        raise InvalidSetting(
            setting="--group-size", value=str(group_size), allowed=f"one of {allowed}", suggestion=str(nearest)
        )
    if group_size is not None and bits == 8:
        raise InvalidSetting(
            setting="--group-size",
            value=f"{group_size} with --bits 8",
            allowed="left out there: with 8 bits each row has one scale",
            suggestion=f"{group_size} together with --bits 4",
        )


def _quantize_gguf(
    original: GgufOriginal, target: Path, on_progress: Progress, bits: int | None, group_size: int | None
) -> Written:
    """Groups are those of the file, if nothing else was asked for: then 4-bit numbers stay what they are."""
    has_four = any(original.has_four_bits(name) for name, _ in original.tensors)
    others = 8 if bits is None else None

    def bits_of(module: str) -> int | None:
        return 4 if bits != 8 and original.has_four_bits(f"{module}.weight") else others

    scheme = choose(
        original.model,
        original.name,
        bits=bits or (4 if has_four else 8),
        group_size=group_size or GROUP_SIZE,
        bits_of=bits_of,
    )
    return write(original, scheme, target, on_progress)


def _repack(model: str, directory: Path, settings: dict[str, object], target: Path, on_progress: Progress) -> None:
    try:
        scheme = scheme_of(settings)
    except UnknownScheme as unknown:
        suggestion = "Quantize the original again with this Headrace."
        raise UnsupportedModel(model=model, reason=str(unknown), suggestion=suggestion) from None
    here = layout_here()
    if not can_repack(scheme, here):
        raise AlreadyQuantized(model=model, bits=scheme.bits)
    repack(directory, scheme, here, target, on_progress)
