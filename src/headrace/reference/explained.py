"""An explanation in words and as plain data: what the terminal, JSON and a page show alike. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.reference import commands, pieces
from headrace.reference.closest import difference
from headrace.reference.explain import Explanation, template_text
from headrace.reference.matching import Catalogue, Match
from headrace.reference.messages import one_line
from headrace.reference.own import OwnError
from headrace.reference.prose import situations
from headrace.reference.records import Atom, Page, Prose, Site
from headrace.reference.sentences import atom_phrase
from headrace.reference.solve import Change, Fix

ID_SCHEME = 1
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
    return [_fix_line(fix, flags) for fix in explanation.fixes]


def _fix_line(fix: Fix, flags: commands.Flags) -> str:
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
    found = _situations(explanation)
    return (
        [f"{sentence} (written by {found.model}, from the source alone)" for sentence in found.sentences]
        if found
        else []
    )


def _situations(explanation: Explanation) -> Prose | None:
    if explanation.page is None or explanation.catalogue is None or is_gone(explanation):
        return None
    return situations(explanation.page, explanation.catalogue)


def _situation_documents(explanation: Explanation) -> list[dict[str, Any]]:
    found = _situations(explanation)
    if found is None:
        return []
    return [{"text": sentence, "basis": "model", "model": found.model} for sentence in found.sentences]


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
        lines.append(f"{history.removed} has this message no more")
        now = catalogue.page(history.successor) if history.successor else None
        if now is not None:
            lines.append(f"it reads now: {pieces.one_line(now.template)} ({now.id})")
    return lines


def _earlier(page_id: str, catalogue: Catalogue) -> Iterator[Page]:
    """The wordings of a page, the last one first."""
    for old in catalogue.earlier(page_id):
        yield old
        yield from _earlier(old.id, catalogue)


def is_gone(explanation: Explanation) -> bool:
    """Whether the current version has the page no more: then the source that is kept is not the page's."""
    page, catalogue = explanation.page, explanation.catalogue
    history = catalogue.versions(page.id) if page is not None and catalogue is not None else None
    return history is not None and history.removed is not None


def document(explanation: Explanation) -> dict[str, Any]:
    """Everything as plain data, for JSON."""
    found: dict[str, Any] = {"id_scheme": ID_SCHEME, "verdict": explanation.verdict, "found": explanation.found}
    if explanation.catalogue is not None:
        catalogue = explanation.catalogue
        found["package"] = {"name": catalogue.package, "version": catalogue.version, "commit": catalogue.commit}
    if explanation.said is not None:
        found["message"] = explanation.said.message
        found["message_class"] = explanation.said.error_class or None
    found["wrappers"] = [
        {"kind": wrapper.kind, "detail": wrapper.detail, "page": wrapper.page_id or None}
        for wrapper in explanation.wrappers
    ]
    if not explanation.found:
        return found | _nothing(explanation)
    return found | _something(explanation)


def _nothing(explanation: Explanation) -> dict[str, Any]:
    owner = explanation.owner
    return {
        "owner": None if owner is None else {"name": owner.name, "because": owner.because, "ask": owner.ask},
        "advice": abstention(explanation),
        "near": [_place(match.page, match.site) for match in explanation.near],
    }


def _something(explanation: Explanation) -> dict[str, Any]:
    page, site, catalogue, match = explanation.page, explanation.site, explanation.catalogue, explanation.match
    assert page is not None
    assert catalogue is not None
    flags = catalogue.flags()
    return {
        "id": page.id,
        "error_class": page.error_class,
        "template": template_text(match.template if match else page.template),
        "captured": {} if match is None else {name: _plain(value) for name, value in match.values.items()},
        "site": None
        if site is None
        else _place(page, site) | {"permalink": None if is_gone(explanation) else catalogue.permalink(site)},
        "condition": None if site is None else _condition(explanation, site),
        "fixes": [_fix(fix, flags) for fix in explanation.fixes],
        "command": None
        if explanation.corrected is None
        else {"before": explanation.corrected.before, "after": explanation.corrected.after},
        "check": explanation.snippet,
        "carries": None if explanation.carried is None else explanation.carried.name,
        "own": _own(explanation.own),
        "difference": word_difference(explanation),
        "pieces": [
            _place(each.page, each.site) | {"template": template_text(each.template)} for each in explanation.pieces
        ],
        "history": history_lines(explanation),
        "situations": _situation_documents(explanation),
        "others": [_place(other.page, other.site) for other in explanation.others],
        "related": [
            {"id": other.id, "template": template_text(other.template), "why": why}
            for other, why in related(explanation)
        ],
    }


def _own(own: OwnError | None) -> dict[str, Any] | None:
    if own is None:
        return None
    example = own.example
    return {
        "class": own.name,
        "meaning": own.meaning,
        "template": own.template,
        "remedy": own.remedy,
        "rendered": own.rendered,
        "before": example and f"{example.given}{example.before}".strip(),
        "after": example and f"{example.given}{example.after}".strip(),
    }


def related(explanation: Explanation) -> Sequence[tuple[Page, str]]:
    """Errors that stand near."""
    if explanation.page is None or explanation.catalogue is None:
        return []
    return explanation.catalogue.related(explanation.page)


def _place(page: Page, site: Site) -> dict[str, Any]:
    return {"id": page.id, "file": site.file, "line": site.line, "qualname": site.qualname}


def _condition(explanation: Explanation, site: Site) -> dict[str, Any]:
    checks = {check.atom: check for check in explanation.match.checks} if explanation.match else {}
    atoms = []
    for atom in site.condition.atoms:
        check = checks.get(atom)
        atoms.append(
            {
                "code": atom.code,
                "words": atom_phrase(atom),
                "line": atom.line,
                "kind": atom.kind,
                "early_exit": atom.early_exit,
                "with_values": check.code if check else None,
                "holds": check.holds if check else None,
            }
        )
    return {"atoms": atoms, "complete": site.condition.complete, "incomplete": site.condition.incomplete}


def _fix(fix: Fix, flags: commands.Flags) -> dict[str, Any]:
    return {
        "strategy": fix.strategy,
        "verified": fix.verified,
        "text": _fix_line(fix, flags),
        "changes": [
            {
                "expr": change.expr,
                "flag": commands.flag_of(change.expr, flags),
                "words": change.words,
                "value": _plain(change.value) if change.has_value else None,
                "also": [_plain(other) for other in change.others],
            }
            for change in fix.changes
        ],
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def place_line(match: Match) -> str:
    """A site in one line."""
    return f"{match.site.file}:{match.site.line} in {match.site.qualname}: {pieces.one_line(match.template)}"
