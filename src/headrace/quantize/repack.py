"""A checkpoint of ours brought into the order that this processor's 4-bit kernel reads. Changes no number."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import store
from headrace.core import StoredTensor
from headrace.errors import ReadError
from headrace.importing.writer import TensorSpec
from headrace.lowbit.packing import HALVES, pack, unpack
from headrace.quantize.originals import add_scheme, copy_metadata, rows_per_piece
from headrace.quantize.write import Progress, write_as_is
from headrace.sizing.scheme import Scheme


def can_repack(scheme: Scheme, here: str) -> bool:
    """Whether the checkpoint is of another layout, and both are known."""
    return scheme.layout not in ("", here) and scheme.layout in HALVES and here in HALVES


def repack(source: Path, scheme: Scheme, here: str, target: Path, on_progress: Progress) -> None:
    """Write `source` again into `target`, with its 4-bit rows in the order `here`.

    Raises: OutputExists, NoDiskSpace, NotWritable, OutputFailed, ReadError, CheckpointError.
    """
    checkpoint = store.open_checkpoint(source)
    tensors = checkpoint.tensors
    order = sorted(tensors, key=lambda name: (tensors[name].segment.file, tensors[name].segment.offset))
    specs = [TensorSpec(name, tensors[name].dtype, tensors[name].shape) for name in order]
    done, total = 0, checkpoint.nbytes

    def pieces(spec: TensorSpec) -> Iterator[Any]:
        nonlocal done
        stored = tensors[spec.name]
        module, _, attribute = spec.name.rpartition(".")
        is_packed = attribute == "weight" and scheme.bits_of(module) == 4
        for raw in _read(checkpoint.path(stored.segment.file), stored):
            if is_packed:
                rows = torch.from_numpy(raw).view(-1, stored.shape[1])
                raw = pack(unpack(rows, scheme.layout), here).numpy().reshape(-1)
            yield raw
            done += raw.size
            on_progress("bringing into order", done, total)

    def finish(directory: Path) -> None:
        copy_metadata(source, directory)
        add_scheme(directory, dataclasses.replace(scheme, layout=here))

    write_as_is(target, specs, pieces, finish)


def _read(path: Path, stored: StoredTensor) -> Iterator[Any]:
    """The bytes of a tensor, by pieces of whole rows in multiples of a kernel's block."""
    row_bytes = stored.nbytes // stored.shape[0] if stored.shape and stored.shape[0] else stored.nbytes
    step = row_bytes * rows_per_piece(max(1, row_bytes))
    for start in range(0, stored.nbytes, max(step, 1)):
        count = min(step, stored.nbytes - start)
        offset = stored.segment.offset + start
        try:
            raw = np.fromfile(path, np.uint8, count, offset=offset)
        except OSError as error:
            raise ReadError(file=str(path), offset=offset, nbytes=count, reason=error.strerror or str(error)) from None
        if raw.size != count:
            raise ReadError(file=str(path), offset=offset, nbytes=count, reason="the file ends before it")
        yield raw
