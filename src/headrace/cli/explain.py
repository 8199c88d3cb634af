"""`headrace explain`: a pasted error, or an id, in words. Finds the references to ask; knows no matching."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import typer

from headrace.cli import references, terminal
from headrace.errors import InvalidSetting, NotInReference, PackageNotFound, UnknownErrorId
from headrace.reference import owners, tracebacks
from headrace.reference.database import Catalogue, built_packages, database_path
from headrace.reference.explain import Explanation, explain, explain_page

_ID = re.compile(r"[0-9a-f]{16}")
_NEARLY_ID = re.compile(r"[0-9a-fA-F]{12,20}")
_OURS = "headrace"


def explain_command(
    words: Sequence[str], *, package: str | None, command: str | None, as_json: bool, short: bool
) -> int:
    """Explain what was pasted; 0 if a site was found, 1 if nothing is claimed.

    Raises: InvalidSetting without a message, NotInReference, PackageNotFound, UnknownErrorId.
    """
    paste = " ".join(words) if words else _pasted()
    if not paste.strip():
        raise InvalidSetting(
            setting="MESSAGE",
            value="empty",
            allowed="the text of an error, a traceback or an id of 16 hex digits",
            suggestion="with the text in quotes, or `headrace explain < traceback.txt`",
        )
    with ExitStack() as stack:
        catalogues = (stack.enter_context(each) for each in _catalogues(paste, package))
        if _NEARLY_ID.fullmatch(paste.strip()):
            explanation = _page(paste.strip().lower(), catalogues)
        else:
            explanation = explain(paste, list(catalogues), command)
        _show(explanation, as_json=as_json, short=short)
    return 0 if explanation.found else 1


def _pasted() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("Paste the error, then press Ctrl-D:\n")
    return terminal.read_text()


def _show(explanation: Explanation, *, as_json: bool, short: bool) -> None:
    if as_json:
        from headrace.reference.document import document

        typer.echo(json.dumps(document(explanation), indent=2, ensure_ascii=False))
    elif short:
        from headrace.reference import explained

        typer.echo(explained.short(explanation))
    else:
        from headrace.cli.explain_text import show

        show(explanation)


def _page(page_id: str, catalogues: Iterable[Catalogue]) -> Explanation:
    asked = []
    for catalogue in catalogues:
        asked.append(catalogue)
        page = catalogue.page(page_id)
        if page is not None:
            return explain_page(page, catalogue, page_id)
    near = [found for catalogue in asked for found in catalogue.near_ids(page_id, 3)]
    raise UnknownErrorId(id=page_id, nearest=near, packages=[catalogue.package for catalogue in asked])


# --- which references -----------------------------------------------------------------------------------------------


def _catalogues(paste: str, package: str | None) -> Iterator[Catalogue]:
    """The references to ask, each opened (and our own built, if it is old) when its turn comes."""
    if package is not None:
        yield references.opened(package)
        return
    names = dict.fromkeys(
        [*_packages_of_frames(paste), *sorted(built_packages(), key=lambda name: name == _OURS), _OURS]
    )
    none = True
    for name in names:
        if catalogue := _opened_if_possible(name):
            none = False
            yield catalogue
    if none:
        raise NotInReference(package=_OURS, reason="no package was built")


def _packages_of_frames(paste: str) -> list[str]:
    """The packages that the tracebacks of a paste go through, the last one first."""
    files = [frame.file for error in tracebacks.parse(paste) for frame in error.frames]
    names = dict.fromkeys(owners.file_package(file) for file in reversed(files))
    return [name for name in names if name and name != "Python" and database_path(name).exists()]


def _opened_if_possible(name: str) -> Catalogue | None:
    try:
        return references.opened(name)
    except (NotInReference, PackageNotFound):
        return None
