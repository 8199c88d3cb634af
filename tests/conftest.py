"""No luck in tests: property tests try the same examples on every run, on every machine.

Also what the tests of offload() share, and those of the reference; torch is loaded only by tests that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from headrace.reference.library import Library

settings.register_profile("headrace", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("headrace")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """The reference of a small package, in a cache of its own."""
    import tiny_reference

    from headrace.reference.library import Library

    folder = tmp_path_factory.mktemp("mill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        tiny_reference.built(folder)
        with Library() as library:
            yield library


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where small checkpoints lie that tests share."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def without_gradients() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Offloads, and at the end closes and finds every module as it was."""
    from tiny_modules import same, snapshot
    from tiny_offloads import ALL

    from headrace.offloading import offload

    made: list[tuple[Any, dict[str, Any]]] = []

    def open_module(module: Any, config: Any = ALL, **options: Any) -> Any:
        before = snapshot(module)
        made.append((offload(module, config, **options), before))
        return made[-1][0]

    yield open_module
    for handle, before in made:
        handle.close()
        assert same(snapshot(handle.module), before)
