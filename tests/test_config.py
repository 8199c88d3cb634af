"""One test per cell of the design's configuration table, and that every number we suggest is one that works."""

import json
import math
import os
import pickle
import shlex
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.options import OffloadFlags, spread_lists
from headrace.config import (
    OffloadConfig,
    OffloadConfigWarning,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
    matches,
    selected_layers,
)
from headrace.errors import (
    HeadraceError,
    InvalidOffloadConfig,
    InvalidSetting,
    NothingOffloaded,
)

pytestmark = pytest.mark.filterwarnings("error")

# No luck in tests: the same examples on every run.
always_the_same = settings(derandomize=True, database=None, deadline=None, max_examples=300)

UVA = {"cpu_offload_gb", "cpu_offload_params"}
CHANGED = {
    "offload_backend": "uva",
    "cpu_offload_gb": 4.0,
    "cpu_offload_params": {"experts"},
    "offload_group_size": 8,
    "offload_num_in_group": 2,
    "offload_prefetch_step": 3,
    "offload_params": {"mlp.up_proj"},
}


def build(**values: Any) -> OffloadConfig:
    """A config from flat field names, with warnings as they come."""
    backend = {"offload_backend": values.pop("offload_backend")} if "offload_backend" in values else {}
    uva = {name: values.pop(name) for name in list(values) if name in UVA}
    return OffloadConfig(**backend, uva=uva, prefetch=values)


def quiet(**values: Any) -> OffloadConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        return build(**values)


def from_flags(line: list[str]) -> OffloadConfig:
    """The config of a flag line, read without the command line's own parser."""
    lists = {"--cpu-offload-params", "--offload-params"}
    tokens = spread_lists(line, lists, lambda token: False)
    given: dict[str, Any] = {}
    for name, text in zip(tokens[::2], tokens[1::2], strict=True):
        field = name.removeprefix("--").replace("-", "_")
        if name in lists:
            given.setdefault(field, []).append(text)
        elif field == "offload_backend":
            given[field] = text
        else:
            given[field] = float(text) if field == "cpu_offload_gb" else int(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        return OffloadConfig.model_validate(OffloadFlags(**given)._nested())


# --- defaults and ranges ------------------------------------------------------------------------------------------


def test_defaults_offload_nothing() -> None:
    config = OffloadConfig()
    assert config.values() == {
        "offload_backend": "auto",
        "cpu_offload_gb": 0.0,
        "cpu_offload_params": frozenset(),
        "offload_group_size": 0,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
        "offload_params": frozenset(),
    }
    assert config.resolved_backend == "auto"
    assert config.to_flags() == []
    assert config.notes == ()


def test_flags_have_the_defaults_of_the_config() -> None:
    assert OffloadConfig.model_validate(OffloadFlags()._nested()) == OffloadConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offload_backend", "cuda"),
        ("offload_backend", None),
        ("offload_backend", "UVA"),
        *(
            ("cpu_offload_gb", value)
            for value in (-1, -0.5, math.nan, math.inf, True, "4", None, 1e-12, 2.0**31, 10**400)
        ),
        *(
            ("cpu_offload_params", value)
            for value in ("experts", [""], ["a*"], ["a..b"], [".a"], ["a b"], ["a,b"], [1], None)
        ),
        *(("offload_params", value) for value in ("experts", [""], ["a."], ["-a"], [b"a"], 3)),
        *(("offload_group_size", value) for value in (-1, True, "8", 4.0, math.nan, None)),
        *(("offload_num_in_group", value) for value in (0, -2, False, "1", 1.5)),
        *(("offload_prefetch_step", value) for value in (-1, True, "2", 1.0)),
    ],
)
def test_a_value_outside_of_its_range_is_refused_with_one_that_works(field: str, value: Any) -> None:
    with pytest.raises(InvalidSetting) as refused:
        build(**{field: value})
    flag = f"--{field.replace('_', '-')}"
    assert refused.value.setting == flag
    assert flag in refused.value.message
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        try:
            from_flags([flag, *refused.value.suggestion.split()])
        except NothingOffloaded:
            assert "params" in field or field == "offload_backend"  # the value works, and needs its other half


def test_a_suggested_group_size_fits_what_is_taken_out_of_a_group() -> None:
    with pytest.raises(InvalidSetting) as refused:
        build(offload_group_size=-1, offload_num_in_group=3)
    assert build(offload_group_size=int(refused.value.suggestion), offload_num_in_group=3)


def test_every_wrong_value_is_told_at_once() -> None:
    with pytest.raises(InvalidOffloadConfig) as refused:
        build(cpu_offload_gb=-4, offload_group_size=True, offload_num_in_group=0)
    assert [text.split()[0] for text in refused.value.problems] == [
        "--cpu-offload-gb",
        "--offload-group-size",
        "--offload-num-in-group",
    ]
    assert from_flags(shlex.split(refused.value.remedies[0]))


