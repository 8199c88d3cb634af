"""The way back: close, an opening that fails, a module or a process that is gone."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_modules import WIDTH, same, snapshot, stack
from tiny_offloads import ALL, MAPPED, X, groups, open_files
from tiny_stacks import in_threads
from torch import nn

import headrace
from headrace import backing, offloading
from headrace.copying.spill import SpillFile
from headrace.errors import (
    SpillFailed,
    StillRunning,
)
from headrace.offloading import Handle, offload

pytestmark = pytest.mark.usefixtures("without_gradients")


# --- close --------------------------------------------------------------------------------------------------------


def test_close_gives_everything_back_again_and_again() -> None:
    module, resident = stack(), stack()
    gc.collect()  # what other tests have left behind is not counted
    before, threads, descriptors = snapshot(module), threading.active_count(), open_files()
    for config in (ALL, MAPPED, groups(2, 1, 3), ALL):
        with offload(module, config) as handle:
            assert same(module(X), resident(X))
        handle.close()
        assert same(snapshot(module), before)
        assert same(module(X), resident(X))
        assert threading.active_count() == threads
    gc.collect()
    assert open_files() == descriptors
    copy.deepcopy(module).half()
    pickle.loads(pickle.dumps(module))


def test_close_from_inside_is_refused(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module)
    refused: list[str] = []

    def inside(layer: Any) -> None:
        layer.inside = None
        for act in (handle.close, handle.state_dict):
            with pytest.raises(StillRunning) as raised:
                act()
            refused.append(str(raised.value))

    module.layers[2].inside = inside
    assert same(module(X), resident(X))
    assert refused[0].startswith("close() was called from inside")
    assert refused[1].startswith("state_dict() was called from inside")


def test_close_waits_for_a_pass_of_another_thread(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = opened(module)
    inside, closing = threading.Event(), threading.Event()

    def pause(layer: Any) -> None:
        layer.inside = None
        inside.set()
        assert closing.wait(60)

    def close() -> None:
        assert inside.wait(60)
        closing.set()
        handle.close()

    def run() -> bool:
        with torch.inference_mode():
            return same(module(X), resident(X))

    module.layers[2].inside = pause
    assert in_threads(run, close) == [True, None]
    assert same(module(X), resident(X))


def test_who_has_wrapped_a_forward_meanwhile_still_works_after_close(opened: Any) -> None:
    module, resident = stack(), stack()
    handle = offload(module, ALL)
    for wrapped in (module, module.layers[1]):
        inner = wrapped.forward
        wrapped.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)
    assert same(module(X), resident(X))
    handle.close()
    assert same(module(X), resident(X))


# --- an opening that fails ----------------------------------------------------------------------------------------

STEPS = ["SpillFile", "DiskReader", "append", "flush", "measure_bytes_per_s", "PrefetchBackend", "attach", "put_away",
         "guard"]  # fmt: skip


@pytest.mark.parametrize("error", [SpillFailed, KeyboardInterrupt])
@pytest.mark.parametrize("step", STEPS)
def test_an_opening_that_fails_leaves_the_module_as_it_was(
    monkeypatch: pytest.MonkeyPatch, step: str, error: Any
) -> None:
    module, resident = stack(), stack()
    before, threads, descriptors = snapshot(module), threading.active_count(), open_files()
    calls = itertools.count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if step == "append" and next(calls) < 5:
            return real(*args, **kwargs)
        if step in ("attach", "put_away"):
            real(*args, **kwargs)
        raise error(**SpillFailed.example) if error is SpillFailed else error

    owner, name = {
        "SpillFile": (backing, step), "DiskReader": (backing, step), "append": (SpillFile, step),
        "flush": (backing.Backing, step), "attach": (offloading.PrefetchBackend, step),
    }.get(step, (offloading, step))  # fmt: skip
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(error):
        offload(module, ALL)
    monkeypatch.undo()
    assert same(snapshot(module), before)
    assert same(module(X), resident(X))
    gc.collect()
    assert (threading.active_count(), open_files()) == (threads, descriptors)
    with offload(module, ALL):
        assert same(module(X), resident(X))


# --- what is left behind ------------------------------------------------------------------------------------------


def test_a_module_works_without_its_handle() -> None:
    module, resident = stack(), stack()
    handle = weakref.ref(offload(module, ALL))
    gc.collect()
    assert handle() is None
    for _ in range(2):
        assert same(module(X), resident(X))


@pytest.mark.parametrize("config", [ALL, MAPPED])
@pytest.mark.parametrize("keep_handle", [False, True])
@pytest.mark.parametrize("make", [stack, lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])])
def test_a_module_that_is_dropped_takes_its_threads_and_its_file_along(
    make: Any, config: Any, keep_handle: bool
) -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), open_files()
    module = make()
    handle: Any = offload(module, config)
    module(X)
    assert open_files() > descriptors
    gone = weakref.ref(module)
    del module
    if keep_handle:
        assert gone() is handle.module
    del handle
    gc.collect()
    assert gone() is None
    assert (threading.active_count(), open_files()) == (threads, descriptors)


_CHILD = """
    import os, signal, sys, torch, headrace
    from torch import nn
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    handle = headrace.offload(module, headrace.OffloadConfig(prefetch={"offload_group_size": 1}))
    with torch.inference_mode():
        module(torch.ones(1, 64))
    assert handle.report().offloaded_bytes > 0
    print(handle._backing.disk_bytes, os.listdir(os.environ["TMPDIR"]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split(maxsplit=1)[1].strip() == "[]"  # it had no name while it was there, either
    assert list(tmp_path.iterdir()) == []


_FULL = """
    import resource, torch, headrace
    from torch import nn
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    before = [parameter.clone() for parameter in module.parameters()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        headrace.offload(module, headrace.OffloadConfig(prefetch={"offload_group_size": 1}))
    except headrace.HeadraceError as error:
        print(type(error).__name__, error)
    assert all(map(torch.equal, before, module.parameters()))
"""


@pytest.mark.slow
def test_no_space_for_the_file() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_FULL)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("SpillFailed Weights could not be spilled to"), done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert "TMPDIR=" in done.stdout


def test_the_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("### Any PyTorch module")[1]
    example = section.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    shape, figures = capsys.readouterr().out.splitlines()
    assert shape == "torch.Size([1, 1024])"
    assert int(figures.split()[0]) > 0
    assert len(torch.load("model.pt")) == 16


def test_public_names() -> None:
    assert headrace.offload is offload
    assert headrace.Handle is Handle
