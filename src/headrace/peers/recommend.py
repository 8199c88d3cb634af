"""The flags that make a model fit into some GPUs of vLLM or SGLang, and what they cost. Every choice is worked out.

Nothing is offloaded if all fits. Else whole layers ahead of their use (prefetch) are compared with parameters read over
the link (uva), of a mixture of experts also with the experts alone; what predicts the fastest token is taken.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace import errors
from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.core import Machine
from headrace.peers import sglang, vllm
from headrace.peers.budget import Share, seconds_per_token, share
from headrace.peers.layout import PeerModel
from headrace.peers.vllm import NOTHING, Offloaded
from headrace.settings import flag, number_text


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be served, and on what."""

    model: str
    engine: str
    """vllm or sglang."""
    machine: Machine
    gpus: int
    tokens: int
    """The longest sequence."""
    sequences: int
    utilization: float
    """Part of the GPU's memory that the engine may fill."""
    host_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """Of one GPU."""
        assert self.machine.accelerator is not None
        return int(self.machine.accelerator.memory_bytes * self.utilization)


@dataclass(frozen=True, slots=True)
class Recommended:
    """A command line and what it leads to."""

    command: str
    flags: tuple[str, ...]
    """The offload flags of it."""
    share: Share
    """Of one GPU."""
    offloaded: Offloaded
    seconds_per_token: float
    reason: str


def recommend(model_on: Callable[[int], PeerModel], wish: Wish) -> Recommended:
    """The fastest flags that fit; `model_on` gives the model on one of so many GPUs.

    Raises: GpuTooSmall, HostTooSmall.
    """
    options = list(_options(model_on(wish.gpus), wish))
    fitting = [each for each in options if each.share.total_bytes <= wish.capacity_bytes]
    if not fitting:
        raise _too_small(options, wish, _ways_out(model_on, wish))
    hosted = [each for each in fitting if _fits_host(each, wish)]
    if not hosted:
        least = min(fitting, key=lambda each: each.share.pinned_bytes)
        raise errors.HostTooSmall(
            engine=wish.engine,
            needed_bytes=wish.gpus * least.share.pinned_bytes,
            payload_bytes=wish.gpus * least.offloaded.nbytes,
            host_bytes=wish.host_bytes,
            gpus=wish.gpus,
            ways=[f"{way} would do here" for way in _ways_out(model_on, wish)] or ["nothing less would do here"],
        )
    return min(hosted, key=lambda each: (each.seconds_per_token, each.share.pinned_bytes))


def _fits_host(option: Recommended, wish: Wish) -> bool:
    return wish.gpus * option.share.pinned_bytes <= wish.host_bytes


