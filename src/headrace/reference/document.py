"""One error as plain data: what JSON, the terminal's `--json` and the pages show, each statement with its basis.

    page_document(explanation)   what is known of the error: message, meaning, place, fixes, examples, relatives
    document(explanation)        the same, and what a pasted message adds: its values, what they say to the condition

A *basis* is where a statement comes from: `guard` (the code that is tested), `docstring`, `comment`, `test` (it was
run, or a test of the package says so), `note` (written by hand) or `model`. Prints nothing, and knows no HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.reference import commands, explained
from headrace.reference.explain import Explanation, template_text
from headrace.reference.matching import Catalogue, Match
from headrace.reference.own import OwnError
from headrace.reference.pieces import one_line
from headrace.reference.prevention import expected_by, prevention
from headrace.reference.records import Atom, Page, Pair, Placeholder, Site, Template
from headrace.reference.sentences import atom_phrase, condition_sentence
from headrace.reference.solve import Change, Fix
from headrace.reference.statements import Statement, statements

ID_SCHEME = 1
_AROUND = 6
_FARTHEST_TEST = 24
"""An excerpt begins above the tests that decide, if they stand at most so many lines above the error."""
_MOST_SITES = 50
_MOST_TESTS = 5
_LONGEST_TITLE = 90


def document(explanation: Explanation) -> dict[str, Any]:
    """Everything as plain data."""
    found: dict[str, Any] = {"id_scheme": ID_SCHEME, "verdict": explanation.verdict, "found": explanation.found}
    if explanation.catalogue is not None:
        found["package"] = _package(explanation.catalogue)
    if explanation.said is not None:
        found["message"] = explanation.said.message
        found["message_class"] = explanation.said.error_class or None
        found["how_sure"] = explained.how_sure(explanation)
    found["wrappers"] = [
        {"kind": wrapper.kind, "detail": wrapper.detail, "page": wrapper.page_id or None}
        for wrapper in explanation.wrappers
    ]
    if not explanation.found:
        return found | _nothing(explanation)
    return found | page_document(explanation) | _of_message(explanation)


def _nothing(explanation: Explanation) -> dict[str, Any]:
    owner = explanation.owner
    return {
        "owner": None if owner is None else {"name": owner.name, "because": owner.because, "ask": owner.ask},
        "advice": explained.abstention(explanation),
        "near": [_near(match) for match in explanation.near],
    }


def _near(match: Match) -> dict[str, Any]:
    return _place(match.page, match.site) | {"template": one_line(match.template)}


def _of_message(explanation: Explanation) -> dict[str, Any]:
    """What only a pasted message tells."""
    match = explanation.match
    corrected = explanation.corrected
    return {
        "captured": {} if match is None else {name: _plain(value) for name, value in match.values.items()},
        "command": None if corrected is None else {"before": corrected.before, "after": corrected.after},
        "carries": None if explanation.carried is None else explanation.carried.name,
        "difference": explained.word_difference(explanation),
        "message_pieces": [_near(piece) for piece in explanation.pieces],
        "others": [_near(other) for other in explanation.others],
    }


# --- an error ---------------------------------------------------------------------------------------------------------


def page_document(explanation: Explanation) -> dict[str, Any]:
    """What is known of the error that was found, whichever way it was found."""
    page, site, catalogue = explanation.page, explanation.site, explanation.catalogue
    assert page is not None
    assert catalogue is not None
    flags = catalogue.flags()
    template = explanation.match.template if explanation.match else page.template
    history = _history(page, catalogue)
    gone = history is not None and history["removed"] is not None
    # The source that is kept is the current version's: the lines of what is gone are others now.
    lines = (catalogue.source(site.file) or "").splitlines() if site and not gone else []
    said = statements(site, lines) if site else []
    return {
        "id_scheme": ID_SCHEME,
        "id": page.id,
        "url": f"/errors/{page.id}",
        "package": _package(catalogue),
        "title": _title(page, explanation.own),
        "error_class": page.error_class,
        "template": template_text(template),
        "pieces": _pieces(template, flags),
        "meaning": _meaning(site, said, explanation.own),
        "condition": None if site is None else _condition(explanation, site),
        "site": None if site is None else _linked(page, site, catalogue, gone) | _of_site(site, lines),
        "sites": [_linked(page, other, catalogue, gone) for other in page.sites[:_MOST_SITES] if other != site],
        "fixes": _own_fixes(explanation.own) + [_fix(fix, flags) for fix in explanation.fixes],
        "example": _example(explanation.own),
        "verified": _verified(None if site is None else site.pair),
        "check": None if explanation.snippet is None else {"code": explanation.snippet, "basis": "guard"},
        "prevention": [] if site is None else [_statement(each) for each in prevention(site, catalogue)],
        "when": {
            "trigger": [] if site is None else _trigger(page, site),
            "tests": [] if gone else _tests(page, catalogue),
            "situations": _situations(explanation),
        },
        "related": [
            {"id": other.id, "error_class": other.error_class, "template": one_line(other.template), "why": why}
            for other, why in explained.related(explanation)
        ],
        "own": _own(explanation.own),
        "history": history,
    }


def own_document(own: OwnError, page_id: str) -> dict[str, Any]:
    """An error of Headrace as its class alone tells it, where its source was not read."""
    return {
        "id_scheme": ID_SCHEME,
        "id": page_id,
        "url": f"/errors/{page_id}",
        "package": {"name": "headrace", "version": None, "commit": None},
        "title": own.name,
        "error_class": own.name,
        "template": _without_specs(own.template),
        "pieces": [_without_specs(own.template)],
        "meaning": _meaning(None, [], own),
        "condition": None,
        "site": None,
        "sites": [],
        "fixes": _own_fixes(own),
        "example": _example(own),
        "verified": None,
        "check": None,
        "prevention": [],
        "when": {"trigger": [], "tests": [], "situations": []},
        "related": [],
        "own": _own(own),
        "history": None,
    }


def _package(catalogue: Catalogue) -> dict[str, Any]:
    return {"name": catalogue.package, "version": catalogue.version, "commit": catalogue.commit}


def _verified(pair: Pair | None) -> dict[str, Any] | None:
    if pair is None:
        return None
    before, after = ("\n".join(f"{name} = {value}" for name, value in side) for side in (pair.before, pair.after))
    return {"by": "running it", "before": before, "after": after, "ends": pair.ends, "basis": "test"}


def _title(page: Page, own: OwnError | None) -> str:
    if own is not None:
        return own.name
    text = one_line(page.template) or f"{page.error_class} in {page.sites[0].qualname if page.sites else 'no function'}"
    return text if len(text) <= _LONGEST_TITLE else text[:_LONGEST_TITLE].rpartition(" ")[0] + " ..."


def _pieces(template: Template, flags: commands.Flags) -> list[Any]:
    """Literal text, and for each value where it comes from."""
    return [
        {"expr": piece.expr, "kind": piece.kind, "flag": commands.flag_of(piece.expr, flags)}
        if isinstance(piece, Placeholder)
        else piece
        for piece in template
    ]


# --- what it means, and when ------------------------------------------------------------------------------------------


def _statement(statement: Statement) -> dict[str, Any]:
    return {
        "text": statement.text,
        "basis": statement.basis,
        "about": statement.about or None,
        "file": statement.file or None,
        "lines": None if statement.lines is None else list(statement.lines),
    }


def _meaning(site: Site | None, said: Sequence[Statement], own: OwnError | None) -> list[dict[str, Any]]:
    found = []
    if own is not None:
        found.append(Statement(" ".join(own.meaning.split()), "docstring", own.name))
    if site is not None and (site.condition.atoms or site.condition.complete):
        atoms = [atom.line for atom in site.condition.atoms if not atom.early_exit] or [site.line]
        lines = (min(atoms), max(atoms))
        found.append(Statement(condition_sentence(site.condition), "guard", site.qualname, site.file, lines))
    if site is not None and site.wrapper:
        text = "It carries the message of another error: the root cause is in what it quotes, or in the lines above it."
        found.append(Statement(text, "guard", site.qualname, site.file, (site.line, site.end_line)))
    return [_statement(each) for each in (*found, *said)]


def _trigger(page: Page, site: Site) -> list[dict[str, Any]]:
    """What runs into it: the operation, and the checks before it."""
    place = (site.function_line or site.line,) * 2
    found = [Statement(_operation(site), "guard", site.qualname, site.file, place)]
    if site.caught_locally:
        text = "The same function catches it, so that it is seen only in a log or as the cause of another error."
        found.append(Statement(text, "guard", site.qualname, site.file, (site.line, site.end_line)))
    if site.kind == "assert":
        text = "It is an `assert`: Python does not check it when it runs with `-O`."
        found.append(Statement(text, "guard", site.qualname, site.file, (site.line, site.end_line)))
    if len(page.sites) > 1:
        text = f"{len(page.sites)} places raise an error that reads the same; the traceback tells which."
        found.append(Statement(text, "guard"))
    return [_statement(each) for each in found]


def _tests(page: Page, catalogue: Catalogue) -> list[dict[str, Any]]:
    """The package's own tests that expect the error, with what they expect to fail."""
    expected = catalogue.expectations(page.id)[:_MOST_TESTS]
    return [
        _statement(expected_by(each)) | {"permalink": catalogue.permalink(each), "call": each.call} for each in expected
    ]


