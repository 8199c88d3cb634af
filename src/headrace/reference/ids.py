"""The id of a page: a content hash, so that no registry has to be kept. Knows no files and no lines.

Scheme 1: package, class and canonical template. A template without words is told apart by where it stands (qualified
name and guard, local names erased) instead. Reformatting, moved lines and renamed locals leave every id as it is.
"""

from __future__ import annotations

import ast

from headrace.error_ids import page_id
from headrace.reference import pieces
from headrace.reference.classes import last_name
from headrace.reference.records import Site, Template


def id_of(package: str, site: Site) -> str:
    """16 hex digits for the page that a site belongs to."""
    name = last_name(site.error_class)
    template = naming_template(site)
    if template and pieces.has_words(template):
        return page_id(package, name, pieces.canonical(template))
    guard = " and ".join(erased(atom.code) for atom in site.condition.atoms if not atom.early_exit)
    return page_id(package, name, f"{site.qualname}|{guard}", scheme="1g")


def naming_template(site: Site) -> Template:
    """The form that names the page of a site: the first one with words in it."""
    for template in site.templates:
        if pieces.has_words(template):
            return template
    return site.templates[0] if site.templates else ()


def erased(code: str) -> str:
    """Python code with its plain names numbered by first use; what is no Python stays as it is."""
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:
        return code
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.setdefault(node.id, f"_{len(names)}")
    return ast.unparse(tree)
