"""From a message to the site that raised it: by frame, by exact template, else by the closest words. Or nothing.

Knows the records and what a catalogue can be asked; not how one is stored, and not how a finding is shown.

A claim that is wrong costs more than none, so every kind of agreement has a threshold, in the weight of rare words that
text and template share (`closest.Rarity`). `benchmarks/explain_accuracy.py` measures what they let through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.reference.captures import Check, captured_values, checked, scaled_values
from headrace.reference.closest import Nearness, Rarity, nearness, template_words, words
from headrace.reference.inversion import Fit, Squeezed, fit, squeeze
from headrace.reference.records import Expectation, History, Page, Prose, Site, Template
from headrace.reference.tracebacks import Frame
from headrace.reference.wrappers import Said

Verdict = Literal["exact", "likely", "closest", "several", "none"]


class Catalogue(Protocol):
    """What is asked of the errors of one version of a package."""

    @property
    def package(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def commit(self) -> str | None: ...

    def page(self, page_id: str) -> Page | None: ...
    def near_ids(self, page_id: str, limit: int) -> list[str]: ...
    def sites_at(self, file_suffix: str, qualname: str | None = None) -> list[tuple[str, Site]]: ...
    def pages_with_words(self, words: Sequence[str], limit: int) -> list[Page]: ...
    def pages(self) -> Iterable[Page]: ...
    def related(self, page: Page, limit: int = 5) -> list[tuple[Page, str]]: ...
    def source(self, file: str) -> str | None: ...
    def excerpt(self, site: Site, around: int = 6) -> list[tuple[int, str]]: ...
    def permalink(self, place: Site | Expectation) -> str | None: ...
    def expectations(self, page_id: str) -> list[Expectation]: ...
    def bases(self, error_class: str) -> list[str]: ...
    def flags(self) -> Mapping[str, str]: ...
    def rarity(self, words: Sequence[str]) -> Rarity: ...
    def versions(self, page_id: str) -> History | None: ...
    def earlier(self, page_id: str) -> list[Page]: ...
    def versions_read(self) -> list[tuple[str, str]]: ...
    def prose(self, page_id: str) -> Prose | None: ...


@dataclass(frozen=True, slots=True)
class Match:
    """A site that may have raised the message, and what speaks for it."""

    page: Page
    site: Site
    template: Template
    fit: Fit | None
    nearness: Nearness
    by_frame: bool
    same_class: bool
    checks: tuple[Check, ...]
    values: Mapping[str, object]
    """The expressions of the template with the values that the message shows."""

    @property
    def worth(self) -> float:
        """Weight of the template's own words that were found in its order."""
        if self.fit is None:
            return self.nearness.common
        # By letters: the words in common may also stand in values.
        return self.fit.share * self.nearness.whole

    @property
    def consistent(self) -> bool | None:
        """Whether the values of the message make the site's condition true; None if they do not tell."""
        told = [check.holds for check in self.checks if not check.atom.early_exit and check.holds is not None]
        return None if not told else all(told)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found for one message, best first; `matches` beyond the first are as good, or nearly."""

    verdict: Verdict
    said: Said
    matches: tuple[Match, ...] = ()
    near: tuple[Match, ...] = ()
    """Too far to claim; to look at."""

    @property
    def best(self) -> Match | None:
        """The site to explain."""
        return self.matches[0] if self.matches else None


_CANDIDATES = 40
_END_WORDS = 12
_COMPARED = 16
"""So many candidates that do not fit as templates are compared word by word."""
_FITTING = 8
"""So many of the best fits are checked against their conditions."""

# Thresholds, in the weight of shared words. See the docstring of the module.
FULL, FULL_OF_OTHER_CLASS, LONGER, CUT, BY_FRAME = 9.0, 16.0, 16.0, 18.0, 0.0
CLOSEST_SCORE, CLOSEST_MORE, CLOSEST_LESS = 22.0, 0.5, 0.25


def find(catalogue: Catalogue, said: Said, frames: Sequence[Frame] = ()) -> Finding:
    """The site of `catalogue` that raises what is said, with how sure that is."""
    said_words = words(said.message)
    text = squeeze(said.message)
    here = list(_sites_of_frames(catalogue, frames))
    pages = _candidates(catalogue, said_words)
    every_word = set(said_words).union(*map(_words_of, [*pages, *(page for page, _ in here)]))
    search = _Search(said, said_words, text, catalogue.rarity(sorted(every_word)))
    matches = [search.match(page, site, by_frame=True) for page, site in here]
    of_frames = {page.id for page, _ in here}
    matches += [search.match_page(page) for page in search.promising(pages) if page.id not in of_frames]
    ranked = sorted((each for each in matches if each), key=_rank, reverse=True)
    return _decided(said, ranked)


def _candidates(catalogue: Catalogue, said_words: Sequence[str]) -> list[Page]:
    """Pages that share rare words with the message, or with its ends: long values have rare words of their own."""
    parts = [said_words]
    if len(said_words) > 2 * _END_WORDS:
        parts += [said_words[:_END_WORDS], said_words[-_END_WORDS:]]
    found = {page.id: page for part in parts if part for page in catalogue.pages_with_words(part, _CANDIDATES)}
    return list(found.values())


def _forms(page: Page) -> set[Template]:
    return {template for site in page.sites for template in site.templates}


def _words_of(page: Page) -> set[str]:
    return {word for template in _forms(page) for word in template_words(template)}


# --- candidates -----------------------------------------------------------------------------------------------------


def _sites_of_frames(catalogue: Catalogue, frames: Sequence[Frame]) -> Iterator[tuple[Page, Site]]:
    """The sites of the function that the last frame stands in, nearest line first."""
    if not frames:
        return
    last = frames[-1]
    suffix = file_in_package(last.file, catalogue.package)
    if suffix is None:
        return
    plain = last.function.rpartition(".")[2]
    sites = [each for each in catalogue.sites_at(suffix) if each[1].qualname.rpartition(".")[2] == plain or not plain]
    for page_id, site in sorted(sites, key=lambda each: abs(each[1].line - last.line)):
        page = catalogue.page(page_id)
        if page:
            yield page, site


def file_in_package(path: str, package: str) -> str | None:
    """`vllm/config/model.py` of an absolute path, or None if the file is not in the package."""
    parts = path.replace("\\", "/").split("/")
    root = package.replace("-", "_")
    if root not in parts[:-1]:
        return None
    return "/".join(parts[len(parts) - 1 - parts[::-1].index(root) :])


class _Search:
    """Matches one message against pages."""

    def __init__(self, said: Said, said_words: Sequence[str], text: Squeezed, rarity: Rarity) -> None:
        self._said, self._words, self._text, self._rarity = said, said_words, text, rarity
        self._fits: dict[Template, Fit | None] = {}
        self._nearness: dict[Template, Nearness] = {}

    def promising(self, pages: Sequence[Page]) -> list[Page]:
        """Those that fit, and of the others those that share the heaviest words with the message."""
        said = set(self._words)
        fitting = [page for page in pages if any(self._fit(form) for form in _forms(page))]
        kept = {page.id for page in fitting}
        others = [page for page in pages if page.id not in kept]
        others.sort(key=lambda page: self._rarity.total(said & _words_of(page)), reverse=True)
        return [*fitting, *others[:_COMPARED]]

    def match_page(self, page: Page) -> Match | None:
        """The best of a page's sites: they share their text, and differ in their condition and their file."""
        matches = [self.match(page, site, by_frame=False) for site in page.sites[:_FITTING]]
        return max((each for each in matches if each), key=_rank, default=None)

    def match(self, page: Page, site: Site, *, by_frame: bool) -> Match | None:
        """One site, with the form of its message that suits best."""
        if not site.templates:
            return None
        forms = [(template, self._fit(template), self._near(template)) for template in site.templates]
        template, fitting, near = max(forms, key=lambda form: (_mode_rank(form[1]), form[2].score))
        values = captured_values(template, fitting) if fitting else {}
        return Match(
            page=page,
            site=site,
            template=template,
            fit=fitting,
            nearness=near,
            by_frame=by_frame,
            same_class=_same_class(self._said.error_class, site.error_class),
            checks=checked(site, values, scaled_values(values)),
            values=values,
        )

    def _fit(self, template: Template) -> Fit | None:
        if template not in self._fits:
            self._fits[template] = fit(template, self._text)
        return self._fits[template]

    def _near(self, template: Template) -> Nearness:
        if template not in self._nearness:
            self._nearness[template] = nearness(self._words, template_words(template), self._rarity)
        return self._nearness[template]


