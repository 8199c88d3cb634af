"""Which bytes stay, which move, how fast that can be. Pure; no torch.

`choose` makes the plan, `loads` says for how many sequences, `speculating` with how many drafted tokens, `costs` what
running takes beside the weights; `placing` fills the tiers below the device, `reasons` puts the choices into words.
"""

from headrace.planner.choose import least_memory_bytes, memory_for_share, plan, resident_memory_bytes
from headrace.planner.costs import DEFAULT_CONTEXT, MARGIN_BYTES, MEMORY_SHARE, Demand
from headrace.planner.loads import Load, choose_load, demand_of
from headrace.planner.speculating import best_drafted

__all__ = [
    "DEFAULT_CONTEXT",
    "MARGIN_BYTES",
    "MEMORY_SHARE",
    "Demand",
    "Load",
    "best_drafted",
    "choose_load",
    "demand_of",
    "least_memory_bytes",
    "memory_for_share",
    "plan",
    "resident_memory_bytes",
]
