"""What a file tells about its errors: every form of each message."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from headrace import errors, reference
from headrace.errors import concrete_errors
from headrace.reference import pieces
from headrace.reference.extract import FileErrors, finished, read_file
from headrace.reference.ids import id_of
from headrace.reference.records import Placeholder, Site


def read(source: str, file: str = "package/module.py") -> FileErrors:
    return read_file(file, textwrap.dedent(source).encode())


def sites(source: str) -> list[Site]:
    return list(finished([read(source)]))


def forms(source: str) -> list[str]:
    """The texts of the only site."""
    (site,) = sites(source)
    return [pieces.text(template) for template in site.templates]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("'plain'", ["plain"]),
        ("'one ' 'text'", ["one text"]),
        ("f'{x} is not {self.y!r}'", ["{x} is not {self.y}"]),
        ("f'{{braces}} {x}'", ["{braces} {x}"]),
        ("'of ' + x + ' and ' + str(y)", ["of {x} and {y}"]),
        ("'%s has %d%%' % (x, y)", ["{x} has {y}%"]),
        ("'%(a)s is gone' % {'a': x}", ["{x} is gone"]),
        ("'%s is gone' % x", ["{x} is gone"]),
        ("'{} and {b!r}'.format(x, b=y)", ["{x} and {y}"]),
        ("'{0} and {0.name}'.format(x)", ["{x} and {x.name}"]),
        ("' '.join(['one', f'{x}', 'three'])", ["one {x} three"]),
        ("'known: ' + ', '.join(names)", ["known: {', '.join(names)}"]),
        ("'a' if x else 'bb'", ["bb", "a"]),
        ('f\'it is {"on" if x else "off"}\'', ["it is off", "it is on"]),
        ("x or 'nothing was given'", ["nothing was given", "{x}"]),
        ("textwrap.dedent('   inner ').strip()", ["inner"]),
        ("(y := 'bound')", ["bound"]),
    ],
)
def test_the_ways_to_write_a_message(message: str, expected: list[str]) -> None:
    assert forms(f"def f(self, x, y, names):\n    raise ValueError({message})") == expected


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("len(x)", "int"),
        ("x:d", "int"),
        ("x:,", "int"),
        ("x:.2f", "float"),
        ("x!r", "quoted"),
        ("type(x)", "class"),
        ("type(x).__name__", "str"),
        ("sorted(x)", "list"),
        ("', '.join(x)", "list"),
        ("number", "int"),
        ("error", "exception"),
        ("x", "any"),
    ],
)
def test_what_a_value_can_look_like(expression: str, kind: str) -> None:
    (site,) = sites(f'def f(x, number: int, error):\n    raise ValueError(f"it is {{{expression}}}.")')
    (template,) = site.templates
    assert [piece.kind for piece in template if isinstance(piece, Placeholder)] == [kind]


def test_every_definition_that_reaches_the_raise_is_a_form() -> None:
    source = """
        def f(x, names):
            message = "always"
            if x:
                message += " and sometimes"
            elif names:
                message = "instead"
            raise ValueError(message)
    """
    assert forms(source) == ["always and sometimes", "instead", "always"]


def test_a_branch_that_leaves_gives_no_form() -> None:
    source = """
        def f(x):
            if x:
                message = "never raised here"
                return message
            else:
                message = "raised"
            raise ValueError(message)
    """
    assert forms(source) == ["raised"]


def test_optional_parts_in_the_middle() -> None:
    source = """
        def f(x):
            hint = ""
            if x > 0:
                hint = f" At most {x} fit."
            raise ValueError(f"It is too much.{hint} Take less.")
    """
    assert forms(source) == ["It is too much. At most {x} fit. Take less.", "It is too much. Take less."]


@pytest.mark.parametrize(
    "source",
    [
        'WORDS = "from the top"\ndef f():\n    raise ValueError(WORDS)',
        'class A:\n    words = "from the top"\n    def f(self):\n        raise ValueError(self.words)',
        'def words():\n    return "from the top"\ndef f():\n    raise ValueError(words())',
        'def words(what):\n    return f"from the {what}"\ndef f():\n    raise ValueError(words("top"))',
        'class A:\n def words(self):\n  return "from the top"\n def f(self):\n  raise ValueError(self.words())',
        'def f():\n    error = ValueError("from the top")\n    raise error',
        'def f():\n try:\n  g()\n except KeyError:\n  words = "from the top"\n  raise ValueError(words)',
        'def f(x):\n    with x:\n        words = "from the top"\n    raise ValueError(words)',
        'def make():\n    return ValueError("from the top")\n',
        'def f(x):\n    words = None\n    if x:\n        words = "from the top"\n    raise ValueError(words)',
    ],
)
def test_words_from_elsewhere(source: str) -> None:
    assert forms(source) == ["from the top"]


def test_pieces_that_are_gathered_are_sites_of_their_own() -> None:
    source = """
        def check(rank, most, bias):
            wrong = []
            if rank > most:
                wrong.append(f"rank {rank} is above {most}.")
            if bias:
                wrong.append("no bias, please.")
            if wrong:
                raise ValueError(f"{' '.join(wrong)}")
    """
    found = sites(source)
    assert [pieces.text(site.templates[0]) for site in found] == ["rank {rank} is above {most}.", "no bias, please."]
    assert all(site.fragment and site.line == 9 for site in found)


GATHERED = {
    "yielded": """
        class Mill:
            def _problems(self):
                if self.rank > self.most:
                    yield f"rank {self.rank} is above {self.most}"

            def check(self):
                problems = list(self._problems())
                if problems:
                    raise ValueError("; ".join(problems))
    """,
    "handed over as a fact": """
        def problems(rank, most):
            if rank > most:
                yield f"rank {rank} is above {most}"

        def check(rank, most):
            found, others = list(problems(rank, most)), 3
            all_of_them = found + (["nothing else to say"] if others else [])
            raise ManyErrors(problems=all_of_them, count=len(all_of_them))
    """,
    "returned": """
        def check(rank, most):
            raise ValueError("Not so:\\n" + "\\n".join(problems(rank, most)))

        def problems(rank, most):
            found = []
            found += [f"rank {rank} is above {most}"]
            found.extend(more(rank))
            return found

        def more(rank):
            yield from [f"rank {rank} is odd, which is bad"]
    """,
    "kept": """
        class Mill:
            def _check_rank(self):
                self.errors.append(f"rank {self.rank} is above {self.most}")

            def check(self):
                self.errors = []
                self._check_rank()
                raise ValueError(f"The mill: {', '.join(self.errors)}")
    """,
    "for each": """
        def check(ranks, most, rank):
            raise ValueError("; ".join(f"rank {rank} is above {most}" for rank in ranks))
    """,
}


@pytest.mark.parametrize("source", GATHERED.values(), ids=GATHERED.keys())
def test_pieces_are_followed_to_where_they_are_made(source: str) -> None:
    found = [site for site in sites(source) if site.fragment]
    texts = [pieces.canonical(site.templates[0]) for site in found]
    assert "rank {} is above {}" in texts
    for site in found:
        # What another function makes is only a part of why it is raised.
        assert not site.condition.complete or site.qualname.endswith("check")


def test_a_piece_of_another_function_stands_where_it_is_made() -> None:
    (site,) = (site for site in sites(GATHERED["yielded"]) if site.fragment)
    assert (site.qualname, site.line, site.error_class) == ("Mill._problems", 5, "ValueError")
    assert [atom.code for atom in site.condition.atoms] == ["self.rank > self.most"]
    assert site.condition.incomplete == "Mill.check gathers it, and raises"


def test_a_message_with_words_of_its_own_is_a_site_beside_its_pieces() -> None:
    found = [(site.fragment, pieces.canonical(site.templates[0])) for site in sites(GATHERED["kept"])]
    assert found == [(True, "rank {} is above {}"), (False, "The mill: {}")]


@pytest.mark.parametrize(
    "body",
    [
        "known = ['cpu', 'cuda']\n    raise ValueError(f'not one of {\", \".join(known)}')",
        "known = known + known\n    raise ValueError(known)",
        "raise ValueError(len([f'a text that nobody sees {x}']))",
    ],
    ids=["names", "of itself", "not shown"],
)
def test_what_is_no_piece_of_a_message(body: str) -> None:
    assert not any(site.fragment for site in sites(f"def check(x, known):\n    {body}\n"))


def test_kinds_of_sites() -> None:
    source = """
        def f(x):
            assert x, "x is needed"
            try:
                g(x)
            except KeyError:
                raise
            except ValueError as error:
                raise error
            return self.create_error_response("no such model")

        def g(x):
            return LookupError("made, not raised")
    """
    found = {site.kind: site for site in sites(source)}
    assert set(found) == {"assert", "reraise", "returned"}
    assert [site.error_class for site in sites(source)] == [
        "AssertionError",
        "KeyError",
        "ValueError",
        "self.create_error_response",
        "LookupError",
    ]


def test_arguments_that_print_as_a_tuple() -> None:
    assert forms("def f(x):\n    raise ValueError('it is', x, f'not {x}')") == ["('it is', {x}, 'not {x}')"]
    assert forms("def f(n):\n    raise OSError(n, 'no room', 'file')") == ["[Errno {n}] no room"]


def test_a_class_that_builds_its_text() -> None:
    source = """
        class Missing(Exception):
            def __init__(self, name, place="here"):
                super().__init__(f"{name} is not {place}.")

        class Lost(Missing):
            pass

        def f(x):
            raise Lost(x)
    """
    assert forms(source) == ["{x} is not here."]


def test_a_class_that_adds_to_its_text() -> None:
    """What `__str__` adds is a form of its own, and does not name the page."""
    source = """
        class Invalid(Exception):
            def __init__(self, message, *, parameter=None):
                super().__init__(message)
                self.parameter = parameter

            def __str__(self):
                base = super().__str__()
                return f"{base} (parameter={self.parameter})" if self.parameter else base

        def f(x):
            raise Invalid(f"{x} is wrong.", parameter="x")
    """
    assert forms(source) == ["{x} is wrong.", "{x} is wrong. (parameter=x)"]


def test_a_class_whose_text_is_kept_on_it() -> None:
    source = """
        class Missing(LookupError):
            def __init__(self, name):
                self.message = f"There is no {name}."

            def __str__(self):
                return self.message

        def f():
            raise Missing("door")
    """
    assert forms(source) == ["There is no door."]


def test_a_class_of_another_file() -> None:
    classes = read(
        "class Odd(Exception):\n    def __init__(self, n):\n        super().__init__(f'{n} is odd')", "p/e.py"
    )
    user = read("from p.e import Odd\ndef f(x):\n    raise Odd(x)", "p/u.py")
    (site,) = finished([user, classes])
    assert pieces.text(site.templates[0]) == "{x} is odd"


def test_a_wrapper_and_an_error_that_nobody_sees() -> None:
    source = """
        def f():
            try:
                raise ValueError("inside")
            except ValueError as failure:
                raise RuntimeError(f"outside: {failure}") from failure
    """
    inner, outer = sites(source)
    assert (inner.caught_locally, inner.wrapper) == (True, False)
    assert (outer.caught_locally, outer.wrapper) == (False, True)


def test_a_broken_file_is_told_and_skipped() -> None:
    assert "SyntaxError" in (read("def f(:").broken or "")
    assert list(finished([read("def f(:")])) == []


# --- our own errors -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_ids() -> set[str]:
    root = Path(errors.__file__).parent
    files = [read_file(str(path.relative_to(root.parent)), path.read_bytes()) for path in root.rglob("*.py")]
    return {id_of("headrace", site) for site in finished(files)}


def test_every_error_of_ours_has_a_page_under_its_own_id(own_ids: set[str]) -> None:
    without = [
        cls for cls in concrete_errors() if cls.__module__ == "headrace.errors" and cls.error_id() not in own_ids
    ]
    assert without == []
    assert reference.__doc__
