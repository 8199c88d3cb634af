"""Examples of what goes wrong with modules given to `offload`, and on a device."""

from headrace.reference.examples import Example

_MODULE = """
import torch
from torch import nn

import headrace

module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
given = torch.ones(1, 256)
every = headrace.OffloadConfig(prefetch={"offload_group_size": 1})
"""

_WRITER = """
import torch
from torch import nn

import headrace

class Counting(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.counts = counts

    def forward(self, given):
        if self.counts:
            self.weight.add_(1)
        return given @ self.weight

def stack(counts):
    module = nn.Sequential(Counting(counts), Counting(counts))
    return headrace.offload(module, headrace.OffloadConfig(prefetch={"offload_group_size": 1})).module

given = torch.ones(1, 64)
"""

EXAMPLES = (
    Example(
        error="CannotOffload",
        given=_MODULE,
        checkpoint=True,
        before="headrace.offload(module, every, blocks='layers')",
        after="headrace.offload(module, every)",
    ),
    Example(
        error="ModuleBudgetTooSmall",
        given=_MODULE,
        checkpoint=True,
        before="headrace.offload(module, memory='64KiB')",
        after="headrace.offload(module, memory='2MiB')",
    ),
    Example(
        error="SpillFailed",
        checkpoint=True,
        given=_MODULE
        + """
from pathlib import Path
from headrace.copying.spill import SpillFile
""",
        before="SpillFile(2**30, Path('nowhere'))",
        after="SpillFile(2**20, Path('.')).close()",
    ),
    Example(
        error="StillRunning",
        given=_MODULE
        + """
handle = headrace.offload(module, every)
inside = module[0].register_forward_hook(lambda *call: handle.close() if closing else None)
""",
        checkpoint=True,
        before="""
closing = True
with torch.inference_mode():
    module(given)
""",
        after="""
closing = False
with torch.inference_mode():
    module(given)
handle.close()
""",
    ),
    Example(
        error="WeightChanged",
        given=_WRITER,
        checkpoint=True,
        before="""
module = stack(counts=True)
with torch.inference_mode():
    module(given)
""",
        after="""
module = stack(counts=False)
with torch.inference_mode():
    module(given)
""",
    ),
    Example(
        error="GradientsNeeded",
        given=_MODULE + "headrace.offload(module, every)",
        checkpoint=True,
        before="module(given.requires_grad_())",
        after="""
with torch.inference_mode():
    module(given)
""",
    ),
    Example(
        error="CannotCapture",
        given=_MODULE
        + """
from headrace.testing import SimulatedAccelerator

device = SimulatedAccelerator()

def capture(**options):
    with device, torch.inference_mode(), headrace.offload(module, every, device=device, **options):
        with device.capture():
            module(given)
""",
        checkpoint=True,
        before="capture(host_memory='1KiB')",
        after="capture(host_memory='1GiB')",
    ),
    Example(
        error="OutOfDeviceMemory",
        given=_MODULE
        + """
from headrace.testing import SimulatedAccelerator

def offload(mib):
    device = SimulatedAccelerator(memory_bytes=mib * 2**20)
    with device:
        headrace.offload(module, every, device=device)
""",
        checkpoint=True,
        before="offload(mib=0)",
        after="offload(mib=64)",
    ),
    Example(
        error="HostBudgetTooSmall",
        given="",
        checkpoint=True,
        before="headrace plan models/tiny --device l40s --memory 2GiB --context 16 --host-memory 1MiB",
        after="headrace plan models/tiny --device l40s --memory 2GiB --context 16 --host-memory 8GiB",
    ),
)
