"""An explanation in words: what the terminal, JSON and a page say alike. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.reference import commands, pieces
from headrace.reference.closest import difference
from headrace.reference.explain import Explanation
from headrace.reference.matching import Catalogue, Match
from headrace.reference.messages import one_line
from headrace.reference.prevention import prevention
from headrace.reference.prose import situations
from headrace.reference.records import Atom, Page, Prose, Site
from headrace.reference.sentences import atom_phrase
from headrace.reference.solve import Change, Fix

_SURE = {
    "exact": "exactly this message",
    "likely": "very likely this one",
    "several": "one of several that read the same",
    "closest": "the closest there is; the text differs",
    "none": "none",
}


def how_sure(explanation: Explanation) -> str:
    """The verdict in words."""
    return _SURE[explanation.verdict]


def reasons(explanation: Explanation) -> Iterator[tuple[Atom, str]]:
    """What is tested before the error is raised, the reason last, and what the message's values say to it."""
    site = explanation.site
    if site is None:
        return
    checks = {check.atom: check for check in explanation.match.checks} if explanation.match else {}
    for atom in site.condition.atoms:
        if atom.early_exit:
            continue
        check = checks.get(atom)
        told = ""
        if check is not None and check.holds is not None:
            told = f"{check.code}: {'consistent with the message' if check.holds else 'the message does not agree'}"
        elif check is not None and check.code != atom.code:
            told = f"{check.code}"
        yield atom, told


def piece_lines(explanation: Explanation) -> list[str]:
    """Each piece of the message with what was tested for it, and what the message's values say to that."""
    lines = []
    for match in explanation.pieces:
        lines.append(pieces.one_line(match.template))
        told = {True: "consistent with the message", False: "the message does not agree"}
        for check in match.checks:
            if not check.atom.early_exit:
                said = f": {told[check.holds]}" if check.holds is not None else ""
                lines.append(f"    {check.code}{said}")
    return lines


def incomplete(site: Site) -> str | None:
    """Why the tests shown are not the whole condition; None if they are."""
    if site.condition.complete:
        return None
    return site.condition.incomplete or "it was not worked out"


def fix_lines(explanation: Explanation) -> list[str]:
    """Each fix in one line."""
    flags = explanation.catalogue.flags() if explanation.catalogue else {}
    return [fix_line(fix, flags) for fix in explanation.fixes]


def fix_line(fix: Fix, flags: commands.Flags) -> str:
    """A fix in one line."""
    parts = " and ".join(_change_words(change, flags) for change in fix.changes)
    return f"{parts[:1].upper()}{parts[1:]}{' (checked: the test is then false)' if fix.verified else ''}"


def _change_words(change: Change, flags: commands.Flags) -> str:
    flag = commands.flag_of(change.expr, flags)
    name = flag or f"`{change.expr}`"
    if change.has_value and change.value is None:
        return f"leave {name} out"
    if change.has_value and isinstance(change.value, bool):
        return f"switch {'on' if change.value else 'off'} {name}"
    if flag is None or not change.has_value:
        return _in_words(change, name)
    others = f"; also {', '.join(map(str, change.others))}" if change.others else ""
    return f"use {flag} {commands.shown(change.value)} ({change.words}{others})"


def _in_words(change: Change, name: str) -> str:
    """What nobody sets by a flag: `make `heads` a multiple of 3, like 63 or 66`."""
    if change.words == "given":
        return f"give {name}"
    near = [str(value) for value in (change.value, *change.others) if change.has_value]
    like = f", like {' or '.join(near)}" if near and near[0] not in change.words.split() else ""
    return f"make {name} {change.words}{like}"


def tried(explanation: Explanation) -> list[str]:
    """With which values the site's own function was run; empty if it was not."""
    pair = explanation.site.pair if explanation.site else None
    if pair is None:
        return []
    end = "returns" if pair.ends == "returns" else "goes on past the check"
    return [
        "the function itself was run, with stand-ins for all else:",
        f"with {_assigned(pair.before)} it raises this error" if pair.before else "it raises this error",
        f"with {_assigned(pair.after)} it {end}",
    ]


def _assigned(values: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values if value not in ("an object", "a mapping"))


def short(explanation: Explanation) -> str:
    """One line: the condition and the fix, or whose error it is."""
    if not explanation.found:
        return abstention(explanation)
    found = [told.partition(":")[0] or atom_phrase(atom) for atom, told in reasons(explanation)]
    lines = fix_lines(explanation)
    assert explanation.site is not None
    unknown = "" if not explanation.site.condition.complete else "raised always when it is reached"
    because = f"raised when {found[-1]}" if found else unknown
    where = f"{explanation.site.file}:{explanation.site.line}"
    return ". ".join([f"{where}: {because}" if because else where, *lines[:1]]) + "."


