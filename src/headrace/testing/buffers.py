"""Device memory and page-locked host memory: what there is, where, and who owns it. Knows no streams."""

from __future__ import annotations

import ctypes

import torch

from headrace import errors
from headrace.copying.slots import Slab
from headrace.testing.memory import History, Region, Regions, poison
from headrace.testing.order import Moment
from headrace.testing.simulation import Simulation

ALIGNMENT = 64
"""Of device memory, and never better: what works here does not depend on luck."""


class DeviceMemory:
    """Buffers of their own, poisoned when they are made and when they are freed."""

    def __init__(self, simulation: Simulation, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.regions = Regions()
        self._simulation = simulation
        self._count = 0

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.allocated_bytes

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        if nbytes > self.free_bytes:
            raise errors.OutOfDeviceMemory(
                purpose=purpose, requested_bytes=nbytes, free_bytes=self.free_bytes, total_bytes=self.limit_bytes
            )
        owner = (ctypes.c_uint8 * (nbytes + 3 * ALIGNMENT))()
        offset = -ctypes.addressof(owner) % (2 * ALIGNMENT) + ALIGNMENT  # an odd multiple
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = torch.frombuffer(owner, dtype=torch.uint8, count=nbytes, offset=offset)
        self._count += 1
        began = self._simulation.on_host(f"allocation of {nbytes} bytes")
        name = f"device memory {self._count} ({purpose})"
        self.regions.add(Region(name, memory.data_ptr(), nbytes, began, History(nbytes, None), owner))
        poison(memory.data_ptr(), nbytes)
        self.allocated_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return memory

    def free(self, memory: torch.Tensor) -> None:
        if not memory.numel():
            return
        region = self.regions.find(memory.data_ptr(), memory.numel())
        assert region is not None, "this memory was not allocated here"
        assert (region.address, region.nbytes) == (memory.data_ptr(), memory.numel()), f"a part of {region.name}"
        moment = self._simulation.on_host(f"free of {region.name}")
        if region.ended is not None:
            self._simulation.report("use-after-free", f"{region.name} is freed twice", moment, region.ended)
            return
        self.allocated_bytes -= region.nbytes
        poison(region.address, region.nbytes)
        self._simulation.end(moment, region)


class PageLocks:
    """Host memory that copies may take their time with, and how the device sees it in place."""

    def __init__(self, simulation: Simulation) -> None:
        self.locked_bytes = 0
        self.regions = Regions()
        self._simulation = simulation
        self._ended: list[Region] = []
        self._views: dict[int, tuple[torch.Tensor, Region]] = {}
        """By storage: a view lies where the slab lies, so the address cannot tell who is looking."""

    def lock(self, slab: Slab) -> str | None:
        if self.regions.find(slab.address, 1) is not None:
            return "it is page-locked already"
        began = self._simulation.on_host(f"page-lock of {slab.nbytes} bytes")
        name = f"page-locked memory {began.number}"
        history = History(slab.nbytes, began)
        self.regions.add(Region(name, slab.address, slab.nbytes, began, history, slab, on_host=True))
        self.locked_bytes += slab.nbytes
        return None

    def unlock(self, slab: Slab) -> None:
        region = self._region(slab)
        self.regions.remove(region)
        self._ended.append(region)
        self.locked_bytes -= region.nbytes
        self._simulation.end(self._simulation.on_host(f"unlock of {region.name}"), region)
        region.keep = None

    def view(self, slab: Slab, *, coherent: bool) -> torch.Tensor:
        region = self._region(slab)
        owner = slab.view() if coherent else bytearray(slab.view())
        view = torch.frombuffer(owner, dtype=torch.uint8)
        self._views[view.untyped_storage()._cdata] = view, region
        return view

    def write(self, slab: Slab, offset: int, nbytes: int) -> None:
        region = self._region(slab)
        moment = self._simulation.on_host(f"write of {nbytes} bytes to {region.place(slab.address + offset, nbytes)}")
        self._simulation.access(moment, region, slab.address + offset, nbytes, writes=True)

    def viewed(self, tensor: torch.Tensor) -> tuple[Region, int] | None:
        """If `tensor` is how the device sees a slab: the slab's region, and where in it the tensor lies."""
        view, region = self._views.get(tensor.untyped_storage()._cdata, (None, None))
        if view is None or region is None:
            return None
        return region, region.address + tensor.data_ptr() - view.data_ptr()

    def ended(self, address: int) -> Moment | None:
        """When memory that was page-locked at `address` was unlocked last."""
        return next((region.ended for region in reversed(self._ended) if region.holds(address, 1)), None)

    def _region(self, slab: Slab) -> Region:
        region = self.regions.find(slab.address, slab.nbytes)
        assert region is not None, "this slab is not page-locked"
        return region
