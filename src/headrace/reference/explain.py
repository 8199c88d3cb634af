"""A pasted message, explained: unwrapped, matched, its condition evaluated, and fixes worked out. Prints nothing.

    paste -> errors in it -> what is inside of each -> the site of one of them, or whose error it is

Knows catalogues by what they can be asked (`matching.Catalogue`), and of all packages only Headrace itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.reference import commands, owners, solve, tracebacks, wrappers
from headrace.reference.captures import checked, scaled_values
from headrace.reference.commands import Corrected
from headrace.reference.matching import Catalogue, Finding, Match, Verdict, find
from headrace.reference.own import OwnError, own_error
from headrace.reference.owners import Owner
from headrace.reference.records import Page, Placeholder, Site, Template
from headrace.reference.snippets import check_before_calling
from headrace.reference.tracebacks import Frame, Raised
from headrace.reference.wrappers import Said, Wrapper


@dataclass(frozen=True, slots=True)
class Explanation:
    """What can be said about a message, or about a page."""

    verdict: Verdict
    said: Said | None
    """The message that is explained, without what stood around it; None if a page was asked for."""
    catalogue: Catalogue | None = None
    page: Page | None = None
    site: Site | None = None
    match: Match | None = None
    others: tuple[Match, ...] = ()
    """Sites that could have raised it as well."""
    pieces: tuple[Match, ...] = ()
    """What the message was put together from, as far as it is found in it."""
    near: tuple[Match, ...] = ()
    """Nothing was claimed; these read a little like it."""
    owner: Owner | None = None
    """Whose error it is instead."""
    wrappers: tuple[Wrapper, ...] = ()
    """What stood around the message, outermost first."""
    fixes: tuple[solve.Fix, ...] = ()
    corrected: Corrected | None = None
    snippet: str | None = None
    carried: Owner | None = None
    """Whose error the found one carries in its message."""
    own: OwnError | None = None
    """What Headrace knows about an error of its own."""
    asked: str | None = None
    """The id that was asked for, if its page is another one by now."""

    @property
    def found(self) -> bool:
        """Whether a site is named."""
        return self.page is not None


@dataclass(frozen=True, slots=True)
class _Claim:
    """One message of a paste with what a catalogue says to it."""

    catalogue: Catalogue
    finding: Finding
    owner: Owner | None
    carrier: bool
    """It points to another error, or carries one."""


_POINTS_ELSEWHERE = re.compile(
    r"root cause above|(?:stack ?trace|traceback|error|logs?|output)s? (?:above|below)|"
    r"(?:above|previous) (?:error|stack ?trace)s?|find the original error",
    re.IGNORECASE,
)
_ORDER: Mapping[Verdict, int] = {"exact": 0, "likely": 1, "several": 1, "closest": 2, "none": 3}
_CARRIES = re.compile(r"(?:^|[._])(?:e|err|errs?|errors?|exc|exceptions?|cause|result|failure)(?:\.\w+)?\W*$")
"""Values that hold another error's message, by the names that people give them."""
_MOST_ERRORS = 12
_DEEPEST_WRAPPER = 3


def explain(paste: str, catalogues: Sequence[Catalogue], command: str | None = None) -> Explanation:
    """Explain a message, a traceback or a log. `catalogues` are asked in order; of equal findings the first counts."""
    pointed, paste = _pointer(paste)
    errors = _by_promise(tracebacks.parse(paste))
    claims: list[_Claim] = []
    for claim in (claim for error in errors[:_MOST_ERRORS] for claim in _claims(error, catalogues)):
        claims.append(claim)
        if _preference(claim) == (0, 0):
            break
    best = min(claims, key=_preference, default=None)
    if best is None or best.finding.best is None:
        answer = _abstained(claims, errors)
    else:
        inside = next((claim.owner for claim in claims if claim.owner and best.carrier), None)
        answer = replace(_explained(best, command), carried=inside)
    if pointed and (answer.page is None or answer.page.id != pointed):
        for catalogue in catalogues:
            if page := catalogue.page(pointed):
                return explain_page(page, catalogue, pointed)
    return answer


_POINTER = re.compile(r"^\W*headrace explain (?P<id>[0-9a-f]{16})\W*$", re.MULTILINE)


def _pointer(paste: str) -> tuple[str | None, str]:
    """The id that Headrace itself writes below an error, and the paste without it."""
    found = list(_POINTER.finditer(paste))
    return (found[-1]["id"] if found else None), _POINTER.sub("", paste)


def explain_page(page: Page, catalogue: Catalogue, asked: str | None = None) -> Explanation:
    """Explain a page that was asked for by an id, which may be one that it had before."""
    asked = None if asked == page.id else asked
    site = page.sites[0] if page.sites else None
    if site is None:
        return Explanation("exact", None, catalogue, page, own=_own(page), asked=asked)
    return Explanation(
        "exact",
        None,
        catalogue,
        page,
        site,
        fixes=tuple(solve.fixes(site.condition, {})),
        snippet=check_before_calling(site),
        own=_own(page),
        asked=asked,
    )


def _own(page: Page) -> OwnError | None:
    return own_error(page) if page.package == "headrace" else None


def template_text(template: Template) -> str:
    """A template as it is read, with the expressions of its values in braces."""
    return "".join(f"{{{piece.expr}}}" if isinstance(piece, Placeholder) else piece for piece in template)


# --- which error of a paste -------------------------------------------------------------------------------------------


