"""Pages: whole ones, aligned, given back in part or as a whole. What a tensor sees of them: test_copying_slots.py."""

from __future__ import annotations

import pytest

from headrace.copying.pages import Pages
from headrace.core import DIRECT_ALIGNMENT, HUGE_PAGE_BYTES

PAGE = DIRECT_ALIGNMENT


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE + 1, HUGE_PAGE_BYTES + 1])
def test_pages_are_aligned_and_whole(nbytes: int, huge_pages: bool) -> None:
    pages = Pages(nbytes, huge_pages=huge_pages)
    assert pages.address % PAGE == pages.nbytes % PAGE == 0
    assert max(nbytes, 1) <= pages.nbytes < max(nbytes, 1) + PAGE
    assert len(pages.view()) == pages.nbytes


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_part_is_given_back_and_can_be_written_again(huge_pages: bool) -> None:
    pages = Pages(HUGE_PAGE_BYTES + 8 * PAGE, huge_pages=huge_pages)
    pages.view()[:] = b"\7" * pages.nbytes
    begin, end = 3 * PAGE, HUGE_PAGE_BYTES + PAGE
    pages.discard(begin, end - begin)
    assert bytes(pages.view()) == b"\7" * begin + bytes(end - begin) + b"\7" * (pages.nbytes - end)
    pages.view()[begin] = 9
    assert pages.view()[begin] == 9
    pages.discard()
    assert not any(pages.view())
