"""Writes the pages of one package into a SQLite file; `database` reads them. Knows no source code and no messages.

Guarantees: a file that can be seen is whole. It is written beside its place, then renamed; of two builders the last one
wins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.errors import NotWritable
from headrace.reference import codec
from headrace.reference.database import SCHEMA, PageRow, StoredFile
from headrace.reference.records import Expectation, Prose

_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE pages (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, error_class TEXT NOT NULL, template TEXT NOT NULL,
    introduced TEXT, removed TEXT, successor TEXT
);
CREATE TABLE sites (page INTEGER NOT NULL, file TEXT NOT NULL, line INTEGER NOT NULL, qualname TEXT, data TEXT);
CREATE TABLE files (file TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, source BLOB, errors BLOB NOT NULL);
CREATE TABLE prose (page TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, model TEXT NOT NULL, sentences TEXT NOT NULL);
CREATE TABLE expectations (page TEXT NOT NULL, data TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(message, place, content='', tokenize="unicode61 tokenchars '_'");
"""
_INDEXES = """
CREATE INDEX site_page ON sites (page);
CREATE INDEX expectation_page ON expectations (page);
CREATE INDEX site_file ON sites (file);
CREATE INDEX page_successor ON pages (successor) WHERE successor IS NOT NULL;
CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, 'col');
"""
_DISK_ERRORS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


def write(
    path: Path,
    facts: Mapping[str, str | None],
    rows: Sequence[PageRow],
    files: Iterable[StoredFile],
    prose: Iterable[Prose] = (),
    expectations: Iterable[tuple[str, Expectation]] = (),
) -> None:
    """Write a database whole and give it its name only then. `expectations` come with the ids of their pages.

    Raises: NotWritable.
    """
    with _replacing(path) as partial:
        _fill(partial, facts, rows, files, prose, expectations)


def add_prose(path: Path, prose: Iterable[Prose]) -> None:
    """Put what a model wrote into a database, in place of what was there for these pages. Raises: NotWritable."""
    with _replacing(path) as partial:
        shutil.copyfile(path, partial)
        connection = sqlite3.connect(partial, isolation_level=None)
        try:
            connection.execute("BEGIN")
            _insert_prose(connection, prose)
            connection.execute("COMMIT")
        finally:
            connection.close()


def _insert_prose(connection: sqlite3.Connection, prose: Iterable[Prose]) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO prose VALUES (?, ?, ?, ?)",
        ((each.page, each.fingerprint, each.model, codec.dumps(list(each.sentences))) for each in prose),
    )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that gets its name when it was filled without an error. Raises: NotWritable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".partial")
        os.close(handle)
    except OSError as error:
        raise NotWritable(path=str(path.parent), reason=os.strerror(error.errno or 0)) from error
    partial = Path(name)
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise NotWritable(path=str(path.parent), reason=os.strerror(error.errno or 0)) from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode not in _DISK_ERRORS:
            raise
        raise NotWritable(path=str(path.parent), reason=str(error)) from error
    finally:
        partial.unlink(missing_ok=True)


def _fill(
    path: Path,
    facts: Mapping[str, str | None],
    rows: Sequence[PageRow],
    files: Iterable[StoredFile],
    prose: Iterable[Prose],
    expectations: Iterable[tuple[str, Expectation]],
) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # Nobody reads it before it is renamed, and a build that dies is made again: no journal, no sync.
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + _TABLES)
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO facts VALUES (?, ?)", {**facts, "schema": str(SCHEMA)}.items())
        connection.executemany(
            "INSERT INTO files VALUES (?, ?, ?, ?)",
            ((file.file, file.fingerprint, file.source, file.errors) for file in files),
        )
        for number, row in enumerate(rows, 1):
            _insert(connection, number, row)
        _insert_prose(connection, prose)
        connection.executemany(
            "INSERT INTO expectations VALUES (?, ?)",
            ((page, codec.dumps(codec.expectation_to_plain(each))) for page, each in expectations),
        )
        connection.execute("COMMIT")
        connection.executescript(_INDEXES)
    finally:
        connection.close()


def _insert(connection: sqlite3.Connection, number: int, row: PageRow) -> None:
    page, history = row.page, row.history
    template = codec.dumps(codec.template_to_plain(page.template))
    connection.execute(
        "INSERT INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)",
        (number, page.id, page.error_class, template, history.introduced, history.removed, history.successor),
    )
    connection.executemany(
        "INSERT INTO sites VALUES (?, ?, ?, ?, ?)",
        ((number, site.file, site.line, site.qualname, codec.dumps(codec.site_to_plain(site))) for site in page.sites),
    )
    forms = dict.fromkeys(form for site in page.sites for form in site.templates)
    message = " ".join(piece for form in forms for piece in form if isinstance(piece, str))
    exprs = {piece.expr for form in forms for piece in form if not isinstance(piece, str)}
    places = {part for site in page.sites for part in (site.file, site.qualname)}
    connection.execute(
        "INSERT INTO words (rowid, message, place) VALUES (?, ?, ?)",
        (number, message, " ".join([page.error_class, *sorted(exprs), *sorted(places)])),
    )
