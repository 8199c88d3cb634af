"""A stack of small layers of all kinds of parameters, stored in a file, with a backend in front of it."""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from headrace.backends import backend_class
from headrace.backends.base import Backend
from headrace.blocks import Block, Weight, named_sites
from headrace.copying.disk import DiskReader
from headrace.metrics import Counters, Metrics
from headrace.store import open_checkpoint

WIDTH = 48


class Layer(nn.Module):
    """Sizes, dtypes and dimensions differ from layer to layer; each parameter changes the result."""

    def __init__(self, index: int, shared: nn.Parameter) -> None:
        super().__init__()
        inner = WIDTH + 8 * (index % 3)
        generator = torch.Generator().manual_seed(index)

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / 7, requires_grad=False)

        self.up, self.bias, self.down = random(inner, WIDTH), random(inner), random(WIDTH, inner)
        self.scale = random()
        self.nothing = random(0, 3)
        counts = torch.randint(-3, 4, (WIDTH,), generator=generator, dtype=torch.int8)
        self.counts = nn.Parameter(counts, requires_grad=False)
        self.eighth = nn.Parameter(random(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.same = self.scale  # tied within the layer
        self.shared = shared  # and across all of them
        self.inside: Callable[[], None] = lambda: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inside()
        inner = torch.tanh(hidden @ self.up.T + self.bias) * (1 + self.same)
        return (inner @ self.down.T) * self.shared + self.counts / 8 + self.eighth.float() + self.nothing.sum()


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        shared = nn.Parameter(torch.tensor(1.25), requires_grad=False)
        self.layers = nn.ModuleList([Layer(index, shared) for index in range(count)])

    def forward(self, hidden: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for index in range(len(self.layers)) if order is None else order:
            hidden = self.layers[index](hidden)
        return hidden


def hidden(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(99))


@dataclass
class Streamed:
    """A stack whose weights are on disk, and the same stack in memory."""

    model: Any
    resident: Any
    backend: Any
    reader: DiskReader
    metrics: Metrics
    offloaded_bytes: int
    path: Path
    weights: list[Weight] = field(default_factory=list)

    def wrong(self, rows: int = 1, order: list[int] | None = None) -> bool:
        return not torch.equal(self.model(hidden(rows), order), self.resident(hidden(rows), order))

    def counters(self) -> Counters:
        return self.metrics.counters()

    def wait_idle(self) -> None:
        """Until nothing is read ahead any more."""
        for entry in self.backend._deliveries:
            if entry is not None:
                entry[1].wait_idle()

    def check(self) -> None:
        """Slots are consistent, none is in use, and no layer holds data."""
        if hasattr(self.backend, "schedule"):
            self.backend.schedule.check_integrity()
            assert not any(self.backend.schedule._users)
            assert self.backend._running == []
        names = {name for name, parameter in self.model.named_parameters() if parameter.is_meta}
        assert names == {weight.name for weight in self.weights}

    def close(self) -> None:
        self.backend.close()
        self.reader.close()


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Run at once; what each returns, or the error of one. A deadlock is an error, not a wait for ever."""
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a deadlock"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class FailingReader(DiskReader):
    """Fails the first read that covers `bad_offset`, once."""

    bad_offset: int | None = None

    def _pread(self, file: Any, into: memoryview, offset: int) -> int:
        bad = self.bad_offset
        if bad is not None and offset <= bad < offset + len(into):
            self.bad_offset = None
            raise OSError(errno.EIO, "Input/output error")
        return super()._pread(file, into, offset)


def stream(
    directory: Path, backend: str, count: int = 5, *, reader: type[DiskReader] = DiskReader, **options: Any
) -> Streamed:
    """A stack behind a backend. What the layers share stays in memory; everything else moves."""
    path = directory / "model.safetensors"
    resident = Stack(count).eval()
    streamed = copy.deepcopy(resident)
    tensors = {name: parameter.data for name, parameter in resident.named_parameters()}  # tied ones once
    if not path.exists():
        save_file(tensors, path)
    checkpoint = open_checkpoint(directory)
    weights: dict[int, Weight] = {}
    for sites in named_sites(streamed).values():
        if sites[0].attribute == "shared":
            continue
        meta = nn.Parameter(streamed.get_parameter(sites[0].name).to("meta"), requires_grad=False)
        weight = Weight(tuple(sites), meta, (checkpoint.tensors[sites[0].name],))
        weight.bind(meta)
        weights[id(meta)] = weight
    blocks = {}
    for index, layer in enumerate(streamed.layers):
        mine = [weight for weight in weights.values() if weight.sites[0].module is layer]
        blocks[Block(f"layers.{index}", layer, tuple(mine))] = mine
    metrics = Metrics()
    disk = reader({name: checkpoint.path(name) for name in checkpoint.files}, metrics, chunk_bytes=8192)
    arguments: dict[str, Any] = {"reader": disk} if backend == "prefetch" else {"paths": disk.paths}
    made: Backend = backend_class(backend)(list(blocks), blocks, metrics, **arguments, **options)
    made.attach(streamed)
    nbytes = sum(weight.nbytes for weight in weights.values())
    assert nbytes > 0
    return Streamed(streamed, resident, made, disk, metrics, nbytes, path, list(weights.values()))
