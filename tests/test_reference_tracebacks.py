"""Errors are read out of tracebacks of every form, with their frames and their links."""

from __future__ import annotations

from headrace.reference.tracebacks import Frame, Raised, parse

CHAIN = """\
Traceback (most recent call last):
  File "/app/vllm/engine.py", line 10, in start
    raise KeyError(name)
    ^^^^^^^^^^^^^^^^^^^^
KeyError: 'weights'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/vllm/config.py", line 20, in load
    raise ValueError(f"no {name}")
ValueError: no weights

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/app/run.py", line 30, in <module>
    main()
RuntimeError: it did not start
"""


def told(error: Raised) -> tuple[str, str, str]:
    return error.error_class, error.message, error.link


def test_a_chain() -> None:
    errors = parse(CHAIN)
    assert [told(error) for error in errors] == [
        ("KeyError", "'weights'", ""),
        ("ValueError", "no weights", "context"),
        ("RuntimeError", "it did not start", "cause"),
    ]
    assert errors[1].frames == (Frame("/app/vllm/config.py", 20, "load"),)
    assert errors[1].line == 12


def test_every_line_with_a_log_prefix() -> None:
    prefix = "(EngineCore pid=9) ERROR 01-02 03:04:05 [core.py:1] "
    assert parse("\n".join(prefix + line for line in CHAIN.splitlines()))[2].error_class == "RuntimeError"


def test_the_lines_of_a_message() -> None:
    (error,) = parse("ValueError: first\nsecond\n  third\n\nand something else")
    assert error.message == "first\nsecond\n  third"


def test_a_message_ends_where_the_log_goes_on() -> None:
    text = "ERROR 01-02 03:04:05 [a.py:1] ValueError: broken\nINFO 01-02 03:04:06 [a.py:2] Shutting down"
    assert [told(error) for error in parse(text)] == [("ValueError", "broken", "")]


def test_ipython() -> None:
    (error,) = parse(
        "---------------------------------------------------------------------------\n"
        "ValueError                                Traceback (most recent call last)\n"
        "Cell In[3], line 1\n----> 1 LLM(model='m')\n\n"
        "File ~/site-packages/vllm/llm.py:47, in LLM.__init__(self, model)\n"
        "     46     if not model:\n---> 47         raise ValueError(f'no {model}')\n\nValueError: no m"
    )
    assert (error.error_class, error.message) == ("ValueError", "no m")
    assert error.frames[-1] == Frame("~/site-packages/vllm/llm.py", 47, "LLM.__init__")


def test_an_older_ipython_tells_the_line_with_an_arrow() -> None:
    (error,) = parse(
        "ValueError   Traceback (most recent call last)\n/a/vllm/llm.py in check(self, model)\n"
        "     46     if not model:\n---> 47         raise ValueError('no')\n\nValueError: no"
    )
    assert error.frames == (Frame("/a/vllm/llm.py", 47, "check"),)


def test_pytest() -> None:
    (error,) = parse(
        ">       raise ValueError('no model')\nE       ValueError: no model\n\nvllm/llm.py:47: ValueError\n"
    )
    assert (error.message, error.frames) == ("no model", (Frame("vllm/llm.py", 47, ""),))


def test_a_group() -> None:
    errors = parse(
        '  + Exception Group Traceback (most recent call last):\n  |   File "a.py", line 3, in f\n'
        "  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
        "    | ValueError: one\n    +------------------------------------"
    )
    assert [error.error_class for error in errors] == ["ExceptionGroup", "ValueError"]


def test_behind_frames_any_class_counts() -> None:
    (error,) = parse('Traceback (most recent call last):\n  File "a.py", line 1, in f\nBudgetTooSmall: no room')
    assert told(error) == ("BudgetTooSmall", "no room", "")


def test_a_class_inside_of_another() -> None:
    (error,) = parse("ray.exceptions.RayTaskError(ValueError): words")
    assert error.error_class == "ValueError"


def test_without_any_class_the_text_is_the_message() -> None:
    assert [told(error) for error in parse("there is no room\nfor more")] == [("", "there is no room\nfor more", "")]


def test_without_any_class_each_log_record_is_a_message() -> None:
    text = "INFO 01-02 03:04:05 [a.py:1] Starting\nERROR 01-02 03:04:06 [a.py:2] no room"
    assert [(error.message, error.level) for error in parse(text)] == [("Starting", "INFO"), ("no room", "ERROR")]


def test_prose_names_no_error() -> None:
    assert [error.error_class for error in parse("The Error: is here. Timeout of 3 s")] == [""]
