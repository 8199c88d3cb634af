"""Tables of which only rows are read, what an offloaded model refuses, and the names of backends."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_stacks import FailingReader, in_threads
from torch import nn

from headrace.backends import REGISTRY, backend_class
from headrace.backends.base import Backend, RowTable
from headrace.blocks import Weight, named_sites
from headrace.copying.disk import Ticket
from headrace.errors import ClosedError, ReadError
from headrace.metrics import Metrics
from headrace.store import open_checkpoint


def test_every_name_has_a_backend_of_that_name() -> None:
    for name in REGISTRY:
        assert issubclass(backend_class(name), Backend)
        assert backend_class(name).name == name


# --- tables -------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 3000, 96


@dataclass
class Table:
    module: Any
    resident: nn.Embedding
    rows: RowTable
    reader: FailingReader
    metrics: Metrics
    weight: Weight


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def table(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Table]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((ROWS, COLUMNS), generator=generator).to(request.param)
    # Before it a tensor of odd size, so that rows begin anywhere.
    save_file({"a": torch.zeros(5, dtype=torch.uint8), "weight": values}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    resident = nn.Embedding.from_pretrained(values)
    module = copy.deepcopy(resident)
    meta = nn.Parameter(module.weight.to("meta"), requires_grad=False)
    module.weight = meta
    (sites,) = named_sites(module).values()
    weight = Weight(tuple(sites), meta, (checkpoint.tensors["weight"],))
    metrics = Metrics()
    reader = FailingReader({name: checkpoint.path(name) for name in checkpoint.files}, metrics, chunk_bytes=16384)
    rows = RowTable(weight, module, reader, metrics)
    rows.attach()
    yield Table(module, resident, rows, reader, metrics, weight)
    assert module.weight is meta
    assert not rows._slab.bytes.any()  # the pages of its rows are given back
    reader.close()


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([[5]]),
        torch.tensor([0, ROWS - 1, 0, 17, 18, 19]),
        torch.arange(ROWS).reshape(3, -1),
        torch.tensor([[7, 7], [7, 7]], dtype=torch.int32),
        torch.zeros((2, 0), dtype=torch.long),
        torch.tensor(11),
    ],
    ids=["one", "ends", "all", "repeated", "none", "scalar"],
)
def test_rows_are_the_same_bits(table: Table, indices: Any) -> None:
    for _ in range(2):
        assert torch.equal(table.module(indices), table.resident(indices))
    assert torch.equal(table.module(input=indices), table.resident(indices))
    assert table.metrics.counters().gathered_rows == 3 * len(indices.unique())


def test_only_the_pages_of_the_rows_are_read(table: Table) -> None:
    indices = torch.tensor([3, 1500, 2999, 1500])
    assert torch.equal(table.module(indices), table.resident(indices))
    read = table.metrics.counters().read_bytes
    assert 0 < read <= 3 * (table.rows.row_bytes + 2 * 4096)
    assert read < table.weight.nbytes / 10


@pytest.mark.parametrize("bad", [ROWS, -1, 2**40])
def test_an_index_out_of_range_is_torchs_own_error(table: Table, bad: int) -> None:
    with pytest.raises(IndexError) as ours:
        table.module(torch.tensor([1, bad]))
    with pytest.raises(IndexError) as torchs:
        table.resident(torch.tensor([1, bad]))
    assert str(ours.value) == str(torchs.value)
    assert torch.equal(table.module(torch.tensor([1, 2])), table.resident(torch.tensor([1, 2])))


def test_a_read_error_fails_the_call_and_the_next_is_right(table: Table) -> None:
    indices = torch.tensor([4, 900])
    table.reader.bad_offset = table.weight.parts[0].segment.offset + 900 * table.rows.row_bytes
    with pytest.raises(ReadError, match="Input/output error"):
        table.module(indices)
    assert torch.equal(table.module(indices), table.resident(indices))


def test_an_interrupted_wait(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Ticket.wait, itertools.count()

    def interrupted(self: Ticket) -> None:
        if next(calls) == 0:
            self.wait_idle()  # what was asked for arrives, and nobody is there
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Ticket, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.module(torch.tensor([4]))
    assert torch.equal(table.module(torch.tensor([5])), table.resident(torch.tensor([5])))


def test_two_threads_look_up(table: Table) -> None:
    def look_up(start: int) -> bool:
        some = [torch.arange(start + 3 * step, start + 3 * step + 40) for step in range(30)]
        return all(torch.equal(table.module(indices), table.resident(indices)) for indices in some)

    assert in_threads(lambda: look_up(0), lambda: look_up(20)) == [True, True]


def test_a_closed_reader(table: Table) -> None:
    table.reader.close()
    with pytest.raises(ClosedError):
        table.module(torch.tensor([1]))
