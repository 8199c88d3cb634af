"""Slabs: aligned to pages, exactly as large as asked for, and empty once discarded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from headrace import machine
from headrace.copying.slots import Slab
from headrace.core import DIRECT_ALIGNMENT

PAGE = DIRECT_ALIGNMENT
MIB = 2**20


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * 2**20 + 5])
def test_a_slab_is_aligned_and_exact_to_the_page(nbytes: int, huge_pages: bool) -> None:
    slab = Slab(nbytes, huge_pages=huge_pages)
    assert slab.address % PAGE == 0
    assert slab.nbytes % PAGE == 0
    assert max(nbytes, 1) <= slab.nbytes < max(nbytes, 1) + PAGE
    assert slab.bytes.shape == (slab.nbytes,)
    assert slab.bytes.dtype == torch.uint8
    assert slab.bytes.data_ptr() == slab.address


def test_a_slab_begins_as_zeroes_and_can_be_written() -> None:
    slab = Slab(2 * PAGE)
    assert not slab.bytes.any()
    slab.bytes.fill_(7)
    assert slab.bytes.eq(7).all()


def test_discard_gives_zeroes_and_the_slab_can_be_written_again() -> None:
    slab = Slab(3 * PAGE)
    view = slab.bytes[PAGE : PAGE + 8].view(torch.float32)
    slab.bytes.fill_(7)
    slab.discard()
    assert not slab.bytes.any()
    slab.bytes[PAGE : PAGE + 4] = torch.tensor([0, 0, 128, 63], dtype=torch.uint8)
    assert view[0] == 1.0, "views from before still look at the same memory"


@pytest.mark.slow
def test_a_slab_costs_nothing_until_it_is_written_and_after_it_is_discarded() -> None:
    size = 64 * MIB
    before = machine.resident_bytes()
    slab = Slab(size, huge_pages=False)
    assert machine.resident_bytes() - before < size // 4
    slab.bytes.fill_(1)
    assert machine.resident_bytes() - before > size * 3 // 4
    slab.discard()
    assert machine.resident_bytes() - before < size // 4


@pytest.mark.slow
def test_a_view_keeps_the_memory_and_nothing_else_does() -> None:
    slab = Slab(PAGE)
    memory = weakref.ref(slab._map)
    view = slab.bytes[:8]
    view.fill_(3)
    del slab
    gc.collect()
    assert view.eq(3).all()
    assert memory() is not None
    del view
    gc.collect()
    assert memory() is None
