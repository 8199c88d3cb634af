"""The records of the reference as plain lists for the database, and back. Knows no database.

Lists and not objects with names: a package has ten thousands of them, and the schema's number tells how to read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from headrace.reference.records import Atom, Condition, Expectation, Pair, Placeholder, Site, Template

if TYPE_CHECKING:
    from headrace.reference.classes import ErrorClass
    from headrace.reference.extract import FileErrors
    from headrace.reference.pieces import Forms


def dumps(plain: Any) -> str:
    """As compact JSON."""
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def template_to_plain(template: Template) -> list[Any]:
    """A literal is a text, a placeholder a pair."""
    return [piece if isinstance(piece, str) else [piece.expr, piece.kind] for piece in template]


def template_from_plain(plain: list[Any]) -> Template:
    """What `template_to_plain` made."""
    return tuple(piece if isinstance(piece, str) else Placeholder(*piece) for piece in plain)


def site_to_plain(site: Site) -> list[Any]:
    """All fields in order."""
    condition = site.condition
    atoms = [[atom.code, atom.line, atom.substituted, atom.kind, atom.early_exit] for atom in condition.atoms]
    return [
        site.file,
        site.line,
        site.end_line,
        site.qualname,
        site.error_class,
        site.kind,
        [template_to_plain(template) for template in site.templates],
        [atoms, condition.complete, condition.incomplete, list(condition.reassigned)],
        site.fragment,
        site.wrapper,
        site.caught_locally,
        site.ordinal,
        site.function_line,
        list(site.decorators),
        None if site.pair is None else [site.pair.before, site.pair.after, site.pair.ends],
    ]


def site_from_plain(plain: list[Any]) -> Site:
    """What `site_to_plain` made."""
    file, line, end_line, qualname, error_class, kind, *rest = plain
    (
        templates,
        (atoms, complete, incomplete, reassigned),
        fragment,
        wrapper,
        caught,
        ordinal,
        function_line,
        marks,
        pair,
    ) = rest
    return Site(
        file,
        line,
        end_line,
        qualname,
        error_class,
        kind,
        tuple(template_from_plain(template) for template in templates),
        Condition(tuple(Atom(*atom) for atom in atoms), complete, incomplete, tuple(reassigned)),
        fragment,
        wrapper,
        caught,
        ordinal,
        function_line,
        tuple(marks),
        None if pair is None else _pair_from_plain(*pair),
    )


def _pair_from_plain(before: list[list[str]], after: list[list[str]], ends: Literal["returns", "goes on"]) -> Pair:
    first, second = (tuple((name, value) for name, value in side) for side in (before, after))
    return Pair(first, second, ends)


def _forms_to_plain(forms: Forms | None) -> list[Any] | None:
    return None if forms is None else [template_to_plain(form) for form in forms]


def _forms_from_plain(plain: list[Any] | None) -> Forms | None:
    return None if plain is None else [template_from_plain(form) for form in plain]


def _named_to_plain(named: Mapping[str, Forms]) -> dict[str, Any]:
    return {name: _forms_to_plain(forms) for name, forms in named.items()}


def _named_from_plain(plain: dict[str, Any]) -> dict[str, Forms]:
    return {name: [template_from_plain(form) for form in forms] for name, forms in plain.items()}


def file_to_plain(errors: FileErrors) -> list[Any]:
    """What one file tells, as it is kept for the next build."""
    drafts = [[site_to_plain(draft.site), _named_to_plain(draft.arguments), draft.origin] for draft in errors.drafts]
    classes = [
        [
            cls.name,
            cls.file,
            list(cls.bases),
            None if cls.parameters is None else list(cls.parameters),
            _named_to_plain(cls.defaults),
            _forms_to_plain(cls.message),
            _named_to_plain(cls.attributes),
            _forms_to_plain(cls.text),
            dict(cls.constants),
        ]
        for cls in errors.classes
    ]
    flags = [list(spellings) for spellings in errors.flags]
    expectations = [expectation_to_plain(each) for each in errors.expectations]
    return [errors.file, drafts, classes, errors.broken, flags, expectations]


def expectation_to_plain(expected: Expectation) -> list[Any]:
    """All fields in order."""
    classes = list(expected.classes)
    return [
        expected.file, expected.line, expected.end_line, expected.test, classes, expected.pattern, expected.call
    ]  # fmt: skip


def expectation_from_plain(plain: list[Any]) -> Expectation:
    """What `expectation_to_plain` made."""
    file, line, end_line, test, classes, pattern, call = plain
    return Expectation(file, line, end_line, test, tuple(classes), pattern, call)


def file_from_plain(plain: list[Any]) -> FileErrors:
    """What `file_to_plain` made."""
    from headrace.reference.extract import Draft, FileErrors  # late: who only reads pages does without the extraction

    file, drafts, classes, broken, flags, expectations = plain
    return FileErrors(
        file,
        tuple(Draft(site_from_plain(site), _named_from_plain(named), origin) for site, named, origin in drafts),
        tuple(_class_from_plain(cls) for cls in classes),
        broken,
        tuple(tuple(spellings) for spellings in flags),
        tuple(expectation_from_plain(each) for each in expectations),
    )


def _class_from_plain(plain: list[Any]) -> ErrorClass:
    from headrace.reference.classes import ErrorClass

    name, file, bases, parameters, defaults, message, attributes, text, constants = plain
    return ErrorClass(
        name,
        file,
        tuple(bases),
        None if parameters is None else tuple(parameters),
        _named_from_plain(defaults),
        _forms_from_plain(message),
        _named_from_plain(attributes),
        _forms_from_plain(text),
        constants,
    )
