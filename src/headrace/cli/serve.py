"""`headrace serve`: binds, loads, tells where it listens. Knows the terminal; `headrace.server` does the serving."""

from __future__ import annotations

import importlib.util
import logging
import sys

from rich.console import Console

from headrace.cli import show, terminal
from headrace.cli.run import require_engine
from headrace.config import OffloadConfig
from headrace.errors import MissingPackage
from headrace.server.options import ServeOptions


def serve(options: ServeOptions, config: OffloadConfig) -> int:
    """Serve until a signal. Returns the exit code."""
    require_engine()
    for package in ("fastapi", "jinja2", "uvicorn", "prometheus_client", "openai"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package=package, purpose="Serving a model", extra="serve")
    from headrace.server import listening, process
    from headrace.server.service import Service

    terminal.raise_if_interrupted()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("headrace.server").setLevel(logging.INFO)
    console = Console(stderr=True, highlight=False)
    listener = listening.bind(options)
    url = listening.url(listener)

    def load() -> Service:
        with show.bars(console) as bars:
            return Service.open(options, bars, lambda plan: console.print(show.plan_rows(plan)), offload=config)

    def on_ready(service: Service) -> None:
        console.print()
        console.print(
            f"{service.options.name} is served at {url}/v1: {options.max_num_seqs} requests of up to "
            f"{service.model_len} tokens at once. What it does is shown at {url}/",
            style="bold",
            soft_wrap=True,
        )

    process.run(options, load, listener, on_ready)
    return 0
