"""The message lint: each rule finds the fault it is there for, and nothing that a reader would call right."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import main
from headrace.reference import lint, packages

FUNCTION = "def check(size, most, names, self=None):\n    for name in names:\n        pass\n    {}\n"


def package(tmp_path: Path, source: str, **others: str) -> Path:
    folder = tmp_path / "src" / "mill"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(textwrap.dedent(source))
    for name, content in others.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(content))
    return tmp_path / "src"


def rules(tmp_path: Path, source: str, **others: str) -> list[str]:
    found = lint.lint(packages.directory(package(tmp_path, source, **others), package="mill"))
    return [finding.rule for finding in found]


FAULTS = [
    ("tuple-message", 'raise ValueError("size is too large:", size)'),
    ("tuple-message", 'raise ValueError("size %s is too large", size)'),
    ("tuple-message", 'raise ValueError(("size is", size))'),
    ("tuple-message", 'raise OSError("cannot read the file", size)'),
    ("tuple-message", 'assert size, ("size is wrong:", size)'),
    ("unfilled-percent", 'raise ValueError("size %s is too large")'),
    ("unfilled-percent", 'raise ValueError("size %(size)d is too large")'),
    ("unfilled-braces", 'raise ValueError("size is too large: {} of them")'),
    ("missing-f", 'raise ValueError("size {size} is too large")'),
    ("missing-f", 'raise ValueError("size {self.size!r} is too large")'),
    ("missing-f", 'raise ValueError(f"size {size} " "is above {most} of them")'),
    ("missing-f", 'message = "size {size} is too large"\n    raise ValueError(message)'),
    ("missing-f", 'assert size, "size {size} is too large"'),
    ("missing-space", 'raise ValueError("the size of the mill is" "too large")'),
    ("missing-space", 'raise ValueError(f"size is above {most}" "which is all there is")'),
    ("missing-space", 'raise ValueError("the size has to be" f"{most} or less")'),
    ("missing-space", 'raise ValueError("The size is wrong." "Use another one.")'),
    ("missing-space", 'raise ValueError("the size is wrong," "so use another")'),
    ("missing-space", 'raise ValueError("the size of the mill is" + "too large")'),
    ("missing-space", 'text = "the mill is"\n    text += "large, and the"  "wheel small"\n    raise ValueError(text)'),
    ("double-space", 'raise ValueError("the size is wrong, " " so use another")'),
    ("key-error-escapes", 'raise KeyError("no such mill here\\nthere are: a, b")'),
    ("no-words", "raise ValueError(size)"),
    ("no-words", "raise ValueError(f'{size}: {name}')"),
    ("no-words", "raise RuntimeError(str(type(size)))"),
    ("empty-message", "raise ValueError"),
    ("empty-message", "raise RuntimeError()"),
    ("empty-message", "raise Exception('')"),
    ("empty-message", "raise ValueError from None"),
    ("missing-space", "hint = 'small'\n    raise ValueError(f'it is not so {hint}' 'but the size is large')"),
    ("text-against-test", "if size < 0:\n        raise ValueError(f'size must be greater than 0, not {size}')"),
    ("text-against-test", "if self.size < 1:\n        raise ValueError('`size` must be >= 0.')"),
]


@pytest.mark.parametrize(("rule", "statement"), FAULTS)
def test_a_fault_is_found(rule: str, statement: str, tmp_path: Path) -> None:
    assert rules(tmp_path, FUNCTION.format(statement)) == [rule]


FINE = [
    'raise ValueError("size is too large")',
    'raise ValueError("size is too large",)',
    'raise ValueError(f"size {size} is too large")',
    'raise ValueError("size %s is too large" % size)',
    'raise ValueError("size {} is too large".format(size))',
    'raise ValueError("100 % of the size")',
    "raise ValueError(\"the template must contain '{size}' once\")",
    'raise ValueError("give a format like %s for the size")',
    'raise ValueError("a dict like {size: 3} is expected")',
    'raise ValueError("an empty set {} is no size")',
    'message = "size {size} is too large"\n    raise ValueError(message.format(size=size))',
    'message = "size %s is too large"\n    raise ValueError(message % size)',
    'raise ValueError("size {sizes} is what a user writes")',
    "raise KeyError(name)",
    'raise KeyError("no such mill here", )',
    "raise OSError(5, 'cannot read the file', name)",
    "raise StopIteration(size, 'the size of all')",
    "raise UnicodeDecodeError('utf-8', b'', 0, 1, 'no such thing')",
    'raise ValueError("see https://example.org/a" "/page for the size")',
    'raise ValueError("no module torch." "nn.functional was found here")',
    'raise ValueError("the layer" f"{size} of the mill is wrong")',
    'raise ValueError(f"a size of {size}" "MiB is too large for it")',
    'raise ValueError("the size of it:\\n" "too large")',
    'raise ValueError("the mill can" "not grind")',
    'raise ValueError(r"the size must match a" r"b in the pattern")',
    'raise ValueError("the size of it " "is too large")',
    "hint = ''\n    if size:\n        hint = f'The most is {most}. '\n"
    "    raise ValueError(f'it is too large for the mill. {hint}' 'Try to use less.')",
    "try:\n        grind(size)\n    except KeyError as error:\n        raise RuntimeError from error",
    "raise NotImplementedError(type(self).__name__)",
    "raise NotImplementedError",
    "raise NotImplementedError()",
    "raise IndexError",
    "raise StopIteration",
    "raise ValueError(message(size))",
    "message = name\n    raise ValueError(message)",
    "raise ValueError(f'size {size}')",
    "try:\n        raise ValueError\n    except ValueError:\n        pass",
    "raise Unknown('size is too large', size)",
    "raise Unknown('size {size} is too large', size=size)",
    "if size < 0:\n        raise ValueError('size must be greater than or equal to 0')",
    "if size < 1:\n        raise ValueError('size must be greater than 0')",
    "if size <= 0:\n        raise ValueError('size must be >= 1')",
    "if size < 0 or most:\n        raise ValueError('size must be > 0')",
    "if size < 2:\n        raise ValueError('size must be at least 4 unless it is 2')",
    "if size < 0:\n        raise ValueError('most must be > 0')",
    "if size < 0:\n        raise ValueError('size must be > 0 and even')",
    "if size > 8:\n        raise ValueError('size must be > 0')",
    "assert size",
    "raise",
]


@pytest.mark.parametrize("statement", FINE)
def test_what_is_fine_stays_fine(statement: str, tmp_path: Path) -> None:
    assert rules(tmp_path, FUNCTION.format(statement)) == []


def test_a_class_of_the_package_is_looked_at_before_anything_is_said(tmp_path: Path) -> None:
    source = """
        from mill.errors import Plain, Deeper, Filled, Made

        def check(size):
            if size == 1:
                raise Plain("size is wrong:", size)
            if size == 2:
                raise Deeper("size is wrong:", size)
            if size == 3:
                raise Filled("size %s is wrong", size)
            raise Made("size is wrong:", size)
    """
    errors = """
        from dataclasses import dataclass

        class Plain(ValueError):
            code = 3

        class Deeper(Plain):
            def hint(self):
                return "another size"

        class Filled(ValueError):
            def __init__(self, text, *values):
                super().__init__(text % values)

        @dataclass
        class Made(Exception):
            text: str
            size: int
    """
    found = lint.lint(packages.directory(package(tmp_path, source, errors=errors), package="mill"))
    assert [(finding.line, finding.rule) for finding in found] == [(6, "tuple-message"), (8, "tuple-message")]


def test_an_error_that_the_module_catches_itself_needs_no_message(tmp_path: Path) -> None:
    source = """
        def part(text):
            raise ValueError

        def whole(text):
            try:
                return part(text)
            except ValueError:
                return None
    """
    assert rules(tmp_path, source) == []


def test_a_file_that_is_no_python_is_left_out(tmp_path: Path) -> None:
    assert rules(tmp_path, 'raise ValueError("a size", 3)\n', other="def (") == ["tuple-message"]


def test_every_rule_has_a_fault_in_these_tests() -> None:
    names = {rule.name for rule in lint.RULES}
    assert {rule for rule, _ in FAULTS} == names


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> int:
    return main(["reference", *map(str, arguments)])


def test_findings_are_printed_with_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = package(tmp_path, 'def f(x):\n    raise ValueError("x is wrong:", x)\n')
    assert run("lint", "mill", "--source", source) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mill/__init__.py:2: tuple-message: ")
    assert lines[-1] == "mill 0: 1 findings in 1 files."


def test_no_finding_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = package(tmp_path, 'def f(x):\n    raise ValueError(f"x is wrong: {x}")\n')
    assert run("lint", "mill", "--source", source) == 0
    assert capsys.readouterr().out == "mill 0: 0 findings in 1 files.\n"


def test_findings_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = package(tmp_path, 'def f(x):\n    raise ValueError("x is wrong:", x)\n')
    assert run("lint", "mill", "--source", source, "--json") == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["rule"], finding["level"], finding["line"]) == ("tuple-message", "error", 2)


def check_sarif(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What the standard's schema requires, and what readers of SARIF rely on."""
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert not place["artifactLocation"]["uri"].startswith(("/", "file:"))
        assert place["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
        assert place["region"]["startLine"] >= 1
    prints = [result["partialFingerprints"]["fault/v1"] for result in run["results"]]
    assert len(set(prints)) == len(prints)
    return list(run["results"])


def test_sarif(tmp_path: Path) -> None:
    source = package(tmp_path, "def f(x):\n    raise ValueError('x is:', x)\n    raise ValueError('x is:', x)\n")
    assert run("lint", "mill", "--source", source, "--sarif", tmp_path / "lint.sarif") == 1
    first, second = check_sarif(json.loads((tmp_path / "lint.sarif").read_text()))
    assert first["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "src/mill/__init__.py"
    assert [each["locations"][0]["physicalLocation"]["region"]["startLine"] for each in (first, second)] == [2, 3]
    assert run("export", "mill", "--source", source, "--sarif", tmp_path / "export.sarif") == 0
    assert (tmp_path / "export.sarif").read_text() == (tmp_path / "lint.sarif").read_text()


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = package(tmp_path, "x = 1\n")
    (tmp_path / "out").mkdir()
    assert run("export", "mill", "--source", source, "--sarif", tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith(
        f"error: Writing the findings to '{tmp_path}/out' failed: Is a directory."
    )
    assert run("lint", "mill", "--source", source, "--sarif", tmp_path / "no" / "x.sarif") == 1
    assert not list(tmp_path.glob(".*"))
