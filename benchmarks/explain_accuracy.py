"""How often `explain` names the right site, and how often it claims what is somebody else's.

    python benchmarks/explain_accuracy.py CASES.jsonl --package vllm [--foreign foreign.jsonl] [--sample 500]

The package's reference must have been built. CASES has lines with `text` and `expected_sites_v0_32_0` (null: nothing
may be claimed); `foreign.jsonl` comes from foreign_errors.py. Each case is also tried in other clothes: log prefixes,
wrappers, cut off, wrapped at 80 columns, other numbers. `--sample` renders that many of the package's own templates
with made up values and looks for them. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.reference.database import Catalogue, database_path
from headrace.reference.explain import Explanation, explain
from headrace.reference.records import Page, Placeholder, Template

Change = Callable[[str], str]
SAMPLES = {
    "int": "48",
    "float": "3.25",
    "bool": "True",
    "quoted": "'left'",
    "class": "<class 'int'>",
    "list": "['a', 'b']",
}


def each_line(prefix: str) -> Change:
    return lambda text: "\n".join(prefix + line for line in text.splitlines())


def message_only(text: str) -> str:
    return re.sub(r"^(?:[\w.]+(?:Error|Exception): )", "", text.splitlines()[-1] if "\n" not in text else text)


def other_numbers(text: str) -> str:
    return re.sub(r"\d+", lambda number: str(int(number[0]) * 3 + 7) if len(number[0]) < 9 else number[0], text)


def pydantic(text: str) -> str:
    return (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for EngineConfig\n"
        f"  Value error, {message_only(text)} "
        "[type=value_error, input_value=ArgsKwargs((), {'model': 'm'}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
    )


def client(text: str) -> str:
    body = {"error": {"message": message_only(text), "type": "BadRequestError", "param": None, "code": 400}}
    return f"openai.BadRequestError: Error code: 400 - {body!r}"


def server(text: str) -> str:
    return json.dumps({"object": "error", "message": message_only(text), "code": 400})


def traceback(text: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/app/serve.py", line 12, in main\n    engine = start(args)\n             ^^^^^^^^^^^\n'
        f"{text}\n\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/app/run.py", line 3, in <module>\n    main()\n'
        "RuntimeError: The service did not start. See root cause above."
    )


CLOTHES: dict[str, Change] = {
    "as it is": lambda text: text,
    "other numbers": other_numbers,
    "without its class": message_only,
    "engine log": each_line("(EngineCore_DP0 pid=309) ERROR 12-30 11:59:01 [core.py:843] "),
    "docker compose": each_line("vllm-server-1  | (APIServer pid=1) ERROR 12-30 11:59:01 [launcher.py:80] "),
    "kubernetes": each_line("2025-03-04T05:06:07.123456789Z stderr F [rank3]: "),
    "python logging": each_line("2025-03-04 05:06:07,123 - app.worker - ERROR - "),
    "pytest": each_line("E   "),
    "ray": each_line("\x1b[36m(RayWorkerWrapper pid=4242, ip=10.0.0.7)\x1b[0m "),
    "80 columns": lambda text: "\n".join(textwrap.wrap(text, 80, break_on_hyphens=False)),
    "80 columns, mid word": lambda text: "\n".join(text[start : start + 80] for start in range(0, len(text), 80)),
    "typographic quotes": lambda text: re.sub(r"'([^']*)'", "\u2018\\1\u2019", text),
    "cut to 75 %": lambda text: text[: int(len(text) * 0.75)],
    "cut to 60 % ...": lambda text: text[: int(len(text) * 0.6)].rstrip() + "\u2026",
    "pydantic": pydantic,
    "client": client,
    "server": server,
    "repr": lambda text: f"EngineDeadError: the loop ended: ValueError({message_only(text)!r})",
    "traceback": traceback,
    "in a log": lambda text: (
        f"INFO 12-30 11:58:00 [api.py:1] Starting\n{text}\nINFO 12-30 11:58:09 [api.py:9] Shutting down"
    ),
}


def right(answer: Explanation, expected: list[dict[str, Any]] | None) -> bool:
    if expected is None:
        return not answer.found
    places = {(place["file"], place.get("qual")) for place in expected}
    return answer.site is not None and (answer.site.file, answer.site.qualname) in places


def try_cases(cases: Iterable[dict[str, Any]], catalogue: Catalogue) -> Iterator[tuple[str, str, bool, float]]:
    for case in cases:
        for name, dress in CLOTHES.items():
            start = time.perf_counter()
            answer = explain(dress(case["text"]), [catalogue])
            yield name, case["id"], right(answer, case["expected_sites_v0_32_0"]), time.perf_counter() - start


def false_claims(path: Path, catalogue: Catalogue) -> tuple[int, int]:
    claimed = total = 0
    for line in path.read_text().splitlines():
        error = json.loads(line)
        kind = error["error_class"].rpartition(".")[2]
        answer = explain(f"{kind}: {error['message']}" if kind else error["message"], [catalogue])
        total += 1
        claimed += answer.found
        if answer.found and answer.site:
            print(f"claimed: {kind}: {error['message'][:90]!r} as {answer.site.file}:{answer.site.line}")
    return claimed, total


def rendered(template: Template) -> str:
    return "".join(SAMPLES.get(piece.kind, "left") if isinstance(piece, Placeholder) else piece for piece in template)


def invert(catalogue: Catalogue, pages: list[Page]) -> dict[str, int]:
    counts = {"itself": 0, "same words": 0, "another": 0, "none": 0}
    for page in pages:
        answer = explain(f"{page.error_class}: {rendered(page.template)}", [catalogue])
        if answer.page is None:
            counts["none"] += 1
        elif answer.page.id == page.id:
            counts["itself"] += 1
        elif rendered(answer.page.template).split() == rendered(page.template).split():
            counts["same words"] += 1
        else:
            counts["another"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--package", default="vllm")
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--sample", type=int, default=0)
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.cases.read_text().splitlines()]
    with Catalogue.open(database_path(arguments.package)) as catalogue:
        results = list(try_cases(cases, catalogue))
        document: dict[str, Any] = {"cases": len(cases)}
        for name in CLOTHES:
            wrong = [case for each, case, good, _ in results if each == name and not good]
            print(f"{name:22} {len(cases) - len(wrong)} of {len(cases)}  {', '.join(wrong)}")
        document["top_1"] = sum(good for name, _, good, _ in results if name == "as it is")
        document["top_1_in_all_clothes"] = round(sum(good for _, _, good, _ in results) / len(results), 4)
        document["median_s"] = round(statistics.median(seconds for *_, seconds in results), 4)
        if arguments.foreign:
            document["false_claims"], document["foreign"] = false_claims(arguments.foreign, catalogue)
        if arguments.sample:
            pages = [
                page for page in catalogue.pages() if len("".join(p for p in page.template if isinstance(p, str))) > 15
            ]
            document["inverted"] = invert(catalogue, random.Random(0).sample(pages, arguments.sample))
    document["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(document))


if __name__ == "__main__":
    main()
