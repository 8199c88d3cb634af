"""vLLM's rules for offloading (0.32): which parameters leave the GPU, and what that costs there and on the host.

UVA walks the layers in order and takes parameter after parameter until the budget is reached; the one that crosses it
goes too. Prefetch takes the last of each group of layers, and keeps one buffer per step for every distinct parameter.
Either way each tensor is pinned by itself, which costs the host the next power of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.config import OffloadConfig, matches, selected_layers
from headrace.peers.layout import PeerModel, PeerParam


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What leaves one GPU under some flags."""

    layers: tuple[tuple[int, tuple[PeerParam, ...]], ...]
    """Number of the layer, and which of its parameters."""
    pool_bytes: int
    """Buffers on the GPU that offloaded layers land in."""
    overlaps: bool
    """Whether copies run while other layers compute."""
    zero_copy: bool
    """Whether kernels read the host's memory: then only what a token uses moves."""

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for _, params in self.layers for param in params)

    @property
    def saved_bytes(self) -> int:
        """What the GPU really has more: gross minus pool."""
        return self.nbytes - self.pool_bytes

    @property
    def pinned_bytes(self) -> int:
        """Host memory of this GPU's share."""
        return sum(pinned_bytes(piece) for _, params in self.layers for param in params for piece in param.pieces)

    @property
    def moved_bytes_per_token(self) -> float:
        """Over the link, for one token of one sequence."""
        return sum(
            param.nbytes * (param.used_share if self.zero_copy else 1.0)
            for _, params in self.layers
            for param in params
        )


NOTHING = Offloaded((), 0, overlaps=True, zero_copy=False)


def pinned_bytes(nbytes: int) -> int:
    """What torch's pinned allocator takes for one tensor: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def offloaded(model: PeerModel, config: OffloadConfig) -> Offloaded:
    """What these settings take off the GPU; maybe nothing, which vLLM does not tell."""
    backend = config.resolved_backend
    if backend == "uva":
        return uva(model, config.uva.budget_bytes, config.uva.cpu_offload_params)
    if backend == "prefetch":
        settings = config.prefetch
        return prefetch(
            model,
            settings.offload_group_size,
            settings.offload_num_in_group,
            settings.offload_prefetch_step,
            settings.offload_params,
        )
    return NOTHING


def uva(model: PeerModel, budget_bytes: int, selectors: frozenset[str]) -> Offloaded:
    """Per GPU. The parameter that crosses the budget is taken as well."""
    used, taken = 0, []
    for number, layer in enumerate(model.layers):
        chosen = []
        for param in layer:
            if used >= budget_bytes:
                break
            if matches(selectors, param.name):
                chosen.append(param)
                used += param.nbytes
        if chosen:
            taken.append((number, tuple(chosen)))
    return Offloaded(tuple(taken), 0, overlaps=False, zero_copy=True)


def prefetch(model: PeerModel, group: int, number: int, step: int, selectors: frozenset[str]) -> Offloaded:
    """The selected parameters of the last `number` layers of each `group`; the pool holds `step` of each kind."""
    taken = []
    for index in selected_layers(len(model.layers), group, number):
        chosen = tuple(param for param in model.layers[index] if matches(selectors, param.name))
        if chosen:
            taken.append((index, chosen))
    kinds = {(param.name, param.pieces) for _, params in taken for param in params}
    pool = step * sum(sum(pieces) for _, pieces in kinds)
    return Offloaded(tuple(taken), pool, overlaps=step >= number, zero_copy=False)


def segments(layers: Iterable[Sequence[PeerParam]]) -> list[str]:
    """The words that a selector could be, of these layers."""
    return sorted({part for layer in layers for param in layer for part in param.name.split(".") if not part.isdigit()})