def test_whole_numbers_are_gib_too() -> None:
    assert build(cpu_offload_gb=4).uva.budget_bytes == 4 * 2**30
    assert build(cpu_offload_gb=0.5).uva.budget_bytes == 2**29
    assert math.copysign(1, UVAOffloadConfig(cpu_offload_gb=-0.0).cpu_offload_gb) == 1


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        OffloadConfig().offload_backend = "uva"  # type: ignore[misc]


# --- which backend ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "backend"),
    [
        ({}, "auto"),
        ({"cpu_offload_gb": 4}, "uva"),
        ({"offload_group_size": 4}, "prefetch"),
        ({"cpu_offload_gb": 4, "offload_group_size": 4}, "prefetch"),
        ({"offload_backend": "uva", "cpu_offload_gb": 4, "offload_group_size": 4}, "uva"),
        ({"offload_backend": "uva", "cpu_offload_gb": 4}, "uva"),
        ({"offload_backend": "prefetch", "offload_group_size": 4}, "prefetch"),
        ({"offload_backend": "prefetch", "offload_group_size": 4, "cpu_offload_gb": 4}, "prefetch"),
    ],
)
def test_resolved_backend(values: dict[str, Any], backend: str) -> None:
    assert quiet(**values).resolved_backend == backend


# --- rules between fields -----------------------------------------------------------------------------------------

TOO_MANY = "offload_num_in_group (8) must be <= offload_group_size (4)"
NO_STEP = "offload_prefetch_step (0) must be >= 1 when prefetch offloading is enabled (offload_group_size > 0)"


@pytest.mark.parametrize("backend", ["auto", "uva", "prefetch"])
def test_more_taken_than_the_group_has(backend: str) -> None:
    with pytest.raises(InvalidOffloadConfig) as refused:
        build(offload_backend=backend, cpu_offload_gb=1, offload_group_size=4, offload_num_in_group=8)
    assert refused.value.message.startswith(TOO_MANY)
    assert any("--offload-num-in-group 4" in line for line in refused.value.remedies)
    assert any("--offload-group-size 8" in line for line in refused.value.remedies)


@pytest.mark.parametrize("backend", ["auto", "prefetch"])
def test_no_step(backend: str) -> None:
    with pytest.raises(InvalidOffloadConfig) as refused:
        build(offload_backend=backend, offload_group_size=4, offload_prefetch_step=0)
    assert refused.value.message.startswith(NO_STEP)
    assert refused.value.remedies[0].endswith("--offload-group-size 4 --offload-prefetch-step 1")


def test_both_wrong_at_once_are_both_reported() -> None:
    with pytest.raises(InvalidOffloadConfig) as refused:
        build(offload_group_size=4, offload_num_in_group=8, offload_prefetch_step=0)
    first, second = refused.value.problems
    assert first.startswith(TOO_MANY)
    assert second.startswith(NO_STEP)
    assert refused.value.message.startswith(TOO_MANY)
    assert NO_STEP in refused.value.message


def test_prefetch_without_groups_has_the_message_of_vllm() -> None:
    with pytest.raises(InvalidOffloadConfig) as refused:
        build(offload_backend="prefetch")
    assert refused.value.message.startswith("offload_num_in_group (1) must be <= offload_group_size (0)")
    assert "--offload-backend prefetch --offload-group-size 4" in refused.value.remedies


def test_rules_of_prefetch_are_not_applied_while_it_is_off() -> None:
    with pytest.warns(OffloadConfigWarning):
        config = build(offload_num_in_group=8, offload_prefetch_step=0)
    assert config.resolved_backend == "auto"


def test_edges_that_are_allowed() -> None:
    assert build(offload_group_size=1)
    assert build(offload_group_size=4, offload_num_in_group=4)
    assert build(offload_group_size=4, offload_prefetch_step=99)


names = st.sets(st.sampled_from(["experts", "mlp.up_proj", "w13_weight"]), max_size=2)
requests = st.fixed_dictionaries(
    {},
    optional={
        "offload_backend": st.sampled_from(["auto", "uva", "prefetch"]),
        "cpu_offload_gb": st.one_of(st.floats(), st.integers(-2, 9)),
        "cpu_offload_params": names,
        "offload_group_size": st.integers(-2, 9),
        "offload_num_in_group": st.integers(-2, 9),
        "offload_prefetch_step": st.integers(-2, 9),
        "offload_params": names,
    },
)


