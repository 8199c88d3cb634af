"""What a process gives up before it runs a line of an examined package. Linux; knows nothing of errors and functions.

In this order: its network (a namespace with none, where the kernel allows it), its environment, memory, processor time,
file sizes, handles and core dumps, and last, by an audit hook that cannot be taken off again, everything that Python
reports when it opens, connects, starts, loads or imports: all that is not on a short list is refused.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30
_FILE_BYTES = 1 << 20
_HANDLES = 32
_NEW_USERS = 0x10000000
_NEW_NETWORK = 0x40000000
_NO_NEW_PRIVILEGES = 38

_ALLOWED = frozenset(
    [
        *("exec", "compile", "builtins.id", "sys._getframe", "sys.settrace", "sys._current_frames"),
        *("object.__getattr__", "object.__setattr__", "object.__delattr__", "sys.unraisablehook"),
        *("function.__new__", "code.__new__", "array.__new__", "time.sleep"),
    ]
)


class Refused(BaseException):
    """The function asked for what it may not have. No `except Exception` of its own keeps it."""


def lock(directory: Path, cpu_seconds: int) -> None:
    """Give up everything but computing and files in `directory`. There is no way back."""
    _leave_network()
    os.environ.clear()
    os.chdir(directory)
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _HANDLES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    inside = f"{os.path.realpath(directory)}/"

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _ALLOWED or (event == "import" and arguments[0] in sys.modules):
            return
        if event == "open" and isinstance(arguments[0], str) and _is_inside(arguments[0], inside):
            return
        raise Refused(f"{event} {arguments[0] if arguments else ''}".strip())

    sys.addaudithook(refuse)


def _is_inside(path: str, directory: str) -> bool:
    return os.path.realpath(path).startswith(directory)


def _leave_network() -> None:
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        system = ctypes.CDLL(None, use_errno=True)
        system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if system.unshare(_NEW_USERS | _NEW_NETWORK) != 0:
            system.unshare(_NEW_NETWORK)
