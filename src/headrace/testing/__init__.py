"""For tests: an accelerator that needs no hardware, orders copies as badly as it may, and finds what only luck orders.

from headrace.testing import SimulatedAccelerator

with SimulatedAccelerator(seed=7) as device:
    slot = device.allocate(4096)
    copying = device.new_stream()
    device.copy(slot, weights, copying, page_locked=False)
    arrived = device.new_event()
    arrived.record(copying)
    device.current_stream().wait(arrived)  # without it: Hazard, read-before-ready, with both sides
    slot.view(torch.float32).sum()
    device.wait_idle()
    device.free(slot)
    device.check()
"""

from headrace.testing.device import SimulatedAccelerator, SimulatedEvent, SimulatedStream
from headrace.testing.order import KINDS, Hazard, Moment

__all__ = ["KINDS", "Hazard", "Moment", "SimulatedAccelerator", "SimulatedEvent", "SimulatedStream"]
