"""Who is measured: Headrace and its peers, what each can run, and whether it is here. Imports none of them."""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.settings import require


@dataclass(frozen=True)
class Candidate:
    """One way to run a model."""

    name: str
    package: str
    bits: tuple[int, ...] = (16,)
    """Weights that it runs: 16 for the checkpoint as it is."""
    reads_gguf: bool = False
    must_fit: bool = False
    """It keeps all weights in memory."""

    def cannot(self, bits: int, weight_bytes: int, memory_bytes: int | None) -> str:
        """Why it is not measured; empty if it is."""
        if bits not in self.bits:
            return f"has no {bits}-bit weights of this kind"
        if self.must_fit and memory_bytes is not None and weight_bytes > memory_bytes:
            return "does not fit: it keeps all weights in memory"
        return ""


HEADRACE = Candidate("headrace", "headrace", bits=(16, 8, 4))
PEERS = (
    Candidate("headrace-fast", "headrace"),
    Candidate("accelerate-auto", "accelerate"),
    Candidate("accelerate-disk", "accelerate"),
    Candidate("mapped", "transformers"),
    Candidate("airllm", "airllm"),
    Candidate("llama.cpp", "llama_cpp", bits=(16, 8, 4), reads_gguf=True),
    Candidate("llama.cpp-plain", "llama_cpp", bits=(8, 4), reads_gguf=True),
    Candidate("vllm", "vllm", must_fit=True),
)
"""What each does: the functions of `worker`."""
NAMES = tuple(peer.name for peer in PEERS)
A_PEER_PYTHON = ("a peer's name, =, and the Python that has it installed", "vllm=/opt/vllm/bin/python")
"""What is allowed for --peer-python, and an example."""


@dataclass(frozen=True)
class Chosen:
    """Who runs, with which Python, and why the others do not."""

    run: Mapping[Candidate, str]
    left_out: Mapping[str, str]


def check(names: Sequence[str], pythons: Mapping[str, str]) -> None:
    """Whether `choose` can be asked for these. Raises: InvalidSetting for a name that nobody has, or no interpreter."""
    for setting, given, known in (("--peers", names, (HEADRACE.name, *NAMES)), ("--peer-python", pythons, NAMES)):
        for name in given:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            require(name in known, setting, repr(name), f"one of {', '.join(known)}", nearest)
    for python in pythons.values():
        require(Path(python).is_file(), "--peer-python", repr(python), *A_PEER_PYTHON)


def choose(names: Sequence[str], pythons: Mapping[str, str], bits: int, sizes: tuple[int, int | None]) -> Chosen:
    """The peers of these names that are installed; `names` empty is all of them. Headrace always runs.

    `pythons`: interpreters of other environments by peer. `sizes`: bytes of the weights, and of the cap.
    """
    run, left_out = {HEADRACE: sys.executable}, {}
    for peer in PEERS:
        if names and peer.name not in names:
            continue
        python = pythons.get(peer.name, sys.executable)
        reason = peer.cannot(bits, *sizes) or ("" if _installed(peer.package, python) else "not installed")
        if reason:
            left_out[peer.name] = reason
        else:
            run[peer] = python
    return Chosen(run, left_out)


def _installed(package: str, python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
