"""Which page a test is about that expects an error: only one that can be meant, else none. Reads no files.

The class has to be caught by what the test expects, and the template has to be able to print a text in which the test's
expression is found, with enough words in common. A second page that says nearly as much makes it nobody's, and so do
words that Python or a library says itself (`owners`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.reference import owners
from headrace.reference.classes import last_name
from headrace.reference.closest import template_words
from headrace.reference.hierarchy import WRAPPED_BY_PYDANTIC, above
from headrace.reference.inversion import own_letters
from headrace.reference.overlap import Overlap, Token, expression_tokens, overlap
from headrace.reference.records import Expectation, Page, Site

_FEWEST_LETTERS = 10
_FEWEST_WORDS = 3
_MOST_OF_IT = 0.6
"""Two words are enough if they are this share of the template's own letters."""
_LEAST_SHARE = 0.5
"""Of the expression's letters that the template says; what its values say could be anything."""
_RIVAL = 0.6
"""A page that says this share of what the best one says may be meant as well."""
_RARE_WORDS = 3
_MOST_COMPARED = 60

Bases = Mapping[str, Sequence[str]]
"""The classes above each error class of a package, by name."""


def attributed(
    expectations: Iterable[Expectation], pages: Sequence[Page], bases: Bases
) -> list[tuple[str, Expectation]]:
    """The page's id with each expectation that is about one page alone; of a test's cases the first for each page."""
    expectations = list(expectations)
    if not expectations:
        return []
    search = _Search(pages, bases)
    found: dict[tuple[str, str, str], Expectation] = {}
    for each in expectations:
        page_id = search.page_of(each)
        if page_id is not None:
            found.setdefault((page_id, each.file, each.test), each)
    return [(page_id, each) for (page_id, _, _), each in found.items()]


class _Search:
    def __init__(self, pages: Sequence[Page], bases: Bases) -> None:
        self._bases = bases
        self._by_word: dict[str, list[Page]] = {}
        for page in pages:
            words = {word for site in page.sites for form in site.templates for word in template_words(form)}
            for word in words:
                self._by_word.setdefault(word.lower(), []).append(page)

    def page_of(self, expected: Expectation) -> str | None:
        tokens = expression_tokens(expected.pattern)
        letters = sum(len(token.text) for token in tokens if not token.gap)
        found: list[tuple[int, str]] = []
        for page in self._candidates(tokens):
            sites = [site for site in page.sites if self._catches(expected.classes, site)]
            forms = {form for site in sites for form in site.templates}
            agreed = [
                each.letters
                for form in forms
                if (each := overlap(expected.pattern, tokens, form)) and _is_enough(each, letters, own_letters(form))
            ]
            if agreed:
                found.append((max(agreed), page.id))
        found.sort(reverse=True)
        if not found or (len(found) > 1 and found[1][0] >= _RIVAL * found[0][0]):
            return None
        return found[0][1]

    def _candidates(self, tokens: Sequence[Token]) -> list[Page]:
        """Pages that have one of the rarest words of an expression."""
        words = {token.text.lower() for token in tokens if not token.gap} & self._by_word.keys()
        rarest = sorted(words, key=lambda word: (len(self._by_word[word]), word))[:_RARE_WORDS]
        counts = Counter({page.id: 0 for word in rarest for page in self._by_word[word]})
        by_id = {page.id: page for word in rarest for page in self._by_word[word]}
        for word in words:
            counts.update(page.id for page in self._by_word[word] if page.id in by_id)
        return [by_id[page_id] for page_id, _ in counts.most_common(_MOST_COMPARED)]

    def _catches(self, classes: Sequence[str], site: Site) -> bool:
        """Whether a test that expects one of `classes` is content with the error of a site."""
        raised = last_name(site.error_class)
        caught_as = {raised, *above(raised, self._bases.get(raised, ()))}
        if caught_as.intersection(classes):
            return True
        validated = any("validator" in mark for mark in site.decorators)
        return validated and "ValidationError" in classes and bool(caught_as & WRAPPED_BY_PYDANTIC)


def _is_enough(found: Overlap, expected: int, own: int) -> bool:
    """`expected` are the letters of the expression, `own` those of the template."""
    if found.letters < max(_FEWEST_LETTERS, _LEAST_SHARE * expected):
        return False
    telling = found.words >= _FEWEST_WORDS or (found.words == _FEWEST_WORDS - 1 and found.letters >= _MOST_OF_IT * own)
    return telling and not any(_is_of_others(text) for text in (found.text, found.quoted))


def _is_of_others(text: str) -> bool:
    owner = owners.owner("", text, (), "")
    return owner is not None and owner.certain
