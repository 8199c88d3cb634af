"""Clients that do everything wrong, and what must hold after them. `scripts/soak` runs it large, a test small."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from live_server import DEADLINE_S, Live

from headrace import machine

MALFORMED: Sequence[bytes] = (
    b"",
    b"{",
    b"[1]",
    b'{"prompt": 7}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "max_tokens": 100000}',
    b'{"prompt": "a", "unheard_of": 1}',
    b'{"prompt": [99999999]}',
    b"\xff\xfe",
)


@dataclasses.dataclass
class Outcome:
    """What became of all requests."""

    answered: int = 0
    cancelled: int = 0
    refused: int = 0
    busy: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    memory_bytes: list[int] = dataclasses.field(default_factory=list)
    """Resident set after each quarter of the requests."""


def expected_answers(live: Live, prompts: Sequence[str], lengths: Sequence[int]) -> dict[tuple[str, int], str]:
    """What each prompt is answered when nobody else asks."""
    with live.client() as client:
        return {(prompt, length): _ask(client, prompt, length) for prompt in prompts for length in lengths}


def _body(prompt: str, length: int, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": length, "temperature": 0, **others}


def _ask(client: httpx2.Client, prompt: str, length: int) -> str:
    answer = client.post("/v1/completions", json=_body(prompt, length))
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def soak(live: Live, requests: int, clients: int, known: dict[tuple[str, int], str], seed: int = 0) -> Outcome:
    """A third is cancelled in the middle, a tenth is malformed, every other one streams."""
    outcome = Outcome()
    lock = threading.Lock()
    numbers = iter(range(requests))

    def work() -> None:
        with httpx2.Client(base_url=live.url, timeout=20 * DEADLINE_S) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                    if number is not None and number % max(1, requests // 4) == 0:
                        outcome.memory_bytes.append(machine.resident_bytes())
                if number is None:
                    return
                result = _one(client, random.Random(seed * 1_000_003 + number), known)
                with lock:
                    if result in ("answered", "cancelled", "refused", "busy"):
                        setattr(outcome, result, getattr(outcome, result) + 1)
                    else:
                        outcome.wrong.append(f"request {number}: {result}")

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(work) for _ in range(clients)]:
            done.result()
    live.wait_idle()
    outcome.memory_bytes.append(machine.resident_bytes())
    return outcome


def _one(client: httpx2.Client, chosen: random.Random, known: dict[tuple[str, int], str]) -> str:
    kind = chosen.random()
    if kind < 0.1:
        headers = {"Content-Type": "application/json"}
        answer = client.post("/v1/completions", content=chosen.choice(MALFORMED), headers=headers)
        return "refused" if answer.status_code == 400 and answer.json()["error"]["code"] else answer.text
    (prompt, length), text = chosen.choice(list(known.items()))
    if kind < 0.1 + 1 / 3:
        with client.stream("POST", "/v1/completions", json=_body(prompt, length, stream=True)) as answer:
            if answer.status_code == 429:
                return "busy"
            lines = answer.iter_lines()
            for _ in range(chosen.randrange(1, 4)):
                next(lines, None)
        return "cancelled"
    if kind < 0.7:
        answer = client.post("/v1/completions", json=_body(prompt, length))
        if answer.status_code == 429:
            return "busy" if int(answer.headers["Retry-After"]) > 0 else "no Retry-After"
        got = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        return "answered" if got == text else f"{got!r} instead of {text!r}"
    return _streamed(client, prompt, length, text)


def _streamed(client: httpx2.Client, prompt: str, length: int, text: str) -> str:
    import json

    with client.stream("POST", "/v1/completions", json=_body(prompt, length, stream=True)) as answer:
        if answer.status_code == 429:
            return "busy"
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    if lines[-1:] != ["[DONE]"]:
        return f"a stream that ends in {lines[-1:]}"
    got = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    return "answered" if got == text else f"{got!r} instead of {text!r}"