def _situations(explanation: Explanation) -> list[dict[str, Any]]:
    """What a model wrote."""
    prose = explained.situations_of(explanation)
    if prose is None:
        return []
    return [_statement(Statement(text, "model", prose.model)) for text in prose.sentences]


_CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "model_post_init")


def _operation(site: Site) -> str:
    owner, _, name = site.qualname.rpartition(".")
    marks = [mark for mark in site.decorators if "validator" in mark]
    if marks and "field_validator" in marks[0]:
        return f"Checked when `{owner}` is made or a field is given a value (`@{marks[0]}`)."
    if marks:
        return f"Checked when `{owner}` is made from its fields (`@{marks[0]}`)."
    if name in _CONSTRUCTORS and owner:
        return f"Checked when `{owner}` is made (`{name}`)."
    if site.qualname == "<module>":
        return f"Checked when `{site.file.removesuffix('.py').replace('/', '.')}` is imported."
    if site.kind == "returned":
        return f"`{site.qualname}` returns it to its caller."
    if "property" in site.decorators or "cached_property" in site.decorators:
        return f"Checked when `{name}` of `{owner}` is read."
    return f"Checked when `{site.qualname}` is called."


def _condition(explanation: Explanation, site: Site) -> dict[str, Any]:
    checks = {check.atom: check for check in explanation.match.checks} if explanation.match else {}
    return {
        "text": condition_sentence(site.condition),
        "basis": "guard",
        "atoms": [_atom(atom, checks.get(atom)) for atom in site.condition.atoms],
        "complete": site.condition.complete,
        "incomplete": explained.incomplete(site),
    }


