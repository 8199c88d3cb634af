"""The message lint: the real tree is clean, and each rule catches the fault it is there for."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import lint_messages
import pytest
import typer
from lint_messages import CommandLine, Fault, lint_class, lint_source

from headrace import errors

CLI = CommandLine({"": frozenset({"--help", "--debug"}), "run": frozenset({"--help", "--memory"}), "demo": frozenset()})


def test_every_message_of_the_real_tree_is_clean() -> None:
    shown: list[str] = []
    status = lint_messages.main([], shown.append)
    assert status == 0, "\n".join(shown)


def test_the_real_tree_has_errors_to_render() -> None:
    """A lint that looks at nothing is always content."""
    assert errors.BudgetTooSmall in lint_messages.own_errors()
    assert len(lint_messages.own_errors()) >= 20


def made_up(template: str, remedy: str = "", **example: object) -> type[errors.HeadraceError]:
    """An error class with these words; its fields are those of the example."""
    namespace = {
        "__annotations__": dict.fromkeys(example, "str"),
        "__module__": __name__,
        "template": template,
        "remedy": remedy,
        "example": example,
    }
    return type("MadeUp", (errors.HeadraceError,), namespace)


def rules(faults: object) -> set[str]:
    return {fault.rule if isinstance(fault, Fault) else fault[1] for fault in faults}  # type: ignore[attr-defined]


def test_a_good_class_is_clean() -> None:
    good = made_up(
        "{path!r} has {count} bytes.",
        "Run `headrace run {path} --memory 3GiB`, or `hf download x --local-dir {path}`.",
        path="x",
        count=3,
    )
    assert list(lint_class(good, CLI)) == []


@pytest.mark.parametrize(
    ("rule", "cls"),
    [
        ("broken-template", made_up("{path is gone.", path="x")),
        ("unknown-field", made_up("{file} is gone.", path="x")),
        ("unknown-field", made_up("{} is gone.")),
        ("unused-field", made_up("It is gone.", path="x")),
        ("render", made_up("{path:size} is gone.", path="x")),
        ("unfilled-brace", made_up("{{path}} is gone, not {path}.", path="x")),
        ("double-space", made_up("{path} is  gone.", path="x")),
        ("double-space", made_up("The file {path} is gone.", path=" x")),
        ("outer-space", made_up("{path} is gone. ", path="x")),
        ("final-punctuation", made_up("{path} is gone", path="x")),
        ("final-punctuation", made_up("{path} is gone.", "Bring it back", path="x")),
        ("double-punctuation", made_up("{path} is gone: {why}.", path="x", why="who knows.")),
        ("unknown-flag", made_up("{path} is gone.", "Use --memroy 3GiB.", path="x")),
        ("unknown-flag", made_up("{path} is gone.", "Use `headrace demo --memory 3GiB`.", path="x")),
        ("unknown-command", made_up("{path} is gone.", "Run: headrace fetch {path}", path="x")),
    ],
)
def test_a_fault_in_a_class_is_caught(rule: str, cls: type[errors.HeadraceError]) -> None:
    assert rule in rules(lint_class(cls, CLI))


def test_an_example_that_does_not_fit_the_fields_is_caught() -> None:
    class Incomplete(errors.HeadraceError):
        path: str
        template = "{path} is gone."

    assert rules(lint_class(Incomplete, CLI)) == {"example"}


@pytest.mark.parametrize(
    "remedy", ["Run: pip install --upgrade torch", "Flags that work:\n--memory 3GiB", "Use this:\nheadrace run x"]
)
def test_what_is_to_be_pasted_needs_no_full_stop(remedy: str) -> None:
    assert list(lint_class(made_up("It is gone.", remedy), CLI)) == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("tuple", 'raise KeyError("no such block", name)'),
        ("tuple", 'raise OSError("cannot read", path)'),
        ("foreign-words", 'raise ValueError("the size is wrong")'),
        ("foreign-words", 'raise RuntimeError(f"{size} is wrong") from None'),
        ("missing-f", 'note = "the size {size} is wrong"'),
        ("missing-f", 'note = "of {plan.memory:>8} in all"'),
        ("missing-f", 'note = "the size {size} is wrong " f"in {place}"'),
        ("seam", 'note = ("the size is" "wrong")'),
        ("seam", 'note = (f"the size {size}"\n    f"is wrong")'),
        ("seam", 'note = ("It is wrong."\n    # with a comment between\n    "Use another.")'),
        ("unknown-flag", 'note = "try --memroy"'),
        ("unknown-command", 'note = "try `headrace fetch`"'),
        ("unknown-flag", 'note = "see `hf get --x` or `headrace run --x`"'),
    ],
)
def test_a_fault_in_the_source_is_caught(rule: str, source: str) -> None:
    assert rule in rules(lint_source(source, words_live_here=False, cli=CLI))


def test_words_may_live_in_the_module_of_errors() -> None:
    assert list(lint_source('raise ValueError("the size is wrong")', words_live_here=True, cli=CLI)) == []


@pytest.mark.parametrize(
    "source",
    [
        'template = "the size {size} is wrong"',
        'note = "the size {size} is wrong".format(size=size)',
        'column = TextColumn("{task.description}")',
        '@app.get("/models/{name}")\ndef route(name): ...',
        '"""Documentation may say {name}, --any-flag and `headrace anything`."""',
        'note = "a brace {{name}} and a set {1, 2}"',
        'pattern = re.compile("a{2} " "b{3}")',
        'note = ("the size is " "wrong (" "really)")',
        "raise OSError(errno.EIO, os.strerror(errno.EIO), path)",
        'raise AttributeError(f"module {__name__!r} has no attribute {name!r}")',
        "raise KeyError(name)",
        'assert size > 0, "the planner never hands out an empty slot"',
        'thread = Thread(name="headrace reader 1")',
        'note = "use --memory 3GiB, or `pip install --upgrade torch`"',
        'flag = f"--{name}"',
        'note = "see `headrace --help` or `headrace COMMAND --help`, `hf get --x` and `--memory 3GiB`"',
        'raise AssertionError("a resident model has no blocks that move")',
    ],
)
def test_what_is_fine_stays_fine(source: str) -> None:
    assert list(lint_source(source, words_live_here=False, cli=CLI)) == []


def test_faults_say_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text('def f(size):\n    raise ValueError(f"the size {size} is wrong")\n')
    (fault,) = lint_messages.lint_package(tmp_path, None)
    assert fault.where.endswith("room.py:2")
    assert "errors.py" in fault.what


def test_the_command_line_is_read_from_the_app() -> None:
    app = typer.Typer()

    @app.command()
    def run(memory: str = "", stream: bool = True) -> None: ...

    @app.command("plan-it")
    def plan() -> None: ...

    cli = lint_messages.read_command_line(app)
    assert cli.flags["run"] == {"--memory", "--stream", "--no-stream", "--help"}
    assert cli.flags["plan-it"] == {"--help"}
    assert cli.every_flag >= {"--memory", "--help"}


def test_only_a_missing_command_line_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(importlib.util, "find_spec", broken)
    missing = "headrace.cli"
    assert lint_messages.command_line() is None
    missing = "rich"
    with pytest.raises(ModuleNotFoundError):
        lint_messages.command_line()


def test_made_up_classes_do_not_count_as_ours() -> None:
    assert made_up("It is gone.") not in lint_messages.own_errors()
    assert all(inspect.getmodule(cls) is errors for cls in lint_messages.own_errors())
