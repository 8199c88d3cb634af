"""From the source of a package to its database; only files that changed are read again. Knows no messages.

Peak memory: what the sites of the package take, and per process the syntax tree of one file.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.errors import NotInReference, NotWritable
from headrace.reference import codec
from headrace.reference.attribution import attributed
from headrace.reference.classes import ClassIndex
from headrace.reference.database import Catalogue, StoredFile, database_path
from headrace.reference.expectations import read_expectations
from headrace.reference.extract import FileErrors, finished, read_file
from headrace.reference.ids import id_of, naming_template
from headrace.reference.options import by_spelling
from headrace.reference.packages import PackageSource
from headrace.reference.reading import Progress, each_file
from headrace.reference.records import Page, Site
from headrace.reference.storing import write
from headrace.reference.versions import with_history


def build(
    source: PackageSource, *, path: Path | None = None, on_progress: Progress | None = None, verify: bool = False
) -> Path:
    """Bring the database of a package up to date with its source, and return where it lies.

    `on_progress(label, done, all)` is called as files are read, and with `verify` as functions are run: only then is a
    line of the package run at all, in processes of their own (`reference.verify`). Raises SourceUnusable, NotWritable.
    """
    path = path or database_path(source.name)
    prints = fingerprints(source)
    with contextlib.ExitStack() as stack:
        old = _previous(path, stack)
        known = old.fingerprints() if old is not None else {}
        same = old is not None and known == prints and old.version == source.version
        if same and not (verify and old is not None and not old.tried):
            return path
        changed = [file for file, mark in prints.items() if known.get(file) != mark]
        kept = [file for file in prints if known.get(file) == prints[file]]
        files = [*(old.stored_files(kept) if old is not None else ()), *_read(source, changed, prints, on_progress)]
        files.sort(key=lambda stored: stored.file)
        errors = [_errors(file) for file in files]
        current = pages_of(source.name, finished(errors))
        current, tried = _tried(source, current, old, set(kept), on_progress, verify=verify)
        newer = old is not None and version_key(source.version) >= version_key(old.version)
        before = list(old.rows()) if old is not None and newer else []
        earlier = [
            each for each in (old.versions_read() if old is not None and newer else []) if each[0] != source.version
        ]
        rows = with_history(before, current, source.version)
        index = ClassIndex(cls for part in errors for cls in part.classes)
        expected = attributed((each for part in errors for each in part.expectations), current, index.bases())
        facts = {
            "package": source.name,
            "version": source.version,
            "commit": source.commit,
            "repository": source.repository,
            "prefix": source.prefix,
            "versions": codec.dumps([*earlier, (source.version, _mark(prints))]),
            "tried": codec.dumps(tried),
            "bases": codec.dumps(index.bases()),
            "flags": codec.dumps(by_spelling(spellings for part in errors for spellings in part.flags)),
        }
        ids = {page.id for page in current}
        prose = [each for each in (old.every_prose() if old is not None else ()) if each.page in ids]
        write(path, facts, rows, files, prose, expected)
    return path


def build_versions(
    sources: Sequence[PackageSource],
    *,
    path: Path | None = None,
    on_progress: Progress | None = None,
    verify: bool = False,
) -> Path:
    """Build the versions of one package, oldest first, and tell of each page when it came, went or was reworded.

    What was known before stays as it is until all are read. With `verify` the functions of the last one are run.
    Raises SourceUnusable, NotWritable.
    """
    path = path or database_path(sources[0].name)
    read = _already_read(sources, path)
    if len(sources) - read <= 1:
        return build(sources[-1], path=path, on_progress=on_progress, verify=verify)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
            draft = Path(folder) / path.name
            if read:
                shutil.copyfile(path, draft)
            for source in sources[read:]:
                build(source, path=draft, on_progress=on_progress, verify=verify and source is sources[-1])
            draft.replace(path)
    except OSError as error:
        raise NotWritable(path=str(path.parent), reason=error.strerror or str(error)) from error
    return path


def _already_read(sources: Sequence[PackageSource], path: Path) -> int:
    """How many of the versions, from the oldest on, are all that a database knows, and are as they were."""
    with contextlib.ExitStack() as stack:
        old = _previous(path, stack)
        if old is None:
            return 0
        known = old.versions_read()
    wanted = [(source.version, _mark(fingerprints(source))) for source in sources[: len(known)]]
    return len(known) if known == wanted else 0


def _mark(prints: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(prints.items())).encode(), digest_size=8).hexdigest()


def _tried(
    source: PackageSource,
    pages: list[Page],
    old: Catalogue | None,
    unchanged: set[str],
    progress: Progress | None,
    *,
    verify: bool,
) -> tuple[list[Page], dict[str, int]]:
    """The pages with what running their functions showed, now or in an earlier build, and how often it showed what."""
    if not verify and old is None:
        return pages, {}
    from headrace.reference import verify as trials  # late: most builds run nothing

    outcomes = trials.remembered(old.pages(), unchanged) if old is not None else {}
    if not verify:
        return trials.with_outcomes(pages, outcomes), {}
    left = [site for page in pages for site in page.sites if trials.key_of(site) not in outcomes]
    label = f"running functions of {source.name} {source.version}"
    outcomes |= trials.verify(
        source, left, lambda done, total: progress(label, done, total) if progress is not None else None
    )
    counts = collections.Counter(outcome.verdict for outcome in outcomes.values())
    return trials.with_outcomes(pages, outcomes), dict(counts)


def _errors(file: StoredFile) -> FileErrors:
    return codec.file_from_plain(json.loads(zlib.decompress(file.errors)))


def _previous(path: Path, stack: contextlib.ExitStack) -> Catalogue | None:
    try:
        return stack.enter_context(Catalogue.open(path))
    except NotInReference:
        return None


def fingerprints(source: PackageSource) -> dict[str, str]:
    """A mark for each file that changes with its content."""
    if source.root.is_file():
        return source.checksums()
    every = (*source.files, *source.tests)
    return {file: hashlib.blake2b(content, digest_size=8).hexdigest() for file, content in source.read(every)}


def pages_of(package: str, sites: Iterable[Site]) -> list[Page]:
    """Sites grouped into pages, in the order of their first site."""
    by_id: dict[str, list[Site]] = {}
    for site in sites:
        by_id.setdefault(id_of(package, site), []).append(site)
    return [
        Page(page_id, package, found[0].error_class, naming_template(found[0]), tuple(found))
        for page_id, found in by_id.items()
    ]


def _read(
    source: PackageSource, files: Sequence[str], prints: dict[str, str], progress: Progress | None
) -> Iterator[StoredFile]:
    label = f"reading files of {source.name} {source.version}"
    for file, stored, errors in each_file(read_files, source, files, label, progress):
        yield StoredFile(file, prints[file], stored, errors)


Result = list[tuple[str, bytes | None, bytes]]


def read_files(source: PackageSource, files: Sequence[str]) -> Result:
    """Path, compressed source (None without sites) and compressed errors of each file."""
    result: Result = []
    tests = set(source.tests)
    for file, content in source.read(files):
        if file in tests:
            errors = FileErrors(file, expectations=read_expectations(file, content))
        else:
            errors = read_file(file, content)
        plain = codec.dumps(codec.file_to_plain(errors)).encode()
        result.append((file, zlib.compress(content, 1) if errors.drafts else None, zlib.compress(plain, 1)))
    gc.collect()
    return result


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts 0.9 before 0.10, and 1.0rc1 before 1.0."""
    parts = re.findall(r"\d+|[a-z]+", version.partition("+")[0].lower())
    return (
        *((1, int(part), "") if part.isdigit() else (0 if part != "post" else 2, 0, part) for part in parts),
        (1, -1, ""),
    )
