"""What is measured: models in real shapes, and the files that each candidate needs of them.

A case has one directory, in which files are made once and used again by later runs. A file appears under its name when
it is whole. Knows the formats; runs nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import BenchmarkFailed

BITS = (16, 8, 4)
GGUF_TYPES = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
"""llama.cpp's name of what is nearest to so many bits for each weight."""

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A model by name, with random weights in the shape of a real one, or the small real one of the demo."""

    name: str
    kind: str = ""
    """Name of the config's class; empty for real weights."""
    config: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[int, str] = field(default_factory=dict)
    """The cap to measure under, by bits."""


def _shape(hidden: int, inner: int, layers: int, heads: int, head: int, theta: float) -> dict[str, Any]:
    """Of a dense model with 8 key-value heads, whose head is its embedding table."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head,
        "rope_theta": theta,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


CASES = {
    case.name: case
    for case in (
        Case(
            name="llama-3b",  # Llama-3.2-3B: 5.5 GiB in 16 bits
            kind="LlamaConfig",
            config=_shape(3072, 8192, layers=28, heads=24, head=128, theta=500000.0),
            memory={16: "3GiB", 8: "2GiB", 4: "1.2GiB"},
        ),
        Case(
            name="llama-1b",  # Llama-3.2-1B: 2.0 GiB
            kind="LlamaConfig",
            config=_shape(2048, 8192, layers=16, heads=32, head=64, theta=500000.0),
            memory={16: "1.5GiB", 8: "1GiB", 4: "900MiB"},
        ),
        Case(
            name="qwen3-4b",  # Qwen3-4B: 7.0 GiB
            kind="Qwen3Config",
            config=_shape(2560, 9728, layers=36, heads=32, head=128, theta=1000000.0),
            memory={16: "4GiB", 8: "2.5GiB", 4: "1.5GiB"},
        ),
        Case(name="smollm2", memory={16: "700MiB", 8: "650MiB", 4: "620MiB"}),  # SmolLM2-135M-Instruct: 257 MiB
    )
}
"""The vocabulary of all of them is that of the small real model, whose tokenizer they get."""

DEFAULT_CASE = "llama-3b"


class Files:
    """The files of one model, made when they are asked for."""

    def __init__(self, root: Path, case: Case | None, checkpoint: Path | None, on_step: OnStep) -> None:
        """`checkpoint`: a directory of the user's own, instead of a case."""
        assert (case is None) != (checkpoint is None)
        self.root = root
        self.case = case
        self._own = checkpoint
        self._on_step = on_step

    def checkpoint(self, bits: int) -> Path:
        """A directory that transformers loads; with fewer than 16 bits, Headrace alone. Raises: BenchmarkFailed."""
        if bits < 16:
            return self._made(f"{bits}bit", lambda target: _quantize(self.checkpoint(16), target, bits))
        if self._own is not None:
            return self._own
        assert self.case is not None
        if not self.case.kind:
            from headrace import sources

            return sources.resolve(sources.demo_gguf())
        return self._made("16bit", self._write_random)

    def gguf(self, bits: int) -> Path:
        """A file that llama.cpp loads. Raises: BenchmarkFailed."""
        if bits < 16:
            return self._made(f"{GGUF_TYPES[bits]}.gguf", lambda target: _requantize(self.gguf(16), target, bits))
        return self._made("BF16.gguf", self._write_gguf)

    def _write_random(self, target: Path) -> None:
        from headrace.bench.checkpoints import write

        assert self.case is not None
        write(target, self.case.kind, dict(self.case.config))

    def _write_gguf(self, target: Path) -> None:
        from headrace.bench.gguf import write

        write(self.checkpoint(16), target)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        target = self.root / name
        if target.exists():
            return target
        self.root.mkdir(parents=True, exist_ok=True)
        unfinished = self.root / f"unfinished-{os.getpid()}-{name}"
        self._on_step(f"writing {target}")
        try:
            make(unfinished)
            unfinished.replace(target)
        finally:
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink(missing_ok=True)
        return target


def _quantize(source: Path, target: Path, bits: int) -> None:
    command = [sys.executable, "-m", "headrace", "quantize", str(source), str(target), "--bits", str(bits)]
    _run([*command, "--no-calibrate", "--no-damage"], f"{bits} bits")


def _requantize(source: Path, target: Path, bits: int) -> None:
    """By llama.cpp itself, in a process of its own: it writes to standard error whatever one asks."""
    code = (
        "import sys, llama_cpp as c; p = c.llama_model_quantize_default_params(); "
        f"p.ftype = c.LLAMA_FTYPE_MOSTLY_{GGUF_TYPES[bits]}; "
        "sys.exit(c.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    _run([sys.executable, "-c", code, str(source), str(target)], GGUF_TYPES[bits])


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BenchmarkFailed(step=f"writing the model in {what}", reason=lines[-1])
