"""Host memory beside a device: locked as one piece of its own size, seen in place, given back."""

from __future__ import annotations

from headrace.copying.arena import HostArena
from headrace.testing import SimulatedAccelerator


def test_it_is_locked_as_large_as_it_is_and_given_back() -> None:
    device = SimulatedAccelerator()
    arena = HostArena(5 * 4096, device)
    assert (arena.nbytes, arena.bytes.numel()) == (5 * 4096, 5 * 4096)
    assert arena.page_lock() is None
    assert device.page_locked_bytes == 5 * 4096
    for _ in range(2):
        arena.close()
        assert device.page_locked_bytes == 0
        assert not arena.page_locked
    device.check()


def test_a_refusal_says_why_and_leaves_memory_that_can_be_used() -> None:
    device = SimulatedAccelerator(refuse_page_lock="RLIMIT_MEMLOCK is 8 MiB")
    arena = HostArena(4096, device)
    assert "RLIMIT_MEMLOCK is 8 MiB" in (arena.page_lock() or "")
    assert not arena.page_locked
    assert arena.bytes.fill_(7).sum() == 7 * 4096
    arena.close()
    device.check()


def test_parts_are_seen_where_they_lie() -> None:
    device = SimulatedAccelerator()
    arena = HostArena(2 * 4096, device)
    assert arena.page_lock() is None
    arena.bytes[:4096].fill_(1)
    arena.bytes[4096:].fill_(2)
    with device:
        views = arena.views({0: arena.bytes[:4096], 3: arena.bytes[4096:6000]})
        assert {key: (view.numel(), int(view.sum())) for key, view in views.items()} == {
            0: (4096, 4096),
            3: (1904, 3808),
        }
    device.wait_idle()
    arena.close()
    device.check()
