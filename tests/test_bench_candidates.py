"""Who is measured, and why the others are not."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from headrace.bench import candidates
from headrace.bench.candidates import HEADRACE, NAMES, PEERS, choose
from headrace.errors import InvalidSetting

SIZES = (5 * 2**30, 3 * 2**30)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and vllm are, whatever is here."""
    monkeypatch.setattr(candidates, "_installed", lambda package, python: package in ("transformers", "vllm"))


def test_those_that_are_installed_run_and_the_others_say_why() -> None:
    chosen = choose((), {}, 16, SIZES)
    assert [candidate.name for candidate in chosen.run] == ["headrace", "mapped"]
    assert chosen.left_out["airllm"] == "not installed"
    assert chosen.left_out["llama.cpp-plain"] == "has no 16-bit weights of this kind"
    assert chosen.left_out["vllm"].startswith("does not fit")
    assert chosen.left_out.keys() | {candidate.name for candidate in chosen.run} == {*NAMES, "headrace"}


def test_what_must_fit_runs_where_it_does() -> None:
    assert "vllm" not in choose((), {}, 16, (2**30, 3 * 2**30)).left_out
    assert "vllm" not in choose((), {}, 16, (2**30, None)).left_out


def test_of_the_peers_only_those_that_were_named() -> None:
    chosen = choose(("mapped", "airllm"), {}, 16, SIZES)
    assert [candidate.name for candidate in chosen.run] == ["headrace", "mapped"]
    assert chosen.left_out == {"airllm": "not installed"}


def test_few_bits_are_for_those_that_have_them() -> None:
    chosen = choose((), {}, 4, SIZES)
    assert list(chosen.run) == [HEADRACE]
    assert "has no 4-bit weights" in chosen.left_out["mapped"]
    assert chosen.left_out["llama.cpp"] == "not installed"


@pytest.mark.parametrize(("names", "pythons"), [(("lama.cpp",), {}), ((), {"lama.cpp": "python"})])
def test_a_typo_is_told_with_the_nearest(names: tuple[str, ...], pythons: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match=r"Use --peer\S* llama\.cpp"):
        candidates.check(names, pythons)


def test_headrace_alone_can_be_asked_for() -> None:
    candidates.check(("headrace",), {})
    assert list(choose(("headrace",), {}, 16, SIZES).run) == [HEADRACE]


def test_a_python_of_another_environment_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert candidates._installed("json", str(link))
    assert not candidates._installed("no_such_package", str(link))
    with pytest.raises(InvalidSetting, match="--peer-python"):
        candidates.check((), {"vllm": str(tmp_path / "missing")})


def test_every_candidate_has_a_run_of_its_own_name() -> None:
    from headrace.bench import worker

    assert {"reader", HEADRACE.name, *NAMES} == worker.RUNS.keys()
    assert len({dataclasses.astuple(peer) for peer in PEERS}) == len(PEERS)
