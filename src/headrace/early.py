"""Reading begins before torch is imported: weights that will stay in memory for sure arrive meanwhile.

Until there is a model to put them into, seconds pass in which the disk and a core have nothing to do. Knows the
headers, the config and the budget. Does not know what the libraries will take, how many tokens a prompt has, or how
transformers holds a weight: the engine's own plan decides, and what it does not keep of this is given back before
anything else is read. What cannot be told here is not read ahead, and is no error: the engine finds out the same, and
has the words for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace import forecast, machine, sources, store
from headrace.config import OffloadConfig, parse_size
from headrace.copying.ahead import ReadAhead
from headrace.core import Link, Machine, StoredTensor, Tier
from headrace.metrics import Metrics
from headrace.planner import plan

logger = logging.getLogger(__name__)

LESS_BYTES = (0, 64 * 2**20, 128 * 2**20)
"""Budgets that are planned for are smaller by so much: what is read ahead stays in memory in each of these plans. What
running takes is known to some 20 MiB here, and measuring the processor takes 48 for a moment."""


@contextlib.contextmanager
def reading(
    model: str | Path,
    *,
    memory: str | int | None = None,
    offload: OffloadConfig | None = None,
    context: int,
    tracing: bool = False,
) -> Iterator[ReadAhead | None]:
    """Read ahead while libraries are imported inside of it, for `Engine.open` to go on with, which closes it then.

    `memory` is the budget of the process, `context` the tokens that its plan will be for: rather too many. None if
    nothing is known to stay. An exception ends the reading.
    """
    begun = _begin(model, memory, offload or OffloadConfig(), context, Metrics(tracing=tracing))
    try:
        yield begun
    except BaseException:
        if begun is not None:
            begun.close()
        raise


def _begin(
    model: str | Path, memory: str | int | None, config: OffloadConfig, context: int, metrics: Metrics
) -> ReadAhead | None:
    try:
        directory = sources.directory_here(model)
        if directory is None:
            return None
        checkpoint = store.open_checkpoint(directory)
        budget = None if memory is None else parse_size(memory)
        tensors = _staying(checkpoint, budget, config, context)
        return ReadAhead(checkpoint, tensors, metrics) if tensors else None
    except Exception as error:  # whatever it is, the engine meets it too
        logger.debug("nothing is read ahead: %r", error)
        return None


def _staying(
    checkpoint: store.Checkpoint, memory_bytes: int | None, config: OffloadConfig, context: int
) -> Sequence[StoredTensor]:
    """Stored tensors that are parameters as they are, and that no plan for these budgets moves."""
    subject = forecast.subject_in(checkpoint.directory, str(checkpoint.directory), checkpoint.tensors)
    # No rate decides what stays without an accelerator, so none is measured.
    here = Machine(machine.available_bytes(), machine.cores(), Link(Tier.DISK, Tier.DEVICE, 1.0), 1.0)
    context = min(context, subject.longest or context)
    demand = forecast.demand_for(subject, here, memory=memory_bytes, host_memory=None, context=context, batch=1)
    budget, baseline = demand.memory_bytes, max(demand.baseline_bytes, machine.resident_bytes())
    assert budget is not None
    moved: set[str] = set()  # names of parameters, and of tables that are looked up by rows
    for less_bytes in LESS_BYTES:
        smaller = dataclasses.replace(demand, memory_bytes=budget - less_bytes, baseline_bytes=baseline)
        made = plan(subject.shape, here, smaller, config)
        moved.update(made.gathered)
        moved.update(name for _, names in made.streamed for name in names)
    params = [
        param
        for block in subject.shape.blocks
        for param in block.params
        if block.name not in moved and param.name not in moved and param.movable and param.nbytes
    ]
    stored = [(checkpoint.tensors.get(param.name), param.nbytes) for param in params]
    return [tensor for tensor, nbytes in stored if tensor is not None and tensor.nbytes == nbytes]
