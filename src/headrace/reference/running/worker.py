"""The process that runs functions of an examined package: locks itself in, then answers lines of JSON.

    {"source": ..., "elsewhere": {...}}      the file that the following sites are in; not answered
    {"site": {...}}                          answered by one line, before the next is read

What hangs so that no alarm helps is ended by whoever started this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.reference.flow import read_module
from headrace.reference.running import jail
from headrace.reference.running.names import Names, load_harmless
from headrace.reference.running.trial import TookTooLong, Trial, Unfit, ring

_CPU_SECONDS = 900


def tried(names: Names, site: Mapping[str, Any]) -> dict[str, Any]:
    """Try one site."""
    try:
        return Trial(names, site).answer()
    except Unfit as unfit:
        return {"verdict": "not run", "why": str(unfit), "open": False}
    except (SyntaxError, RecursionError, MemoryError, TookTooLong, jail.Refused) as error:
        return {"verdict": "not run", "why": f"{type(error).__name__}: {error}", "open": False}


def main(directory: str) -> None:
    """Lock the jail, then answer lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    load_harmless()
    signal.signal(signal.SIGALRM, ring)
    jail.lock(Path(directory), _CPU_SECONDS)
    names = Names(read_module(""), {})
    for line in sys.stdin:
        message = json.loads(line)
        if "source" in message:
            names = Names(read_module(message["source"]), message["elsewhere"])
            continue
        answers.write(json.dumps(tried(names, message["site"])) + "\n")
        answers.flush()
