"""The accelerator that torch has: CUDA in full, Intel's XPU without page locks. Knows no blocks and no schedule.

What is the same for every kind goes through `torch.Stream`, `torch.Event` and `torch.accelerator`; the rest is CUDA's
runtime, as far as torch passes it on (`torch.cuda.cudart`), and one function of its driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from dataclasses import dataclass
from typing import Any

import torch

from headrace import errors, units
from headrace.copying.device import Device, Event, Stream
from headrace.copying.slots import Slab

KINDS = ("cuda", "xpu")

# cudaHostRegisterPortable | cudaHostRegisterMapped (CUDA runtime API, "Memory Management")
_REGISTER_FLAGS = 1 | 2


def open_device(device: str | torch.device | Device | None) -> Device | None:
    """What `device` names; None is the CPU. Raises: CannotOffload."""
    if device is None or isinstance(device, Device):
        return device
    try:
        return open_accelerator(torch.device(device))
    except RuntimeError:
        raise errors.CannotOffload(
            reason=f"torch knows no device {str(device)!r}",
            suggestion="Name it as torch does: cpu, cuda or cuda:1.",
        ) from None


def open_accelerator(device: torch.device) -> Device | None:
    """The accelerator that `device` names; None is the CPU. Raises: CannotOffload."""
    if device.type == "cpu":
        return None
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind is not None and kind.type in KINDS else 0
    if kind is None or device.type != kind.type or (device.index or 0) >= count:
        there = ", ".join(["cpu", *(f"{kind}:{index}" for index in range(count))])
        raise errors.CannotOffload(
            reason=f"there is no device {str(device)!r} to compute on here, or none with streams of its own",
            suggestion=f"What torch can use on this machine: {there}.",
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return Accelerator(torch.device(kind.type, index))


@dataclass(frozen=True)
class AcceleratorStream(Stream):
    """A stream of torch. Two that stand for the same one are equal."""

    torch_stream: torch.Stream

    def wait(self, event: Event) -> None:
        assert isinstance(event, AcceleratorEvent)
        self.torch_stream.wait_event(event.torch_event)


class AcceleratorEvent(Event):
    """An event of torch, which makes the device's own when it is recorded; one that never was is done."""

    def __init__(self, device: torch.device) -> None:
        self.torch_event = torch.Event(device, enable_timing=True)

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, AcceleratorStream)
        self.torch_event.record(stream.torch_stream)

    @property
    def done(self) -> bool:
        return self.torch_event.query()

    def wait_done(self) -> None:
        self.torch_event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, AcceleratorEvent)
        return earlier.torch_event.elapsed_time(self.torch_event) / 1000


class Accelerator(Device):
    """A device of torch's current accelerator."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self.torch_device = device
        self._module: Any = torch.get_device_module(device)

    @property
    def free_bytes(self) -> int:
        """What the driver has, and what torch keeps without using it."""
        free_bytes, _ = self._module.mem_get_info(self.torch_device)
        kept_bytes = self._module.memory_reserved(self.torch_device) - self._module.memory_allocated(self.torch_device)
        return int(free_bytes + kept_bytes)

    def allocate(self, nbytes: int, purpose: str = "moving weights") -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError:
            _, total_bytes = self._module.mem_get_info(self.torch_device)
            raise errors.OutOfDeviceMemory(
                purpose=purpose, requested_bytes=nbytes, free_bytes=self.free_bytes, total_bytes=total_bytes
            ) from None

    def free(self, memory: torch.Tensor) -> None:
        """Nothing to do: torch's allocator has it back with the last reference, and nothing is under way any more."""

    # --- page-locked host memory ----------------------------------------------------------------------------------

    def page_lock(self, slab: Slab) -> str | None:
        if self.torch_device.type != "cuda":
            return f"torch has no way to page-lock memory for {self.torch_device.type!r} that it did not allocate"
        with torch.cuda.device(self.torch_device):  # views are on the device that was current here
            code = int(_runtime().cudaHostRegister(slab.address, slab.nbytes, _REGISTER_FLAGS))
            if not code:
                return None
            self._forget_last_error()
        most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "" if most == resource.RLIM_INFINITY else f" (RLIMIT_MEMLOCK is {units.format_bytes(most)})"
        return f"the driver refused to page-lock {units.format_bytes(slab.nbytes)}: {torch.cuda.CudaError(code)}{limit}"

    def unlock(self, slab: Slab) -> None:
        code = int(_runtime().cudaHostUnregister(slab.address))
        assert not code, f"a slab could not be unlocked: {torch.cuda.CudaError(code)}"

    def view(self, slab: Slab) -> torch.Tensor:
        if self.torch_device.type != "cuda":
            raise errors.Reason(f"torch has no way to show host memory to {self.torch_device.type!r} in place")
        with torch.cuda.device(self.torch_device):
            return torch.as_tensor(_Mapped(slab), device=self.torch_device)

    def _forget_last_error(self) -> None:
        """The runtime keeps the error of a call that failed, for torch to raise after whatever is launched next."""
        # c10/cuda/CUDAException.h, C10_CUDA_KERNEL_LAUNCH_CHECK: cudaGetLastError, which also takes the error away.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.torch_device).fill_(0)

    # --- streams --------------------------------------------------------------------------------------------------

    def new_stream(self) -> AcceleratorStream:
        return AcceleratorStream(torch.Stream(self.torch_device))

    def current_stream(self) -> AcceleratorStream:
        return AcceleratorStream(torch.accelerator.current_stream(self.torch_device))

    def new_event(self) -> AcceleratorEvent:
        return AcceleratorEvent(self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, *, page_locked: bool) -> None:
        assert isinstance(stream, AcceleratorStream)
        # From memory that is not page-locked torch waits for the copy (aten/src/ATen/native/cuda/Copy.cu: it asks
        # only whether to block, not who page-locked the source).
        with stream.torch_stream:
            target.copy_(source, non_blocking=page_locked)

    @property
    def capturing(self) -> bool:
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        if capturing is None:
            return False
        with torch.accelerator.device_index(self.torch_device.index):
            return bool(capturing())

    def wait_idle(self) -> None:
        torch.accelerator.synchronize(self.torch_device)


def _runtime() -> Any:
    """CUDA's runtime, as far as torch passes it on; its calls return an error code."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Mapped:
    """A page-locked slab under the address that the device has for it.

    `torch.as_tensor` makes a tensor of whatever has the attribute, keeps it alive, and asks the driver for the device
    (ATen/cuda/CUDADevice.h, getDeviceFromPtr), which knows page-locked host memory. Raises: Reason.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.__cuda_array_interface__ = {
            "shape": (slab.nbytes,),
            "typestr": "|u1",
            "data": (_device_address(slab.address), False),
            "version": 2,
        }


def _device_address(address: int) -> int:
    """Not always the host's own (cudaDevAttrCanUseHostPointerForRegisteredMem). Raises: Reason."""
    found = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise errors.Reason(f"the driver's library cannot be used: {error}") from None
    # CUDA driver API, cuMemHostGetDevicePointer; torch has made the device's context the thread's current one.
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    if code or not found.value:
        raise errors.Reason(f"the driver has no device address for host memory (CUDA driver error {code})")
    return found.value
