"""The pages of one package in a SQLite file, which `storing` has written. Knows no source code and no messages.

Guarantees:
- A file of another schema is not read; it counts as not built.
- Opening reads the package's name and version and nothing else.
"""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headrace.cache import cache_directory
from headrace.errors import NotInReference
from headrace.reference import codec
from headrace.reference.closest import Rarity
from headrace.reference.records import Expectation, History, Page, Prose, Site

SCHEMA = 10
"""Raised when a build would come out different, so that old files are not taken for new ones."""

_WORD = re.compile(r"\w+")
_RAREST = 6
"""Candidates share at least one of so many rare words with a message."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a build keeps of one source file for the next one."""

    file: str
    fingerprint: str
    source: bytes | None
    """Compressed; None if the file has no site."""
    errors: bytes
    """Compressed JSON."""


@dataclass(frozen=True, slots=True)
class PageRow:
    """A page and what is known of its life."""

    page: Page
    history: History


def database_path(package: str) -> Path:
    """Where the reference of a package lies."""
    return cache_directory("reference") / f"{package}.sqlite"


def built_packages() -> list[str]:
    """The packages whose reference was built, by name."""
    return sorted(path.stem for path in cache_directory("reference").glob("[!.]*.sqlite"))


class Catalogue:
    """The pages of one package. Any thread may use it, but only one at a time."""

    def __init__(self, connection: sqlite3.Connection, facts: Mapping[str, str | None]) -> None:
        self._connection = connection
        self._facts = facts
        self._counts: dict[str, int] = {}
        self._size: int | None = None
        self._flags: dict[str, str] | None = None
        self._bases: dict[str, list[str]] | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises: NotInReference if there is no such file, or it is of another version of Headrace or broken."""
        package = path.stem
        if not path.is_file():
            raise NotInReference(package=package, reason="it was not built")
        # Read only, and without a lock: the file is never written again once it has its name.
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
        )
        try:
            facts = dict(connection.execute("SELECT name, value FROM facts"))
        except sqlite3.DatabaseError as error:
            connection.close()
            raise NotInReference(package=package, reason=f"its database is broken ({error})") from error
        if facts.get("schema") != str(SCHEMA):
            connection.close()
            raise NotInReference(package=package, reason="it was built by another version of Headrace")
        return cls(connection, facts)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def package(self) -> str:
        return self._facts["package"] or ""

    @property
    def version(self) -> str:
        return self._facts["version"] or ""

    @property
    def commit(self) -> str | None:
        return self._facts["commit"]

    @property
    def repository(self) -> str | None:
        return self._facts["repository"]

    @property
    def tried(self) -> dict[str, int]:
        """How many conditions were verified, refuted, or not run; empty if the build did not try them."""
        return dict(json.loads(self._facts.get("tried") or "{}"))

    def flags(self) -> dict[str, str]:
        """Every way to write a flag of the package's command lines, with the best one."""
        if self._flags is None:
            self._flags = dict(json.loads(self._facts.get("flags") or "{}"))
        return self._flags

    # --- pages ---

    def page(self, page_id: str) -> Page | None:
        """The page with an id; the one that came after it if it was reworded."""
        seen: set[str] = set()
        while page_id not in seen:
            seen.add(page_id)
            row = self._connection.execute(
                "SELECT number, id, error_class, template, successor FROM pages WHERE id = ?", (page_id,)
            ).fetchone()
            if row is None:
                return None
            if row[4] is None:
                return self._page(*row[:4])
            page_id = row[4]
        return None

    def _page(self, number: int, page_id: str, error_class: str, template: str) -> Page:
        rows = self._connection.execute("SELECT data FROM sites WHERE page = ? ORDER BY rowid", (number,))
        sites = tuple(codec.site_from_plain(json.loads(data)) for (data,) in rows)
        return Page(page_id, self.package, error_class, codec.template_from_plain(json.loads(template)), sites)

    def _pages(self, numbers: Iterable[int]) -> list[Page]:
        """The pages with these numbers, in this order."""
        wanted = list(numbers)
        rows = self._connection.execute(
            "SELECT number, id, error_class, template, data FROM pages LEFT JOIN sites ON page = number "
            f"WHERE number IN ({','.join('?' * len(wanted))}) ORDER BY number, sites.rowid",
            wanted,
        )
        found = dict(zip(sorted(set(wanted)), self._grouped(rows), strict=True))
        return [found[number] for number in wanted]

    def pages(self) -> Iterator[Page]:
        """Every page of the current version, by file and line of its first site."""
        rows = self._connection.execute(
            "SELECT number, id, error_class, template, data FROM sites JOIN pages ON page = number "
            "WHERE removed IS NULL ORDER BY number, sites.rowid"
        )
        yield from self._grouped(rows)

    def _grouped(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Page]:
        """Pages from rows of number, id, class, template and one site, in the order of their numbers."""
        for (_, page_id, error_class, template), group in itertools.groupby(rows, key=lambda row: row[:4]):
            sites = tuple(codec.site_from_plain(json.loads(data)) for *_, data in group if data is not None)
            yield Page(page_id, self.package, error_class, codec.template_from_plain(json.loads(template)), sites)

    def rows(self) -> Iterator[PageRow]:
        """Every page, also those that are gone, with its history."""
        select = "SELECT number, id, error_class, template, introduced, removed, successor FROM pages ORDER BY number"
        for *head, introduced, removed, successor in self._connection.execute(select).fetchall():
            yield PageRow(self._page(*head), History(introduced, removed, successor))

    def gone(self) -> list[str]:
        """The ids that the current version has no more."""
        rows = self._connection.execute("SELECT id FROM pages WHERE removed IS NOT NULL ORDER BY number")
        return [page_id for (page_id,) in rows]

    def classes(self) -> list[tuple[str, int]]:
        """The error classes of the current version with how many pages each has, the most frequent first."""
        select = "SELECT error_class, count(*) FROM pages WHERE removed IS NULL GROUP BY error_class ORDER BY 2 DESC, 1"
        return self._connection.execute(select).fetchall()

    def of_class(self, error_class: str | None, offset: int, limit: int) -> list[Page]:
        """Some of the pages of a class, or of all; by file and line."""
        rows = self._connection.execute(
            "SELECT number FROM pages WHERE removed IS NULL AND error_class = coalesce(?, error_class) "
            "ORDER BY number LIMIT ? OFFSET ?",
            (error_class, limit, offset),
        ).fetchall()
        return self._pages(number for (number,) in rows)

    def __len__(self) -> int:
        (count,) = self._connection.execute("SELECT count(*) FROM pages WHERE removed IS NULL").fetchone()
        return int(count)

    # --- finding ---

    def near_ids(self, page_id: str, limit: int = 3) -> list[str]:
        """The ids that look most like one that does not exist."""
        import difflib

        wanted = page_id.lower()
        # Of all ids only those that begin or end alike: to compare with each of ten thousand takes half a second.
        select = "SELECT id FROM pages WHERE substr(id, 1, 2) = ? OR substr(id, -2) = ?"
        known = [row[0] for row in self._connection.execute(select, (wanted[:2], wanted[-2:]))]
        return difflib.get_close_matches(wanted, known, n=limit, cutoff=0.5)

    def sites_at(self, file_suffix: str, qualname: str | None = None) -> list[tuple[str, Site]]:
        """Page id and site of each error that a file can raise.

        `file_suffix` is a path as a traceback shows it (`/usr/lib/.../vllm/config/model.py`) or its end (`model.py`);
        `qualname` a function, with or without its class.
        """
        parts = file_suffix.replace("\\", "/").split("/")
        suffixes = ["/".join(parts[index:]) for index in range(len(parts))]
        marks = ",".join("?" * len(suffixes))
        rows = self._connection.execute(
            f"SELECT id, data FROM sites JOIN pages ON page = number WHERE removed IS NULL AND file IN ({marks}) "
            "ORDER BY line",
            suffixes,
        ).fetchall()
        if not rows:
            rows = self._connection.execute(
                "SELECT id, data FROM sites JOIN pages ON page = number WHERE removed IS NULL AND file LIKE ? "
                "ORDER BY file, line",
                ("%/" + file_suffix,),
            ).fetchall()
        found = [(page_id, codec.site_from_plain(json.loads(data))) for page_id, data in rows]
        if qualname is None:
            return found
        return [(key, site) for key, site in found if f".{site.qualname}".endswith(f".{qualname}")]

    def pages_with_words(self, words: Iterable[str], limit: int = 60) -> list[Page]:
        """Candidates for a message: pages whose text has some of its rarest words, the likeliest first."""
        rarest = self._rarest(words)
        if not rarest:
            return []
        query = "message : (" + " OR ".join(f'"{word}"' for word in rarest) + ")"
        return self._pages(self._numbers(query, limit))

    def _numbers(self, query: str, limit: int) -> list[int]:
        select = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
        return [row[0] for row in self._connection.execute(select, (query, limit))]

    def _rarest(self, words: Iterable[str]) -> list[str]:
        counts = self.rarity(dict.fromkeys(part.lower() for word in words for part in _WORD.findall(word))).counts
        return sorted(counts, key=lambda word: (counts[word], word))[:_RAREST]

    def rarity(self, words: Iterable[str]) -> Rarity:
        """In how many messages words stand, those that stand in any. What was looked up once is kept."""
        select = "SELECT doc FROM vocabulary WHERE term = ? AND col = 'message'"
        asked = list(words)
        for word in asked:
            if word not in self._counts:
                row = self._connection.execute(select, (word,)).fetchone()
                self._counts[word] = row[0] if row else 0
        if self._size is None:
            self._size = len(self)
        return Rarity(self._size, {word: count for word in asked if (count := self._counts[word])})

    def search(self, text: str, limit: int = 20) -> list[Page]:
        """Current pages with all of the words (the last may be begun) in text, class, file or function."""
        words = _WORD.findall(text.lower())
        if not words:
            return []
        quoted = [f'"{word}"' for word in words]
        select = (
            "SELECT number FROM words JOIN pages ON number = words.rowid WHERE words MATCH ? AND removed IS NULL "
            "ORDER BY rank LIMIT ?"
        )
        rows = self._connection.execute(select, (" AND ".join(quoted) + "*", limit)).fetchall()
        return self._pages(number for (number,) in rows)

    def related(self, page: Page, limit: int = 5) -> list[tuple[Page, str]]:
        """Other pages with the reason why they are near."""
        numbers: dict[int, str] = {}
        for site in page.sites[:3]:
            rows = self._connection.execute(
                "SELECT DISTINCT number FROM sites JOIN pages ON page = number WHERE file = ? AND qualname = ? "
                "AND id != ? AND removed IS NULL AND template != '[]' ORDER BY abs(line - ?)",
                (site.file, site.qualname, page.id, site.line),
            )
            numbers |= {number: f"also checked in {site.qualname}" for (number,) in rows if number not in numbers}
        found = list(numbers.items())[:limit]
        return list(zip(self._pages(number for number, _ in found), (why for _, why in found), strict=True))

    # --- the source ---

    def source(self, file: str) -> str | None:
        """The text of a source file that has sites."""
        row = self._connection.execute("SELECT source FROM files WHERE file = ?", (file,)).fetchone()
        return None if row is None or row[0] is None else zlib.decompress(row[0]).decode("utf-8", "replace")

    def excerpt(self, site: Site, around: int = 6) -> list[tuple[int, str]]:
        """Line number and text of the lines around a site."""
        lines = (self.source(site.file) or "").splitlines()
        first = max(1, site.line - around)
        return [(number, lines[number - 1]) for number in range(first, min(len(lines), site.end_line + 2) + 1)]

    def permalink(self, place: Site | Expectation) -> str | None:
        """A place on the web, at the commit or the tag of this version; None if no repository is known."""
        if self.repository is None:
            return None
        from headrace.reference import packages  # late: it loads what reads distributions

        revision = self.commit or f"v{self.version}"
        return packages.permalink(self.repository, revision, (self._facts["prefix"] or "") + place.file, place.line)

    # --- versions ---

    def versions(self, page_id: str) -> History | None:
        """When the page came, when it went, and what came after it."""
        row = self._connection.execute(
            "SELECT introduced, removed, successor FROM pages WHERE id = ?", (page_id,)
        ).fetchone()
        if row is None:
            return None
        earlier = self._connection.execute("SELECT id FROM pages WHERE successor = ? ORDER BY number", (page_id,))
        introduced, removed, successor = row
        return History(introduced, removed, successor, tuple(found for (found,) in earlier))

    def earlier(self, page_id: str) -> list[Page]:
        """The pages that were reworded to this one, with the texts that they had."""
        select = "SELECT number FROM pages WHERE successor = ? ORDER BY number"
        return self._pages(number for (number,) in self._connection.execute(select, (page_id,)).fetchall())

    def versions_read(self) -> list[tuple[str, str]]:
        """Every version that was looked at, oldest first, with a mark of its files."""
        return [(version, mark) for version, mark in json.loads(self._facts.get("versions") or "[]")]

    # --- prose ---

    def prose(self, page_id: str) -> Prose | None:
        """What a model wrote about a page, of whatever source that was."""
        row = self._connection.execute(f"{_SELECT_PROSE} WHERE page = ?", (page_id,)).fetchone()
        return None if row is None else _prose(row)

    def every_prose(self) -> list[Prose]:
        """All that models wrote."""
        return [_prose(row) for row in self._connection.execute(f"{_SELECT_PROSE} ORDER BY page")]

    # --- tests of the package ---

    def expectations(self, page_id: str) -> list[Expectation]:
        """The package's own tests that expect this error, by file and line."""
        select = "SELECT data FROM expectations WHERE page = ? ORDER BY rowid"
        rows = self._connection.execute(select, (page_id,))
        return [codec.expectation_from_plain(json.loads(data)) for (data,) in rows]

    def bases(self, error_class: str) -> list[str]:
        """The classes above one of the package's own, nearest first; nothing of a class that is not its own."""
        if self._bases is None:
            self._bases = dict(json.loads(self._facts.get("bases") or "{}"))
        return self._bases.get(error_class.rpartition(".")[2], [])

    # --- for the next build ---

    def fingerprints(self) -> dict[str, str]:
        """Of every source file that was read."""
        return dict(self._connection.execute("SELECT file, fingerprint FROM files"))

    def stored_files(self, files: Iterable[str]) -> Iterator[StoredFile]:
        """What was kept of the files."""
        select = "SELECT file, fingerprint, source, errors FROM files WHERE file = ?"
        for file in files:
            yield StoredFile(*self._connection.execute(select, (file,)).fetchone())


_SELECT_PROSE = "SELECT page, fingerprint, model, sentences FROM prose"


def _prose(row: tuple[str, str, str, str]) -> Prose:
    page, fingerprint, model, sentences = row
    return Prose(page, fingerprint, model, tuple(json.loads(sentences)))
