"""Weights put away and brought back; what is held is given back without keeping the module alive."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from tiny_modules import same, stack

from headrace.backing import SPILL, Backing, to_device
from headrace.copying.spill import spilled_size
from headrace.errors import ClosedError
from headrace.live import cut, lives
from headrace.metrics import Metrics
from headrace.store import layout


def put_away(backing: Backing, model: torch.nn.Module) -> list[tuple[object, torch.Tensor]]:
    """Every block on disk; the weights with the bytes that they had."""
    found = {live.weight: live for live in lives(model)}
    blocks = cut(model, None, list(found.values()))
    sizes = [layout(weight.nbytes for weight in block.weights)[1] for block in blocks]
    backing.reserve(0, spilled_size(sizes), pin_memory=False)
    kept = []
    for block in blocks:
        some = [found[weight] for weight in block.weights]
        kept += [(live.weight, live.bytes.clone()) for live in some if live.bytes is not None]
        backing.put(block, some, on_disk=True)
    backing.flush()
    return kept


@pytest.fixture
def backing() -> Backing:
    return Backing(None, Metrics(), chunk_bytes=8192, threads=2)


def test_what_was_put_away_comes_back(backing: Backing) -> None:
    kept = put_away(backing, stack())
    for weight, expected in kept:
        back = backing.bring_back(weight)  # type: ignore[arg-type]
        assert torch.equal(back, expected)
        assert back.untyped_storage().nbytes() == expected.numel()  # of its own, and no larger
        assert not backing.in_host(weight)  # type: ignore[arg-type]
    payload = sum(expected.numel() for _, expected in kept)
    assert payload <= backing.disk_bytes <= payload + 4 * (4096 + 4 * 64)
    assert (backing.host_bytes, backing.staging_bytes) == (0, 2 * 8192)
    assert list(backing.paths) == [SPILL]
    backing.close()


def test_each_block_begins_where_a_direct_read_may(backing: Backing) -> None:
    kept = put_away(backing, stack())
    offsets = [backing._on_disk[weight].parts[0].segment.offset for weight, _ in kept]  # type: ignore[index]
    assert [offset % 4096 for offset in offsets[::4]] == [0] * 4  # four weights in a block
    assert all(offset % 64 == 0 for offset in offsets)
    backing.close()


def test_close_gives_everything_back_and_is_idempotent(backing: Backing) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    kept = put_away(backing, stack())
    assert threading.active_count() == threads + 2
    for _ in range(2):
        backing.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
    with pytest.raises(ClosedError):
        backing.bring_back(kept[0][0])  # type: ignore[arg-type]


def test_what_closes_it_does_not_keep_the_module(backing: Backing) -> None:
    model = stack()
    put_away(backing, model)
    close, gone = backing.held.close, weakref.ref(model.layers[0])
    del model, backing
    gc.collect()
    assert gone() is None
    close()


def test_nothing_to_put_away(backing: Backing) -> None:
    backing.reserve(0, 0, pin_memory=True)
    backing.flush()
    assert (backing.disk_bytes, backing.host_bytes, backing.staging_bytes, backing.paths) == (0, 0, 0, {})
    assert backing.all_fallbacks() == ()
    backing.close()


def test_what_stays_moves_to_a_device_with_its_ties() -> None:
    model = stack()
    model.tied = model.norm
    model.register_buffer("steps", torch.ones(2))
    model.plain = torch.ones(3)
    found = lives(model)
    to_device(model, [live for live in found if live.movable], torch.device("cpu"))
    assert same(model.state_dict()["norm.weight"], stack().state_dict()["norm.weight"])
    assert model.tied.weight is model.norm.weight
