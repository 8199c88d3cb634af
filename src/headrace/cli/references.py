"""The reference of a package, built first where it has to be. Knows no command."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from headrace.errors import NotInReference
from headrace.reference.database import Catalogue, database_path

OURS = "headrace"


def opened(name: str) -> Catalogue:
    """The reference of a package; it is built first if it is missing or old and the package is installed."""
    path = database_path(name)
    if name != OURS or up_to_date(path):
        try:
            return Catalogue.open(path)
        except NotInReference:
            pass
    from headrace.cli.reference_work import build_quietly

    built = build_quietly(name)
    with contextlib.suppress(OSError):
        os.utime(built)  # a build that found nothing new leaves the file as it is, and it would be asked for again
    return Catalogue.open(built)


def up_to_date(database: Path) -> bool:
    """Whether our own reference is younger than our source, which changes without a new version in development."""
    import headrace

    assert headrace.__file__ is not None
    folder = Path(headrace.__file__).parent
    if not database.exists():
        return False
    return database.stat().st_mtime > max(file.stat().st_mtime for file in folder.rglob("*.py"))
