"""Flags for vLLM and SGLang, from a model and GPUs that need not be here. Wires the forecast and the peers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import errors, probing
from headrace.forecast import Subject, machine_for, read_subject
from headrace.peers.budget import Share
from headrace.peers.commandline import ServeLine
from headrace.peers.layout import PeerModel, peer_model
from headrace.peers.recommend import Recommended, Wish, recommend
from headrace.peers.review import Review, review
from headrace.planner import DEFAULT_CONTEXT, MEMORY_SHARE
from headrace.sizing.scheme import QUANT_METHOD

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Advice:
    """The command line to run there, and what it leads to."""

    subject: Subject
    wish: Wish
    made: Recommended
    notes: tuple[str, ...]


def advise(
    subject: Subject,
    probed: probing.Probed,
    *,
    engine: str,
    gpus: int,
    context: int | None,
    batch: int,
    utilization: float,
    host_memory: int | None,
) -> Advice:
    """Raises: InvalidSetting, GpuTooSmall, HostTooSmall, UnsupportedModel."""
    _check(engine, gpus, batch, utilization, probed)
    wish = Wish(
        model=subject.name,
        engine=engine,
        machine=probed.machine,
        gpus=gpus,
        tokens=_tokens(subject, context),
        sequences=batch,
        utilization=utilization,
        host_bytes=host_memory if host_memory is not None else int(probed.machine.memory_bytes * MEMORY_SHARE),
    )
    made = recommend(lambda count: model_on(subject, count), wish)
    return Advice(subject, wish, made, (*subject.notes, *probed.notes))


def _check(engine: str, gpus: int, batch: int, utilization: float, probed: probing.Probed) -> None:
    if engine not in ENGINES:
        raise errors.InvalidSetting(setting="--for", value=repr(engine), allowed="vllm or sglang", suggestion="vllm")
    if probed.machine.accelerator is None:
        raise errors.InvalidSetting(
            setting="--device",
            value="not given",
            allowed=f"given with --for {engine}, since no accelerator was measured here",
            suggestion="with a GPU by its data sheet, like l40s",
        )
    for setting, value in (("--gpus", gpus), ("--batch", batch)):
        if value < 1:
            raise errors.InvalidSetting(setting=setting, value=str(value), allowed="at least 1", suggestion="1")
    if not 0 < utilization <= 1:
        raise errors.InvalidSetting(
            setting="--gpu-memory-utilization",
            value=str(utilization),
            allowed="above 0 and at most 1",
            suggestion="0.9",
        )


def _tokens(subject: Subject, context: int | None) -> int:
    longest = subject.longest
    tokens = context if context is not None else min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if tokens < 1 or (longest is not None and tokens > longest):
        allowed = "at least 1" if longest is None else f"at least 1 and at most {longest} for this model"
        suggestion = str(longest or DEFAULT_CONTEXT)
        raise errors.InvalidSetting(setting="--context", value=str(tokens), allowed=allowed, suggestion=suggestion)
    return tokens


def model_on(subject: Subject, gpus: int) -> PeerModel:
    """The model as one of so many GPUs holds it. Raises: UnsupportedModel."""
    if subject.quantization == QUANT_METHOD:
        raise errors.UnsupportedModel(
            model=subject.name,
            reason="its weights are stored as `headrace quantize` writes them, and no other engine reads that",
            suggestion="Plan for the checkpoint that it was made of.",
        )
    if subject.outline is None:
        raise errors.UnsupportedModel(
            model=subject.name,
            reason="its parameters are not known by name without its weights",
            suggestion="Give a directory with its safetensors; the headers are enough.",
        )
    return peer_model(subject.outline, subject.fields, subject.dtype, gpus)


@dataclass(frozen=True, slots=True)
class Reviewed:
    """A command line of vLLM, looked through."""

    line: ServeLine
    subject: Subject
    model: PeerModel
    review: Review
    tokens: int
    notes: tuple[str, ...]


def look_through(line: ServeLine, *, device: str | None, host_memory: int | None, machine: Path | None) -> Reviewed:
    """What the line does with its model. Raises: UserError, CheckpointError."""
    subject = read_subject(line.model)
    tokens = line.tokens or subject.longest or DEFAULT_CONTEXT
    probed = machine_for(machine, device or "any")
    notes = [*subject.notes, *probed.notes]
    if probed.machine.accelerator is None:
        notes.append("no GPU was given (--device l40s), so nothing is said of whether it fits there")
    model = model_on(subject, line.gpus)
    if line.stages > 1:
        model = dataclasses.replace(model, layers=model.layers[: -(-len(model.layers) // line.stages)])
        notes.append(f"each of the {line.stages} stages counts its own layers: this is the first one")
    known_host = host_memory is not None or machine is not None
    host = host_memory if host_memory is not None else int(probed.machine.memory_bytes * MEMORY_SHARE)
    made = review(line, model, probed.machine, tokens, host if known_host or probed.machine.accelerator else None)
    return Reviewed(line, subject, model, made, tokens, tuple(notes))


def advice_json(made: Advice) -> dict[str, Any]:
    """Every figure as plain data."""
    recommended = made.made
    return {
        "model": made.subject.name,
        "engine": made.wish.engine,
        "command": recommended.command,
        "flags": list(recommended.flags),
        "reason": recommended.reason,
        "gpus": made.wish.gpus,
        "tokens": made.wish.tokens,
        "per_gpu": share_json(recommended.share) | {"capacity_bytes": made.wish.capacity_bytes},
        "host_bytes": recommended.share.pinned_bytes * made.wish.gpus,
        "offloaded_bytes_per_gpu": recommended.offloaded.nbytes,
        "moved_bytes_per_token": recommended.offloaded.moved_bytes_per_token,
        "tokens_per_s": 1 / recommended.seconds_per_token,
        "notes": list(made.notes),
    }


def review_json(made: Reviewed) -> dict[str, Any]:
    """The same for a review."""
    found = made.review
    return {
        "ok": found.ok,
        "model": made.subject.name,
        "backend": None if found.config is None else found.config.resolved_backend,
        "gpus": made.line.gpus,
        "tokens": made.tokens,
        "offloaded_layers": [number for number, _ in found.offloaded.layers],
        "offloaded_bytes_per_gpu": found.offloaded.nbytes,
        "saved_bytes_per_gpu": found.offloaded.saved_bytes,
        "moved_bytes_per_token": found.offloaded.moved_bytes_per_token,
        "per_gpu": share_json(found.share),
        "host_bytes": found.share.pinned_bytes * made.line.gpus,
        "ignored": list(found.ignored),
        "warnings": list(found.warnings),
        "misfits": list(found.misfits),
        "notes": list(made.notes),
    }


def share_json(split: Share) -> dict[str, Any]:
    """Bytes on one GPU, and what they add up to."""
    return dataclasses.asdict(split) | {"total_bytes": split.total_bytes}