def _ways_out(model_on: Callable[[int], PeerModel], wish: Wish) -> list[str]:
    """More GPUs, or shorter sequences, with which something fits; each was tried."""

    def works(other: Wish) -> bool:
        options = _options(model_on(other.gpus), other)
        return any(each.share.total_bytes <= other.capacity_bytes and _fits_host(each, other) for each in options)

    ways = []
    more = (wish.gpus * 2**power for power in range(1, 5))
    if gpus := next((n for n in more if works(dataclasses.replace(wish, gpus=n))), None):
        ways.append(f"--gpus {gpus}")
    fewer = (wish.tokens // 2**power for power in range(1, 8))
    if tokens := next((n for n in fewer if n >= 1 and works(dataclasses.replace(wish, tokens=n))), None):
        ways.append(f"--context {tokens}")
    return ways


def _options(model: PeerModel, wish: Wish) -> Iterator[Recommended]:
    """All that is worth trying, the least offloading of each kind."""
    nothing = _made(model, wish, NOTHING, (), "everything fits on the GPU")
    yield nothing
    excess = nothing.share.total_bytes - wish.capacity_bytes
    if excess <= 0:
        return
    if wish.engine == "sglang":
        yield _sglang(model, wish, excess)
        return
    selections = [frozenset[str]()]
    if model.has_experts:
        selections.insert(0, frozenset({"experts"}))
    for selectors in selections:
        yield _uva(model, wish, excess, selectors)
        ahead = _prefetch(model, wish, excess, selectors)
        if ahead is not None:
            yield ahead


def _uva(model: PeerModel, wish: Wish, excess: int, selectors: frozenset[str]) -> Recommended:
    config = OffloadConfig(
        offload_backend="uva",
        uva=UVAOffloadConfig(cpu_offload_gb=_gib_above(excess), cpu_offload_params=selectors),
    )
    what = "experts, of which a token reads a few, are" if selectors else "the first layers' parameters are"
    return _made(
        model,
        wish,
        vllm.offloaded(model, config),
        tuple(config.to_flags()),
        f"{what} read over the link where they are used",
    )


def _prefetch(model: PeerModel, wish: Wish, excess: int, selectors: frozenset[str]) -> Recommended | None:
    """The groups that move the fewest layers and save enough beside their own pool, or None."""
    count = len(model.layers)
    best: tuple[tuple[int, int], Offloaded, OffloadConfig] | None = None
    for number in range(1, min(count, 8) + 1):  # more in a row only make the pool larger
        for group in range(count, number - 1, -1):
            taken = vllm.prefetch(model, group, number, number, selectors)
            if taken.saved_bytes < excess:
                continue
            rank = (taken.nbytes, taken.pool_bytes)
            if best is None or rank < best[0]:
                settings = PrefetchOffloadConfig(
                    offload_group_size=group,
                    offload_num_in_group=number,
                    offload_prefetch_step=number,
                    offload_params=selectors,
                )
                best = (rank, taken, OffloadConfig(offload_backend="prefetch", prefetch=settings))
            break  # the largest group that saves enough: smaller ones move more
    if best is None:
        return None
    _, taken, config = best
    reason = f"{len(taken.layers)} of {count} layers are copied ahead of their use, which hides what the link allows"
    return _made(model, wish, taken, tuple(config.to_flags()), reason)


def _sglang(model: PeerModel, wish: Wish, excess: int) -> Recommended:
    """The pool is a layer, so the budget grows until it saves enough."""
    gib = _gib_above(excess)
    taken = sglang.offloaded(model, int(gib * 2**30))
    while taken.saved_bytes < excess and taken.nbytes < model.stack_bytes:
        gib = _gib_above(int(gib * 2**30) + excess - taken.saved_bytes)
        taken = sglang.offloaded(model, int(gib * 2**30))
    return _made(
        model,
        wish,
        taken,
        ("--cpu-offload-gb", number_text(gib)),
        "the first layers' parameters are copied to the GPU whenever they run",
    )


def _gib_above(nbytes: int) -> float:
    """In hundredths, since nobody wants to type more."""
    return -(-nbytes * 100 // 2**30) / 100


def _made(model: PeerModel, wish: Wish, taken: Offloaded, flags: tuple[str, ...], reason: str) -> Recommended:
    return Recommended(
        command=_command(wish, flags),
        flags=flags,
        share=share(model, taken, tokens=wish.tokens, sequences=wish.sequences),
        offloaded=taken,
        seconds_per_token=seconds_per_token(model, taken, wish.machine),
        reason=reason,
    )


def _command(wish: Wish, flags: tuple[str, ...]) -> str:
    if wish.engine == "sglang":
        words = ["python", "-m", "sglang.launch_server", flag("model_path"), wish.model]
        words += [flag("tp"), str(wish.gpus)] if wish.gpus > 1 else []
        words += [flag("context_length"), str(wish.tokens), flag("mem_fraction_static"), number_text(wish.utilization)]
    else:
        words = ["vllm", "serve", wish.model]
        words += [flag("tensor_parallel_size"), str(wish.gpus)] if wish.gpus > 1 else []
        words += [
            flag("max_model_len"),
            str(wish.tokens),
            flag("gpu_memory_utilization"),
            number_text(wish.utilization),
        ]
    return shlex.join([*words, *flags])


def _too_small(options: list[Recommended], wish: Wish, ways: list[str]) -> errors.GpuTooSmall:
    least = min(options, key=lambda each: each.share.total_bytes).share
    gpu = wish.machine.accelerator
    assert gpu is not None
    return errors.GpuTooSmall(
        engine=wish.engine,
        gpus=wish.gpus,
        device=gpu.name,
        capacity_bytes=wish.capacity_bytes,
        needed_bytes=least.total_bytes,
        stays_bytes=least.stack_bytes + least.pool_bytes,
        around_bytes=least.around_bytes,
        kv_bytes=least.kv_bytes,
        tokens=wish.tokens,
        other_bytes=least.activation_bytes + least.other_bytes,
        ways=ways or ["a GPU with more memory"],
    )