def _same_class(said: str, raised: str) -> bool:
    """Whether the names agree, or nothing was said."""
    return not said or said.rpartition(".")[2] == raised.rpartition(".")[2]


# --- ranking --------------------------------------------------------------------------------------------------------


def _mode_rank(fitting: Fit | None) -> float:
    """0 for no agreement; more the more of the template and the text agree."""
    if fitting is None:
        return 0
    tidy = fitting.explained * 0.5 - fitting.misfits
    mode = {"full": 4.0, "longer": 3.0, "cut": 2.0 + fitting.share, "inside": 1.5}[fitting.mode]
    return mode + tidy


def _rank(match: Match) -> tuple[float, ...]:
    fits = match.fit is not None and match.worth >= _threshold(match)
    return (
        match.by_frame and (fits or match.nearness.share > 0.5),
        fits,
        match.fit is not None and fits and match.fit.mode == "full" and match.fit.misfits == 0,
        round(match.worth if fits else match.nearness.score, 2),
        match.same_class,
        match.consistent is not False,
        match.consistent is True,
        _mode_rank(match.fit),
        -match.site.fragment,
        _hints(match),
    )


def _hints(match: Match) -> int:
    """Words of the site's file that the values name: `cuda` decides between the platforms' twins."""
    stem = match.site.file.rpartition("/")[2].removesuffix(".py").lower()
    told = " ".join(str(value) for value in match.values.values()).lower()
    names = _NAMES.get(stem, (stem,))
    return sum(name in told for name in names)


