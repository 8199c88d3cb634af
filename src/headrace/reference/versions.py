"""What became of a page from one version of a package to the next. Knows no source and no database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.reference import pieces
from headrace.reference.database import PageRow
from headrace.reference.records import History, Page

LIKE_ENOUGH = 0.5
"""At least this share of the words of two messages has to be common, in order, for one to be the other reworded."""
_WORD = re.compile(r"[A-Za-z_][\w.-]*")


def with_history(before: Sequence[PageRow], current: Sequence[Page], version: str) -> list[PageRow]:
    """The pages of a new version, and those of versions before it that are gone."""
    known = {row.page.id: row for row in before}
    ids = {page.id for page in current}
    rows = []
    for page in current:
        old = known.get(page.id)
        introduced = old.history.introduced if old is not None else version if before else None
        rows.append(PageRow(page, History(introduced)))
    new = [page for page in current if page.id not in known and page.template]
    vanished = [row for row in before if row.page.id not in ids]
    fresh = [row for row in vanished if row.history.removed is None and row.page.template]
    successors = _reworded([row.page for row in fresh], new)
    for row in vanished:
        history = row.history
        if history.removed is None:
            history = replace(history, removed=version, successor=successors.get(row.page.id))
        rows.append(PageRow(row.page, history))
    return rows


def _reworded(gone: Iterable[Page], new: Sequence[Page]) -> dict[str, str]:
    """The id of a new page for each that is gone, if it is raised in the same function and reads alike."""
    by_place: dict[tuple[str, str], list[Page]] = {}
    for page in new:
        for site in page.sites:
            by_place.setdefault((site.file.rpartition("/")[2], site.qualname), []).append(page)
    pairs = []
    for old in gone:
        for site in old.sites:
            for page in by_place.get((site.file.rpartition("/")[2], site.qualname), ()):
                pairs.append((likeness(old, page), old.id, page.id))
    found: dict[str, str] = {}
    taken: set[str] = set()
    for score, old_id, new_id in sorted(pairs, reverse=True):
        if score >= LIKE_ENOUGH and old_id not in found and new_id not in taken:
            found[old_id] = new_id
            taken.add(new_id)
    return found


def likeness(old: Page, new: Page) -> float:
    """From 0 to 1: words in common and in order, weighted by their length; the same guard counts as half a message."""
    same_guard = bool(_guards(old) & _guards(new))
    first, second = (_WORD.findall(pieces.canonical(page.template).lower()) for page in (old, new))
    common = _common_weight(first, second)
    weight = max(sum(map(len, first)), sum(map(len, second)), 1)
    return min(1.0, common / weight + (0.5 if same_guard else 0.0))


def _guards(page: Page) -> set[str]:
    return {
        " and ".join(atom.code for atom in site.condition.atoms if not atom.early_exit)
        for site in page.sites
        if site.condition.atoms
    } - {""}


def _common_weight(first: Sequence[str], second: Sequence[str]) -> int:
    """The weight of the heaviest common subsequence of words."""
    best = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for index, other in enumerate(second, 1):
            above = best[index]
            best[index] = diagonal + len(word) if word == other else max(best[index], best[index - 1])
            diagonal = above
    return best[-1]