@always_the_same
@given(requests)
def test_a_config_is_either_valid_or_refused_with_flags_that_are_valid(values: dict[str, Any]) -> None:
    try:
        config = quiet(**values)
    except InvalidOffloadConfig as error:
        # Values out of range are told before the rules between fields, so one of those may follow.
        ranges_only = all(problem.startswith("--") for problem in error.problems)
        for line in error.remedies if not ranges_only else ():
            assert from_flags(shlex.split(line)).to_flags()
    except NothingOffloaded as error:
        assert from_flags(shlex.split(error.suggestion)).to_flags()
    except InvalidSetting as error:
        assert error.suggestion
    else:
        assert from_flags(config.to_flags()) == config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadConfigWarning)
            assert OffloadConfig.model_validate_json(config.model_dump_json()) == config


# --- zero is not silence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "request_text"),
    [
        ({"cpu_offload_params": {"experts"}}, "--cpu-offload-params experts"),
        ({"offload_params": {"experts"}}, "--offload-params experts"),
        ({"cpu_offload_params": {"a"}, "offload_params": {"b"}}, "--cpu-offload-params a"),
        ({"offload_backend": "uva"}, "--offload-backend uva"),
        ({"offload_backend": "uva", "cpu_offload_params": {"a"}}, "--offload-backend uva --cpu-offload-params a"),
        ({"offload_backend": "uva", "offload_group_size": 4}, "--offload-backend uva"),
    ],
)
def test_a_request_that_offloads_nothing_is_an_error(values: dict[str, Any], request_text: str) -> None:
    with pytest.raises(NothingOffloaded) as refused:
        build(**values)
    assert refused.value.request == request_text
    assert from_flags(shlex.split(refused.value.suggestion)).resolved_backend in ("uva", "prefetch")


def test_nothing_offloaded_is_told_together_with_a_contradiction() -> None:
    with pytest.raises(InvalidOffloadConfig) as refused:
        build(offload_backend="uva", offload_group_size=4, offload_num_in_group=8)
    assert len(refused.value.problems) == 2
    assert all("--cpu-offload-gb 4" in line for line in refused.value.remedies)


# --- warnings -----------------------------------------------------------------------------------------------------

PREFETCH_SET = {
    "offload_group_size": 4,
    "offload_num_in_group": 2,
    "offload_prefetch_step": 2,
    "offload_params": {"a"},
}


@pytest.mark.parametrize(
    ("values", "begins", "named"),
    [
        *(
            ({"offload_backend": "uva", "cpu_offload_gb": 1, "offload_group_size": 4, name: value},
             "Prefetch settings will be ignored", name)
            for name, value in PREFETCH_SET.items()
        ),
        ({"cpu_offload_gb": 1, "offload_params": {"a"}}, "Prefetch settings will be ignored", "offload_params"),
        ({"cpu_offload_gb": 1, "offload_num_in_group": 2}, "Prefetch settings will be ignored", "offload_num_in_group"),
        ({"offload_backend": "prefetch", "offload_group_size": 4, "cpu_offload_gb": 1},
         "UVA settings will be ignored", "cpu_offload_gb"),
        ({"offload_backend": "prefetch", "offload_group_size": 4, "cpu_offload_params": {"a"}},
         "UVA settings will be ignored", "cpu_offload_params"),
        ({"offload_group_size": 4, "cpu_offload_params": {"a"}}, "UVA settings will be ignored", "cpu_offload_params"),
        ({"offload_group_size": 4, "cpu_offload_gb": 1},
         "Both UVA and prefetch offload fields are set", "cpu_offload_gb"),
        ({"offload_group_size": 4, "cpu_offload_gb": 1, "cpu_offload_params": {"a"}},
         "Both UVA and prefetch offload fields are set", "cpu_offload_params"),
        ({"offload_num_in_group": 2}, "Prefetch settings will be ignored", "offload_num_in_group"),
        ({"offload_prefetch_step": 0}, "Prefetch settings will be ignored", "offload_prefetch_step"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_warned_about_by_name(values: dict[str, Any], begins: str, named: str) -> None:
    with pytest.warns(OffloadConfigWarning) as told:
        config = build(**values)
    assert [str(each.message) for each in told] == list(config.notes)
    assert config.notes[0].startswith(begins)
    assert named in config.notes[0].partition("ignored")[2]


def test_auto_with_both_families_says_that_prefetch_wins() -> None:
    with pytest.warns(OffloadConfigWarning, match="Prefetch backend will be selected"):
        assert build(offload_group_size=4, cpu_offload_gb=1).resolved_backend == "prefetch"


def test_the_warning_points_at_the_line_that_asked() -> None:
    with pytest.warns(OffloadConfigWarning) as told:
        OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1), prefetch=PrefetchOffloadConfig(offload_group_size=4))
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "values",
    [
        {"cpu_offload_gb": 1, "cpu_offload_params": {"a"}},
        {"offload_backend": "uva", "cpu_offload_gb": 1, "cpu_offload_params": {"a"}},
        PREFETCH_SET,
        {"offload_backend": "prefetch", **PREFETCH_SET},
    ],
)
def test_settings_with_effect_are_not_warned_about(values: dict[str, Any]) -> None:
    assert build(**values).notes == ()