# What the values call a thing that the files of a package name otherwise.
_NAMES = {
    "cuda": ("cuda", "nvidia", "tesla", "geforce", "rtx", "gtx", "quadro", "titan"),
    "rocm": ("rocm", "amd", "radeon", "instinct", "gfx", "hip"),
}


def _threshold(match: Match) -> float:
    assert match.fit is not None
    if match.by_frame:
        return BY_FRAME
    if match.fit.mode == "full" and match.fit.misfits == 0:
        return FULL if match.same_class else FULL_OF_OTHER_CLASS
    return CUT if match.fit.mode == "cut" else LONGER


# --- deciding -------------------------------------------------------------------------------------------------------


def _decided(said: Said, ranked: Sequence[Match]) -> Finding:
    if not ranked:
        return Finding("none", said)
    best = ranked[0]
    verdict = _verdict(best)
    if verdict == "none":
        return Finding("none", said, near=tuple(each for each in ranked[:3] if each.nearness.share > 0.3))
    equal = tuple(each for each in ranked if _rank(each)[:4] == _rank(best)[:4] and _verdict(each) == verdict)
    if verdict in ("exact", "likely") and len({each.page.id for each in equal}) > 1 and _rank(equal[1]) == _rank(best):
        verdict = "several"
    others = tuple(each for each in ranked[1:4] if each not in equal and _verdict(each) != "none")
    return Finding(verdict, said, equal, others)


def _verdict(match: Match) -> Verdict:
    near, fitting = match.nearness, match.fit
    if fitting is not None and match.worth >= _threshold(match):
        sure = fitting.mode == "full" and not fitting.misfits and match.consistent is not False
        return "exact" if sure and (match.same_class or match.by_frame) else "likely"
    if match.by_frame and near.share > 0.5:
        return "likely"
    less, more = sorted((near.share, near.said))
    scale = 1.0 if match.same_class else 1.25
    if near.score >= CLOSEST_SCORE * scale and more >= CLOSEST_MORE and less >= CLOSEST_LESS:
        return "closest"
    return "none"
