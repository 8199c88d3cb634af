"""Kernels that read page-locked host memory in place: no ring, no copies, every use goes over the link.

The accelerator's side of `uva`. The weights of a block are parameters over the device's view of host memory, for good:
nothing is wrapped but the pass as a whole, which a closed model refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from headrace import errors
from headrace.backends.base import Backend, wrap_forward
from headrace.backends.packing import Packing
from headrace.blocks import Block, Weight
from headrace.copying.device import Device
from headrace.copying.slots import Slab
from headrace.metrics import Metrics

PROBE_BYTES = 4096


class ZeroCopyBackend(Backend):
    """Device memory: none of its own."""

    name = "uva"

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Mapping[Block, Sequence[Weight]],
        metrics: Metrics,
        views: Mapping[Block, torch.Tensor],
    ) -> None:
        """`views`: per block its bytes, packed, as the device sees them (1-d uint8)."""
        super().__init__(blocks, weights, metrics)
        self._packings = [Packing(block, self.weights[block], PROBE_BYTES) for block in self.blocks]
        self._bound = [
            packing.parameters(views[block]) for block, packing in zip(self.blocks, self._packings, strict=True)
        ]
        for packing, parameters in zip(self._packings, self._bound, strict=True):
            packing.bind(parameters)
        self.host_view_bytes = sum(view.numel() for view in views.values())

    @property
    def allocated_bytes(self) -> int:
        return 0

    @property
    def host_bytes(self) -> int:
        return self.host_view_bytes

    def attach(self, root: nn.Module) -> None:
        self._forwards.append(wrap_forward(root, self._run_pass))

    def before(self, index: int) -> None:
        raise AssertionError

    def after(self, index: int) -> None:
        raise AssertionError

    def close(self) -> None:
        """Take the views back: what they show is about to be unlocked. The caller has waited for the device."""
        with self._lock:
            super().close()
            if not self.running:
                for packing, parameters in zip(self._packings, self._bound, strict=False):  # closed twice
                    packing.unbind(parameters)
                self._bound.clear()


def why_not_in_place(device: Device) -> str | None:
    """Whether kernels see in page-locked host memory what the host has written there last; why not.

    A view may show what was there when it was made (vllm-project/vllm#57224): so the probe writes, looks, writes again
    and looks again. Costs one page of host memory and some microseconds.
    """
    slab = Slab(PROBE_BYTES)
    refused = device.page_lock(slab)
    if refused is not None:
        return refused
    try:
        for value in (1, 2, 3):
            slab.bytes.fill_(value)
            if value == 1:
                view = device.view(slab)
            seen = view.to("cpu", copy=True) if device.torch_device.type != "cpu" else view.clone()
            if not bool((seen == value).all()):
                return "the device does not see what the host writes after memory was mapped"
            device.wait_idle()
    except errors.Reason as reason:
        return str(reason)
    finally:
        device.wait_idle()
        device.unlock(slab)
    return None
