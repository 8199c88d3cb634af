"""Messages that are known to be somebody else's."""

from __future__ import annotations

import pytest

from headrace.reference.owners import file_package, owner
from headrace.reference.tracebacks import Frame


@pytest.mark.parametrize(
    ("error_class", "message", "name", "certain"),
    [
        ("KeyError", "'weights'", "Python", True),
        ("TypeError", "f() missing 1 required positional argument: 'x'", "Python", True),
        ("AttributeError", "'NoneType' object has no attribute 'shape'", "Python", True),
        ("ModuleNotFoundError", "No module named 'x'", "Python", True),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x'", "Python", True),
        ("", "argument --mode: invalid choice: 'x' (choose from a)", None, None),
        ("", "invalid choice: 'x' (choose from a)", "argparse", True),
        ("ValidationError", "1 validation error for X", "pydantic", True),
        ("RuntimeError", "CUDA error: no kernel image is available", "torch", False),
        ("OutOfMemoryError", "a GPU is full", "torch", False),
        ("torch.OutOfMemoryError", "a GPU is full", "torch", False),
        ("json.decoder.JSONDecodeError", "unheard of", "Python", False),
        ("huggingface_hub.errors.GatedRepoError", "401", "huggingface_hub", False),
        ("mill.errors.Broken", "the stone is broken", None, None),
        ("ValueError", "the stone is broken", None, None),
        ("AssertionError", "", "Python", False),
    ],
)
def test_by_class_and_words(error_class: str, message: str, name: str | None, certain: bool | None) -> None:
    found = owner(error_class, message, (), "mill")
    assert (found and found.name, found and found.certain) == (name, certain)


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/x/site-packages/torch/nn/modules/module.py", "torch"),
        ("/x/dist-packages/mill/grind.py", "mill"),
        ("/x/site-packages/pydantic_core/core.py", "pydantic"),
        ("/usr/lib/python3.12/asyncio/runners.py", "Python"),
        ("<frozen importlib._bootstrap>", "Python"),
        ("/home/me/app.py", ""),
    ],
)
def test_the_package_of_a_file(path: str, package: str) -> None:
    assert file_package(path) == package


def test_the_last_frame_decides() -> None:
    inside = (Frame("/x/site-packages/mill/a.py", 1, "f"), Frame("/x/site-packages/torch/b.py", 2, "g"))
    found = owner("ValueError", "anything", inside, "mill")
    assert found is not None
    assert (found.name, found.certain) == ("torch", True)
    assert owner("ValueError", "anything", inside[:1], "mill") is None


@pytest.mark.parametrize(
    "statement",
    [
        "{}['a']",
        "[][1]",
        "int('x')",
        "1 / 0",
        "None.x",
        "f()",
        "'a' + 1",
        "len(3)",
        "open('/nothing/there')",
        "max([])",
    ],
)
def test_what_the_interpreter_says_is_its_own(statement: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each raises something else
        eval(statement, {"f": lambda x: x})
    found = owner(type(caught.value).__name__, str(caught.value), (), "mill")
    assert found is not None
    assert found.name == "Python"
