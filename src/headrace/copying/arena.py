"""Host memory beside a device, for all that waits there. Knows nothing of what lies in it."""

from __future__ import annotations

import torch

from headrace.copying.device import Device
from headrace.copying.slots import Slab


class HostArena:
    """One piece of exactly the size asked for, so that a page lock takes what is there and not a power of two.

    Guarantees: `close` is idempotent, and waits for the device before it takes the lock back.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        self.page_locked = False
        self._device = device
        self._slab = Slab(nbytes)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    @property
    def bytes(self) -> torch.Tensor:
        """1-d uint8 over all of it."""
        return self._slab.bytes

    @property
    def slab(self) -> Slab:
        """For reads into it."""
        return self._slab

    def page_lock(self) -> str | None:
        """Lock it as a whole; what to tell the user if the driver refuses."""
        refused = self._device.page_lock(self._slab)
        self.page_locked = refused is None
        if refused is None:
            return None
        return f"host memory is not page-locked ({refused}): copies to the device are not overlapped"

    def views(self, parts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The same parts of it as the device sees them in place. Raises: Reason."""
        view = self._device.view(self._slab)
        begins = {key: part.data_ptr() - self._slab.address for key, part in parts.items()}
        return {key: view[begin : begin + parts[key].numel()] for key, begin in begins.items()}

    def close(self) -> None:
        """Nothing will be copied out of it, or read in place, that is not under way."""
        if self.page_locked:
            self._device.wait_idle()
            self._device.unlock(self._slab)
            self.page_locked = False