# --- what is selected ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selectors", "name", "expected"),
    [
        ({"experts.w2_weight"}, "mlp.experts.w2_weight", True),
        ({"w2"}, "mlp.experts.w2_weight", False),
        ({"w2_weight"}, "mlp.experts.w2_weight", True),
        ({"mlp"}, "mlp.experts.w2_weight", True),
        ({"mlp.w2_weight"}, "mlp.experts.w2_weight", False),
        ({"mlp.experts.w2_weight"}, "mlp.experts.w2_weight", True),
        ({"mlp.experts.w2_weight.x"}, "mlp.experts.w2_weight", False),
        ({"x", "experts"}, "mlp.experts.w2_weight", True),
        (set(), "mlp.experts.w2_weight", True),
    ],
)
def test_matches_whole_segments(selectors: set[str], name: str, expected: bool) -> None:
    assert matches(frozenset(selectors), name) is expected


@pytest.mark.parametrize(
    ("count", "size", "taken", "expected"),
    [
        (8, 4, 2, [2, 3, 6, 7]),
        (28, 8, 1, [7, 15, 23]),
        (61, 8, 2, [6, 7, 14, 15, 22, 23, 30, 31, 38, 39, 46, 47, 54, 55]),
        (32, 1, 1, list(range(32))),
        (5, 8, 4, [4]),
        (32, 100, 1, []),
        (32, 0, 1, []),
        (0, 4, 1, []),
    ],
)
def test_selected_layers(count: int, size: int, taken: int, expected: list[int]) -> None:
    assert selected_layers(count, size, taken) == expected


# --- hash, pickle, JSON, flags ------------------------------------------------------------------------------------


def test_the_hash_covers_every_field() -> None:
    assert set(CHANGED) == set(OffloadConfig().values())
    base = {name: value for name, value in CHANGED.items() if name != "offload_backend"}
    hashes = {quiet(**base).compute_hash()}
    for name in CHANGED:
        varied = {**base, name: CHANGED[name]} if name == "offload_backend" else {**base, name: _another(base[name])}
        hashes.add(quiet(**varied).compute_hash())
    assert len(hashes) == 1 + len(CHANGED)
    assert all(len(text) == 64 and int(text, 16) for text in hashes)


def _another(value: Any) -> Any:
    return {*value, "other"} if isinstance(value, set) else value + 1


def test_equal_configs_have_equal_hashes_in_every_process() -> None:
    config = build(cpu_offload_gb=1, cpu_offload_params={"a", "b", "c", "d"})
    code = (
        "from headrace.config import OffloadConfig\n"
        "print(OffloadConfig(uva=dict(cpu_offload_gb=1.0, cpu_offload_params=list('dcba'))).compute_hash())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == config.compute_hash()


def test_pickle_to_another_process() -> None:
    config = quiet(**{**CHANGED, "offload_backend": "prefetch"})
    assert pickle.loads(pickle.dumps(config)) == config
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).compute_hash())"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, check=True)
    assert done.stdout.decode().strip() == config.compute_hash()
    assert done.stderr == b""  # what was warned about once is not warned about again


@pytest.mark.parametrize("values", [{}, CHANGED])
def test_json_round_trip(values: dict[str, Any]) -> None:
    config = quiet(**values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        assert OffloadConfig.model_validate_json(config.model_dump_json()) == config
        assert OffloadConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
        assert OffloadConfig(**config.model_dump()) == config


def test_configs_are_hashable() -> None:
    assert len({build(cpu_offload_gb=1), build(cpu_offload_gb=1.0), build(cpu_offload_gb=2)}) == 2


def test_errors_survive_pickling() -> None:
    with pytest.raises(HeadraceError) as refused:
        build(offload_group_size=4, offload_num_in_group=8)
    assert pickle.loads(pickle.dumps(refused.value)).message == refused.value.message


def test_to_flags_has_what_is_not_default() -> None:
    config = build(offload_backend="prefetch", offload_group_size=8, offload_params={"b", "a"})
    assert config.to_flags() == [
        "--offload-backend",
        "prefetch",
        "--offload-group-size",
        "8",
        "--offload-params",
        "a",
        "b",
    ]
    assert build(cpu_offload_gb=0.5).to_flags() == ["--cpu-offload-gb", "0.5"]
    assert build(cpu_offload_gb=4).to_flags() == ["--cpu-offload-gb", "4"]
