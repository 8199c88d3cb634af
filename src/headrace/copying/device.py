"""What an accelerator has to offer: memory, streams, events, page-locked host memory. Knows no blocks and no schedule.

`Device` is the seam. `Accelerator` is the real thing (CUDA; other kinds as far as `torch.accelerator` goes), and
`headrace.testing.SimulatedAccelerator` is one whose copies are as late and as badly ordered as its rules allow.

The rules are CUDA's: what is put on a stream runs later, in order; nothing orders two streams but an event that one
records and the other waits for; the host runs ahead of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from headrace.copying.slots import Slab


class Event(ABC):
    """A point on a stream."""

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Move the point to after everything that is on `stream` now."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether everything before the point has happened; True if it was never recorded."""

    @abstractmethod
    def wait_done(self) -> None:
        """Block the host until then."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Time between two events that are both done, as the device has measured it."""


class Stream(ABC):
    """Work that happens in order."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is put on this stream from now on happens after `event`; the host goes on at once."""


class Device(ABC):
    """Where a module computes, when that is not where its weights wait.

    Guarantees: methods may be called from any thread; `copy` with a page-locked source returns before it has happened.
    """

    torch_device: torch.device
    """What a module's tensors say: `cuda:0`."""

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that could still be allocated."""

    @abstractmethod
    def allocate(self, nbytes: int, purpose: str = "moving weights") -> torch.Tensor:
        """Device memory, 1-d uint8, at least 64-byte aligned. Raises: OutOfDeviceMemory, which names `purpose`."""

    @abstractmethod
    def free(self, memory: torch.Tensor) -> None:
        """Nothing on any stream will touch `memory` any more."""

    @abstractmethod
    def page_lock(self, slab: Slab) -> str | None:
        """Register exactly `slab` with the driver, so that copies from it need not wait; why not, if it cannot be."""

    @abstractmethod
    def unlock(self, slab: Slab) -> None:
        """Undo `page_lock`; no copy from `slab` may be under way."""

    @abstractmethod
    def view(self, slab: Slab) -> torch.Tensor:
        """A page-locked slab as the device sees it in place, 1-d uint8. Raises: Reason."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream beside the one that computes."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the calling thread's operators go to."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event that was not recorded yet."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, *, page_locked: bool) -> None:
        """Put a copy from host to device on `stream`; both 1-d uint8 of one length.

        From memory that is not page-locked the copy happens before this returns.
        """

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, which replays copies but not this Python."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Block the host until every stream has nothing left to do."""
