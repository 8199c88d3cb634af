"""An explanation as text for a terminal, or plain for a file. Knows the explanation, not how it came about."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from headrace.reference import explained, pieces
from headrace.reference.explain import Explanation
from headrace.reference.sentences import atom_phrase

_WIDEST = 110
_LABEL = 11
_MOST_RELATED = 4
_MOST_TESTS = 3
_AROUND = 4
_WORDS_ONLY = ("always", "handler", "exists")
"""Kinds of tests whose code says less than their words."""


def show(explanation: Explanation) -> None:
    """Print an explanation to standard output."""
    console = Console(highlight=False, soft_wrap=True)
    width = min(console.width, _WIDEST) if console.is_terminal else _WIDEST
    for line in _found(explanation, width) if explanation.found else _not_found(explanation, width):
        console.print(line)


def _not_found(explanation: Explanation, width: int) -> Iterator[Text]:
    yield Text("not explained", style="bold")
    yield from _wrapped("", explained.abstention(explanation), width)
    yield from _chain(explanation, width)
    yield from _section("near", (explained.place_line(match) for match in explanation.near), width, style="dim")


def _found(explanation: Explanation, width: int) -> Iterator[Text]:
    yield from _head(explanation, width)
    yield from _chain(explanation, width)
    if explanation.carried is not None:
        yield from _wrapped("carries", f"an error of {explanation.carried.name}: {explanation.carried.because}", width)
    yield from _difference(explanation, width)
    yield from _section("history", explained.history_lines(explanation), width)
    yield from _why(explanation, width)
    yield from _section("of", explained.piece_lines(explanation), width)
    yield from _where(explanation)
    yield from _section("fix", explained.fix_lines(explanation), width)
    yield from _section("verified", explained.tried(explanation), width)
    yield from _command(explanation)
    yield from _own(explanation, width)
    yield from _section("situations", explained.situation_lines(explanation), width)
    yield from _block("check", (explanation.snippet or "").splitlines())
    yield from _section("prevent", explained.prevention_lines(explanation), width)
    yield from _section("tests", explained.test_lines(explanation)[:_MOST_TESTS], width, style="dim")
    others = [explained.place_line(match) for match in explanation.others]
    yield from _section("or", others, width, style="dim")
    related = [f"{page.id}  {pieces.one_line(page.template)}" for page, _ in explained.related(explanation)]
    yield from _section("related", related[:_MOST_RELATED], width, style="dim")


def _head(explanation: Explanation, width: int) -> Iterator[Text]:
    page, catalogue = explanation.page, explanation.catalogue
    assert page is not None
    assert catalogue is not None
    first = Text.assemble(
        (page.error_class, "bold red"),
        f" of {catalogue.package} {explained.version_of(explanation)}  ",
        (page.id, "dim"),
    )
    if explanation.said is not None:
        first.append(
            f"  {explained.how_sure(explanation)}", style="green" if explanation.verdict == "exact" else "yellow"
        )
    yield first
    template = explanation.match.template if explanation.match else page.template
    yield from _wrapped("", pieces.one_line(template), width)
    yield Text("")


def _chain(explanation: Explanation, width: int) -> Iterator[Text]:
    yield from _section("inside of", explained.chain(explanation), width, style="dim")


def _difference(explanation: Explanation, width: int) -> Iterator[Text]:
    changes = explained.word_difference(explanation)
    if not changes:
        return
    text = " ".join(
        words if kind == "same" else f"[-{words}-]" if kind == "yours" else f"{{+{words}+}}" for kind, words in changes
    )
    yield from _wrapped("differs", f"{text}   ([-yours-] {{+this version's+}})", width)


def _why(explanation: Explanation, width: int) -> Iterator[Text]:
    site = explanation.site
    if site is None:
        return
    lines: list[str] = []
    for atom, told in explained.reasons(explanation):
        lines.append(atom.code if atom.kind not in _WORDS_ONLY else atom_phrase(atom))
        if atom.kind not in _WORDS_ONLY:
            lines.append(f"    {atom_phrase(atom)}")
        if told:
            lines.append(f"    {told}")
    if not lines and site.condition.complete:
        lines.append("always, when it is reached")
    if reason := explained.incomplete(site):
        lines.append(f"(not the whole condition: {reason})")
    yield from _section("why", lines, width)


def _where(explanation: Explanation) -> Iterator[Text]:
    site, catalogue = explanation.site, explanation.catalogue
    if site is None or catalogue is None:
        return
    place = f"{site.file}:{site.line} in {site.qualname}"
    if explained.is_gone(explanation):
        # The source that is kept is that of a later version.
        yield _labelled("where", f"{place}, in {explained.version_of(explanation)}")
        return
    yield _labelled("where", place)
    if link := catalogue.permalink(site):
        yield _labelled("", link)
    for number, line in catalogue.excerpt(site, _AROUND):
        reason = site.line <= number <= site.end_line
        yield Text(f"{'':{_LABEL}}{number:>6} {'>' if reason else ' '} {line}", style="" if reason else "dim")


def _own(explanation: Explanation, width: int) -> Iterator[Text]:
    own = explanation.own
    if own is None:
        return
    yield from _wrapped("means", " ".join(own.meaning.split()), width)
    if explanation.said is None:
        yield from _section("example", own.rendered.splitlines(), width)
    elif own.remedy:
        yield from _section("remedy", own.remedy.splitlines(), width)
    if own.example is not None:
        yield from _block("before", own.example.before.strip().splitlines())
        yield from _block("after", own.example.after.strip().splitlines())


def _command(explanation: Explanation) -> Iterator[Text]:
    if explanation.corrected is not None:
        yield Text.assemble((f"{'command':<{_LABEL}}", "bold"), (f"- {explanation.corrected.before}", "red"))
        yield Text.assemble(f"{'':{_LABEL}}", (f"+ {explanation.corrected.after}", "green"))


def _section(label: str, lines: Iterable[str], width: int, style: str = "") -> Iterator[Text]:
    for number, line in enumerate(lines):
        yield from _wrapped(label if number == 0 else "", line, width, style)


def _block(label: str, lines: Iterable[str]) -> Iterator[Text]:
    for number, line in enumerate(lines):
        yield _labelled(label if number == 0 else "", line)


def _wrapped(label: str, text: str, width: int, style: str = "") -> Iterator[Text]:
    indent = " " * _LABEL
    lead = text[: len(text) - len(text.lstrip())]
    room = max(20, width - _LABEL - len(lead))
    body = textwrap.wrap(text.lstrip(), room, break_on_hyphens=False, break_long_words=False) or [""]
    for number, line in enumerate(body):
        yield _labelled(label, lead + line, style) if number == 0 else Text(indent + lead + line, style=style)


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "bold"), (text, style))