def abstention(explanation: Explanation) -> str:
    """Why nothing is claimed, and what would help."""
    package = _package(explanation)
    if explanation.owner is not None:
        owner = explanation.owner
        return f"This is not {package}'s own error but {owner.name}'s: {owner.because}. {owner.ask}"
    asked = f"No error of {package} reads like this" if package != "any package" else "There is nothing to compare with"
    return f'{asked}. Paste the whole traceback, from the line "Traceback" on: its frames tell where it was raised.'


def _package(explanation: Explanation) -> str:
    catalogue = explanation.catalogue
    return f"{catalogue.package} {catalogue.version}" if catalogue else "any package"


def chain(explanation: Explanation) -> list[str]:
    """What stood around the message, outermost first."""
    return [
        f"{wrapper.kind}: {wrapper.detail}{f' ({wrapper.page_id})' if wrapper.page_id else ''}"
        for wrapper in explanation.wrappers
    ]


def word_difference(explanation: Explanation) -> list[tuple[str, str]]:
    """Where the message and the closest template differ; empty if they agree."""
    match = explanation.match
    if match is None or explanation.said is None or explanation.verdict in ("exact", "several"):
        return []
    if match.fit is not None and match.fit.mode == "full":
        return []
    return [(kind, words) for kind, words in difference(one_line(explanation.said.message), match.template)]


def situation_lines(explanation: Explanation) -> list[str]:
    """What a model wrote about when it happens, marked as such."""
    found = situations_of(explanation)
    return (
        [f"{sentence} (written by {found.model}, from the source alone)" for sentence in found.sentences]
        if found
        else []
    )


def situations_of(explanation: Explanation) -> Prose | None:
    """What a model wrote about the source as it is now."""
    if explanation.page is None or explanation.catalogue is None or is_gone(explanation):
        return None
    return situations(explanation.page, explanation.catalogue)


def history_lines(explanation: Explanation) -> list[str]:
    """What became of the page from version to version; nothing if all that were looked at have it as it is."""
    page, catalogue = explanation.page, explanation.catalogue
    history = catalogue.versions(page.id) if page is not None and catalogue is not None else None
    if page is None or catalogue is None or history is None:
        return []
    lines = [f"{explanation.asked} was this error's id: it was reworded"] if explanation.asked else []
    if history.introduced:
        lines.append(f"it reads like this since {history.introduced}")
    lines += [f"it read until then: {pieces.one_line(old.template)} ({old.id})" for old in _earlier(page.id, catalogue)]
    if history.removed:
        lines.append(f"removed in {history.removed}")
        now = catalogue.page(history.successor) if history.successor else None
        if now is not None:
            lines.append(f"it reads now: {pieces.one_line(now.template)} ({now.id})")
    return lines


def _earlier(page_id: str, catalogue: Catalogue) -> Iterator[Page]:
    """The wordings of a page, the last one first."""
    for old in catalogue.earlier(page_id):
        yield old
        yield from _earlier(old.id, catalogue)


def prevention_lines(explanation: Explanation) -> list[str]:
    """What sets the values that are tested, and what catches the error."""
    if explanation.site is None or explanation.catalogue is None:
        return []
    return [each.text for each in prevention(explanation.site, explanation.catalogue)]


def test_lines(explanation: Explanation) -> list[str]:
    """The package's own tests that expect the error, each with the first line of what has to fail."""
    if explanation.page is None or explanation.catalogue is None or is_gone(explanation):
        return []
    return [
        f"{each.file.removeprefix('../')}:{each.line} in {each.test}: {each.call.partition(chr(10))[0]}"
        for each in explanation.catalogue.expectations(explanation.page.id)
    ]


def is_gone(explanation: Explanation) -> bool:
    """Whether the current version has the page no more: then the source that is kept is not the page's."""
    page, catalogue = explanation.page, explanation.catalogue
    history = catalogue.versions(page.id) if page is not None and catalogue is not None else None
    return history is not None and history.removed is not None


def version_of(explanation: Explanation) -> str:
    """The version that the place and the source of an error are those of: of what is gone the last one that had it."""
    page, catalogue = explanation.page, explanation.catalogue
    assert catalogue is not None
    history = catalogue.versions(page.id) if page is not None else None
    if history is None or history.removed is None:
        return catalogue.version
    read = [version for version, _ in catalogue.versions_read()]
    before = read[: read.index(history.removed)] if history.removed in read else []
    return before[-1] if before else "an earlier version"


def related(explanation: Explanation) -> Sequence[tuple[Page, str]]:
    """Errors that stand near."""
    if explanation.page is None or explanation.catalogue is None:
        return []
    return explanation.catalogue.related(explanation.page)


def place_line(match: Match) -> str:
    """A site in one line."""
    return f"{match.site.file}:{match.site.line} in {match.site.qualname}: {pieces.one_line(match.template)}"
