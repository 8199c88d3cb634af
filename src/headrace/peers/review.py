"""What a command line of vLLM would do with a model: what leaves the GPUs, what vLLM ignores without a word, what fits.

Pure: no model is loaded and nothing is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.config import OffloadConfig, matches
from headrace.core import Machine
from headrace.errors import NothingOffloaded
from headrace.peers import vllm
from headrace.peers.budget import Share, share
from headrace.peers.commandline import ServeLine
from headrace.peers.layout import PeerModel, PeerParam
from headrace.peers.vllm import NOTHING, Offloaded
from headrace.units import format_bytes


@dataclass(frozen=True, slots=True)
class Review:
    """One command line, one model."""

    config: OffloadConfig | None
    """None if vLLM takes the flags and offloads nothing, whatever the model."""
    offloaded: Offloaded
    share: Share
    """Of one GPU."""
    requested: bool
    """Whether any offload flag was given."""
    ignored: tuple[str, ...]
    """What vLLM does not do although it was asked to, and does not say."""
    warnings: tuple[str, ...]
    """What works, but badly."""
    misfits: tuple[str, ...]
    """What will not fit."""

    @property
    def ok(self) -> bool:
        """False if the line will not do what it was written for."""
        return not self.misfits and not (self.requested and not self.offloaded.layers)


def review(line: ServeLine, model: PeerModel, machine: Machine | None, tokens: int, host_bytes: int | None) -> Review:
    """`machine` with the GPU that it is meant for, or None; `tokens`: the longest sequence.

    Raises: InvalidOffloadConfig, InvalidSetting: what vLLM itself refuses.
    """
    ignored = []
    try:
        config: OffloadConfig | None = line.config()
    except NothingOffloaded as error:
        config = None
        ignored.append(f"{error.request}: vLLM starts and offloads nothing, since {error.reason}")
    taken = NOTHING if config is None else vllm.offloaded(model, config)
    if config is not None:
        ignored += [*config.notes, *_without_effect(config, model, taken)]
    split = share(model, taken, tokens=tokens, sequences=line.sequences, graphs=line.has_graphs)
    return Review(
        config=config,
        offloaded=taken,
        share=split,
        requested=bool(line.offload),
        ignored=tuple(ignored),
        warnings=() if config is None else tuple(_weaknesses(config, model, taken)),
        misfits=tuple(_misfits(line, split, taken, machine, host_bytes)),
    )


def _without_effect(config: OffloadConfig, model: PeerModel, taken: Offloaded) -> Iterator[str]:
    """Flags that select nothing in this model."""
    backend, count = config.resolved_backend, len(model.layers)
    if backend == "prefetch":
        prefetch = config.prefetch
        group, number = prefetch.offload_group_size, prefetch.offload_num_in_group
        selectors, flag = prefetch.offload_params, "--offload-params"
        reached = [layer for index, layer in enumerate(model.layers) if index % group >= group - number]
        if not reached:
            yield (
                f"--offload-group-size {group} --offload-num-in-group {number}: layer i is offloaded if i % {group} >= "
                f"{group - number}, and the model has {count} layers, so none is; --offload-group-size {count} takes "
                "the last ones"
            )
            return
    elif backend == "uva":
        selectors, flag = config.uva.cpu_offload_params, "--cpu-offload-params"
        reached = list(model.layers)
    else:
        return
    for selector in sorted(selectors):
        if not any(matches(frozenset({selector}), param.name) for layer in reached for param in layer):
            yield f"{flag} {selector}: {_nearest(selector, reached)}"
    asked = config.uva.budget_bytes
    if backend == "uva" and 0 < taken.nbytes < asked and not selectors:
        yield (
            f"--cpu-offload-gb: {format_bytes(asked)} were asked for, and the layers have only "
            f"{format_bytes(taken.nbytes)}; embeddings, head and towers are not offloaded"
        )


def _nearest(selector: str, layers: list[tuple[PeerParam, ...]]) -> str:
    words = vllm.segments(layers)
    near = difflib.get_close_matches(selector.split(".")[-1], words, n=3, cutoff=0.5) or words
    return (
        "no parameter inside of a layer has it as whole dotted segments of its name (embeddings, head and towers are "
        f"never offloaded); there are: {', '.join(near)}"
    )


def _weaknesses(config: OffloadConfig, model: PeerModel, taken: Offloaded) -> Iterator[str]:
    backend, prefetch = config.resolved_backend, config.prefetch
    number, step = prefetch.offload_num_in_group, prefetch.offload_prefetch_step
    if backend == "prefetch" and taken.layers:
        if step < number:
            yield (
                f"--offload-prefetch-step {step} is smaller than --offload-num-in-group {number}: offloaded layers "
                f"follow each other, and copies will be waited for; --offload-prefetch-step {number} avoids that"
            )
        if taken.saved_bytes <= 0:
            yield (
                f"{format_bytes(taken.nbytes)} leave the GPU and {format_bytes(taken.pool_bytes)} of buffers come: "
                "nothing is saved; offload more layers, or take a smaller --offload-prefetch-step"
            )
    if backend == "uva" and model.has_experts and not config.uva.cpu_offload_params and taken.layers:
        hot = sum(param.nbytes for _, params in taken.layers for param in params if param.used_share == 1)
        only = vllm.uva(model, config.uva.budget_bytes, frozenset({"experts"}))
        if hot and only.moved_bytes_per_token < taken.moved_bytes_per_token:
            yield (
                f"{format_bytes(hot)} of what leaves the GPU are dense weights that every token reads over the link, "
                f"{format_bytes(taken.moved_bytes_per_token)} per token in all; with --cpu-offload-params experts it "
                f"would be {format_bytes(only.moved_bytes_per_token)}"
            )
    if backend == "uva" and (over := taken.nbytes - config.uva.budget_bytes) > 0:
        yield f"the parameter that crosses the budget goes too: {format_bytes(over)} more than --cpu-offload-gb"


def _misfits(
    line: ServeLine, split: Share, taken: Offloaded, machine: Machine | None, host_bytes: int | None
) -> Iterator[str]:
    gpu = None if machine is None else machine.accelerator
    if gpu is not None:
        capacity = int(gpu.memory_bytes * line.utilization)
        if split.total_bytes > capacity:
            yield (
                f"one GPU needs about {format_bytes(split.total_bytes)} and may fill {format_bytes(capacity)} "
                f"({line.utilization:g} of {gpu.name})"
            )
    pinned = split.pinned_bytes * line.gpus
    if host_bytes is not None and pinned > host_bytes:
        yield (
            f"the host needs {format_bytes(pinned)} of pinned memory for {format_bytes(taken.nbytes * line.gpus)} of "
            f"weights (each tensor takes the next power of two), and has {format_bytes(host_bytes)}"
        )