def _atom(atom: Atom, check: Any) -> dict[str, Any]:
    return {
        "code": atom.code,
        "words": atom_phrase(atom),
        "in_inputs": atom.substituted,
        "line": atom.line,
        "kind": atom.kind,
        "early_exit": atom.early_exit,
        "with_values": check.code if check else None,
        "holds": check.holds if check else None,
    }


# --- where ------------------------------------------------------------------------------------------------------------


def _place(page: Page, site: Site) -> dict[str, Any]:
    return {"id": page.id, "file": site.file, "line": site.line, "qualname": site.qualname}


def _linked(page: Page, site: Site, catalogue: Catalogue, gone: bool) -> dict[str, Any]:
    return _place(page, site) | {"permalink": None if gone else catalogue.permalink(site)}


def _of_site(site: Site, lines: Sequence[str]) -> dict[str, Any]:
    return {
        "end_line": site.end_line,
        "kind": site.kind,
        "decorators": list(site.decorators),
        "wrapper": site.wrapper,
        "caught_locally": site.caught_locally,
        "excerpt": _excerpt(site, lines),
    }


def _excerpt(site: Site, lines: Sequence[str]) -> dict[str, Any] | None:
    """The lines around the error and the tests that decide: `marked` are theirs."""
    if not lines:
        return None
    tests = [
        atom.line
        for atom in site.condition.atoms
        if not atom.early_exit and site.line - _FARTHEST_TEST <= atom.line <= site.line
    ]
    first = max(1, min([site.line - _AROUND, *(line - 2 for line in tests)]))
    last = min(len(lines), site.end_line + 3)
    return {
        "first_line": first,
        "lines": list(lines[first - 1 : last]),
        "raised": [site.line, site.end_line],
        "tests": sorted({line for line in tests if line < site.line}),
    }


# --- what to do -------------------------------------------------------------------------------------------------------


def _own_fixes(own: OwnError | None) -> list[dict[str, Any]]:
    if own is None or not own.remedy:
        return []
    text = _without_specs(own.remedy)
    return [{"strategy": "remedy", "verified": False, "text": text, "basis": "note", "changes": []}]


def _without_specs(template: str) -> str:
    return re.sub(r"\{(\w+)[:!][^{}]*\}", r"{\1}", template)


def _fix(fix: Fix, flags: commands.Flags) -> dict[str, Any]:
    return {
        "strategy": fix.strategy,
        "verified": fix.verified,
        "text": explained.fix_line(fix, flags),
        "basis": "guard",
        "changes": [_change(change, flags) for change in fix.changes],
    }


def _change(change: Change, flags: commands.Flags) -> dict[str, Any]:
    return {
        "expr": change.expr,
        "flag": commands.flag_of(change.expr, flags),
        "words": change.words,
        "value": _plain(change.value) if change.has_value else None,
        "also": [_plain(other) for other in change.others],
    }


def _example(own: OwnError | None) -> dict[str, Any] | None:
    """Steps that lead to the error and steps that do not; Headrace's own are run by its tests."""
    if own is None or own.example is None:
        return None
    example = own.example
    return {
        "before": f"{example.given}{example.before}".strip(),
        "after": f"{example.given}{example.after}".strip(),
        "basis": "test",
    }


def _own(own: OwnError | None) -> dict[str, Any] | None:
    if own is None:
        return None
    return {
        "class": own.name,
        "meaning": own.meaning,
        "template": own.template,
        "remedy": own.remedy,
        "rendered": own.rendered,
    }


def _history(page: Page, catalogue: Catalogue) -> dict[str, Any] | None:
    history = catalogue.versions(page.id)
    if history is None:
        return None
    return {
        "introduced": history.introduced,
        "removed": history.removed,
        "reworded_to": history.successor,
        "earlier": [
            {"id": old.id, "template": one_line(old.template)}
            for old in (catalogue.earlier(page.id) if history.predecessors else ())
        ],
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
