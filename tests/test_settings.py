"""Wrong settings come out as our errors at every way in, and sizes that are no sizes name one that is."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import OffloadConfig, UVAOffloadConfig
from headrace.errors import ConfigError, InvalidSetting, InvalidSize, UnknownSetting
from headrace.settings import parse_size

# No luck in tests: the same examples on every run.
always_the_same = settings(derandomize=True, database=None, deadline=None, max_examples=300)


def test_errors_are_value_errors_and_not_pydantics() -> None:
    for wrong in ({"offload_backend": "x"}, {"nonsense": 1}, {"uva": None}, {"uva": 3}, {"prefetch": {"x": 1}}):
        with pytest.raises(ConfigError) as refused:
            OffloadConfig(**wrong)
        assert isinstance(refused.value, ValueError)
        assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "wrong", [lambda: OffloadConfig.model_validate("x"), lambda: OffloadConfig.model_validate_json("{"),
              lambda: OffloadConfig.model_validate_json('{"uva": {"cpu_offload_gb": -1}}'),
              lambda: OffloadConfig.model_validate({"prefetch": {"offload_num_in_group": 0}}),
              lambda: OffloadConfig.model_validate_strings({"uva": {"cpu_offload_gb": "x"}}),
              lambda: UVAOffloadConfig.model_validate({"cpu_offload_gb": "x"})]
)  # fmt: skip
def test_every_way_in_raises_our_errors(wrong: Any) -> None:
    with pytest.raises(InvalidSetting):
        wrong()


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ({"offload_backand": "uva"}, "offload_backend"),
        ({"cpu_offload_gb": 4}, "uva.cpu_offload_gb"),
        ({"offload_groupsize": 4}, "prefetch.offload_group_size"),
        ({"uva": {"cpu_ofload_gb": 4}}, "cpu_offload_gb"),
        ({"prefetch": {"offload_step": 4, "offload_group_size": -1}}, "offload_prefetch_step"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(wrong: dict[str, Any], nearest: str) -> None:
    with pytest.raises(UnknownSetting) as refused:
        OffloadConfig(**wrong)
    assert refused.value.nearest == nearest
    assert nearest in refused.value.known


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("3GiB", 3 * 2**30),
        ("3GB", 3 * 10**9),
        ("512MiB", 512 * 2**20),
        (" 1.5 gib ", 3 * 2**29),
        ("2tib", 2 * 2**40),
        ("100 B", 100),
        ("64kB", 64_000),
        ("64KiB", 65_536),
        (1, 1),
        (3 * 2**30, 3 * 2**30),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "reason", "suggestion"),
    [
        ("3", "no unit", "3GiB"),
        ("0.5", "no unit", "0.5GiB"),
        ("4096", "no unit", "4096MiB"),
        ("3221225472", "no unit", "3GiB"),
        ("-3GiB", "negative", "3GiB"),
        ("-3", "negative", "3GiB"),
        ("0", "zero", "3GiB"),
        ("0GiB", "zero", "3GiB"),
        ("3G", "ambiguous", "3GiB"),
        ("3g", "ambiguous", "3GiB"),
        ("512M", "ambiguous", "512MiB"),
        ("3XB", "no unit 'XB'", "3GiB"),
        ("3Gi", "no unit 'Gi'", "3GiB"),
        ("abc", "not a number with a unit", "3GiB"),
        ("nan", "not a number with a unit", "3GiB"),
        ("1e9", "not a number with a unit", "3GiB"),
        ("1,5GiB", "not a number with a unit", "3GiB"),
        ("", "empty", "3GiB"),
        ("  ", "empty", "3GiB"),
        ("0.0001B", "less than one byte", "3GiB"),
        ("0.0000000001", "no unit", "3GiB"),
        ("2000000TiB", "no machine", "3GiB"),
        ("9" * 400 + "GiB", "no machine", "3GiB"),
        (0, "zero", "3GiB"),
        (2**61, "no machine", "3GiB"),
        (-(2**70), "negative", "3GiB"),
        (-(2**31), "negative", "2GiB"),
        (True, "neither text", "3GiB"),
        (3.5, "neither text", "3GiB"),
        (None, "neither text", "3GiB"),
    ],
)
def test_what_is_no_size_is_refused_with_one_that_is(text: Any, reason: str, suggestion: str) -> None:
    with pytest.raises(InvalidSize) as refused:
        parse_size(text, setting="--host-memory")
    assert reason in refused.value.reason
    assert refused.value.suggestion == suggestion
    assert "--host-memory" in refused.value.message
    assert parse_size(refused.value.suggestion) > 0


@always_the_same
@given(
    st.one_of(st.text(), st.integers(), st.floats().map(str), st.from_regex(r"\A-?\d+(\.\d+)? ?[kKmMgGtT]?i?[bB]?\Z"))
)
def test_a_size_is_either_read_or_refused(text: str | int) -> None:
    try:
        assert parse_size(text) >= 1
    except InvalidSize as error:
        assert parse_size(error.suggestion) >= 1
