"""Nothing moves: the reference that every other backend must equal, bit for bit."""

from __future__ import annotations

from headrace.backends.base import Backend


class ResidentBackend(Backend):
    """Has no blocks of its own and wraps nothing, so a resident model runs as transformers made it."""

    name = "resident"

    def attach(self, root: object) -> None:
        """Nothing to wrap."""

    def before(self, index: int) -> None:
        raise AssertionError

    def after(self, index: int) -> None:
        raise AssertionError

    @property
    def allocated_bytes(self) -> int:
        return 0
