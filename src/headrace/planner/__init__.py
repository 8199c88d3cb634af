"""Which bytes stay, which move, how fast that can be. Pure; no torch.

`choose` makes the plan, `costs` says what running takes beside the weights, `placing` fills the tiers below the device,
`reasons` puts the choices into words.
"""

from headrace.planner.choose import least_memory_bytes, memory_for_share, plan
from headrace.planner.costs import Demand

__all__ = ["Demand", "least_memory_bytes", "memory_for_share", "plan"]
