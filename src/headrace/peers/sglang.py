"""SGLang's rules for offloading by --cpu-offload-gb: layers in order, copied to the GPU for each forward, not ahead.

Its other way, groups of layers, works only for models that name their parts for it; it is not suggested.
"""

from __future__ import annotations

from headrace.peers.layout import PeerModel
from headrace.peers.vllm import Offloaded, uva


def offloaded(model: PeerModel, budget_bytes: int) -> Offloaded:
    """Parameter after parameter until the budget is reached; a layer's are copied afresh whenever it runs."""
    taken = uva(model, budget_bytes, frozenset())
    largest = max((sum(param.nbytes for param in params) for _, params in taken.layers), default=0)
    return Offloaded(taken.layers, largest, overlaps=False, zero_copy=False)