def _by_promise(errors: Sequence[Raised]) -> list[Raised]:
    """The one that ended the program first; a cause before what it caused, and what was being handled after."""
    ordered: list[Raised] = []
    position = len(errors)
    while position > 0:
        end = position
        position -= 1
        while position > 0 and errors[position].link == "cause":
            position -= 1
        ordered += errors[position:end]
    said: dict[tuple[str, str], Raised] = {}
    for error in ordered:
        known = said.get((error.error_class, error.message))
        if known is None or (error.frames and not known.frames):
            said[error.error_class, error.message] = error
    return list(said.values())


def _preference(claim: _Claim) -> tuple[int, int]:
    verdict = claim.finding.verdict
    return (2, 0) if verdict == "none" else (int(claim.carrier), _ORDER[verdict])


def _claims(error: Raised, catalogues: Sequence[Catalogue]) -> Iterator[_Claim]:
    outer = Said(error.error_class, error.message)
    for said in wrappers.unwrap(outer):
        frames = error.frames if said.message == outer.message or said.error_class == outer.error_class else ()
        for catalogue in catalogues:
            yield from _claims_of(said, frames, catalogue, depth=0)


def _claims_of(said: Said, frames: Sequence[Frame], catalogue: Catalogue, depth: int) -> Iterator[_Claim]:
    finding = find(catalogue, said, frames)
    owner = _owner(said, frames, catalogue, finding)
    carried = _carried(finding) if owner is None else None
    if carried is not None and depth < _DEEPEST_WRAPPER:
        for inner in wrappers.unwrap(carried):
            yield from _claims_of(inner, (), catalogue, depth + 1)
    if owner:
        finding = replace(finding, verdict="none", matches=(), near=(*finding.matches, *finding.near))
    carrier = carried is not None or bool(_POINTS_ELSEWHERE.search(said.message))
    yield _Claim(catalogue, finding, owner, carrier)


def _owner(said: Said, frames: Sequence[Frame], catalogue: Catalogue, finding: Finding) -> Owner | None:
    """Who else says this, unless what was found speaks louder."""
    if said.owner:
        return owners.named(said.owner)
    owner = owners.owner(said.error_class, said.message, frames, catalogue.package)
    best = finding.best
    if owner is None or best is None:
        return owner
    if owner.certain:
        return None if best.by_frame else owner
    return owner if finding.verdict == "closest" or not best.same_class else None


def _carried(finding: Finding) -> Said | None:
    """The message that a wrapper of the package itself carries."""
    match = finding.best
    if match is None or match.fit is None or finding.verdict not in ("exact", "likely", "several"):
        return None
    placeholders = [piece for piece in match.template if isinstance(piece, Placeholder)]
    given = [(piece, text) for piece, text in zip(placeholders, match.fit.captured, strict=True) if text]
    texts = [
        (piece.kind == "exception", len(text), text)
        for piece, text in given
        if piece.kind == "exception" or _CARRIES.search(piece.expr) or (match.site.wrapper and " " in text)
    ]
    if not texts:
        return None
    wrapper = Wrapper("package", f"{match.site.error_class} of {match.site.qualname}", match.page.id)
    return Said("", max(texts)[2].strip(), (*finding.said.wrappers, wrapper))


# --- the answer -------------------------------------------------------------------------------------------------------


def _abstained(claims: Sequence[_Claim], errors: Sequence[Raised]) -> Explanation:
    owned = next((claim for claim in claims if claim.owner), None)
    chosen = owned or (claims[0] if claims else None)
    if chosen is None:
        said = Said(errors[0].error_class, errors[0].message) if errors else None
        return Explanation("none", said)
    return Explanation(
        "none",
        chosen.finding.said,
        chosen.catalogue,
        near=() if owned and owned.owner and owned.owner.certain else chosen.finding.near,
        owner=chosen.owner,
        wrappers=chosen.finding.said.wrappers,
    )


def _explained(claim: _Claim, command: str | None) -> Explanation:
    match = claim.finding.best
    assert match is not None
    flags = claim.catalogue.flags()
    if command:
        match = _with_command(match, command, flags)
    pieces = _pieces(claim.finding)
    causes = pieces or (match,)  # what a list of pieces is raised for is that there are some
    found = [fix for cause in causes for fix in solve.fixes(cause.site.condition, cause.values)]
    fixes = _settable_first(found, flags)
    said = claim.finding.said
    return Explanation(
        claim.finding.verdict,
        said,
        claim.catalogue,
        match.page,
        match.site,
        match,
        others=claim.finding.matches[1:],
        pieces=pieces,
        near=claim.finding.near,
        wrappers=said.wrappers,
        fixes=fixes,
        corrected=commands.corrected(command, fixes, flags) if command else None,
        snippet=check_before_calling(match.site),
        own=_own(match.page),
    )


def _pieces(finding: Finding) -> tuple[Match, ...]:
    """The pieces of the message that was found, which have sites of their own."""
    best = finding.best
    if best is None or best.site.fragment:
        return ()
    others = (*finding.matches[1:], *finding.near)
    return tuple(each for each in others if each.site.fragment and each.site.error_class == best.site.error_class)


def _settable_first(fixes: Sequence[solve.Fix], flags: commands.Flags) -> tuple[solve.Fix, ...]:
    """What a flag can set before what only the code or the model can."""

    def unset(fix: solve.Fix) -> tuple[bool, int]:
        return (not fix.verified, sum(commands.flag_of(change.expr, flags) is None for change in fix.changes))

    return tuple(sorted(fixes, key=unset))


def _with_command(match: Match, command: str, flags: commands.Flags) -> Match:
    """What the command line says, where the message does not tell."""
    exprs = [name for atom in match.site.condition.atoms for name in solve.settable_names(atom.code)]
    values = commands.values_given(command, exprs, flags) | dict(match.values)
    return replace(match, values=values, checks=checked(match.site, values, scaled_values(values)))
