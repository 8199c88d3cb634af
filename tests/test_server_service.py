"""A model that is opened with room for its requests, or refused with numbers that fit."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import tiny_models
import torch
from live_server import opened, options

from headrace import machine
from headrace.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidField,
    InvalidSetting,
    NoRoomForRequests,
    UnsupportedField,
    UnsupportedModel,
)
from headrace.linears import OneRowLinear
from headrace.server.options import ServeOptions
from headrace.server.service import Service, answer_seed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(
        tmp_path_factory.mktemp("models") / "m", "llama", torch.float32, max_position_embeddings=4096
    )


def flags(line: str) -> dict[str, object]:
    """`--max-num-seqs 4 --memory 3GiB` as fields of ServeOptions."""
    words = line.split()
    values = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    return {name: value if name == "memory" else int(value) for name, value in values.items()}


@pytest.mark.slow
def test_a_cache_that_does_not_fit_is_refused_with_numbers_that_do(directory: Path) -> None:
    """The cache of 64 requests of 4096 tokens takes 2 GiB here. Every line that the error names is tried."""
    asked = {"max_num_seqs": 64, "max_model_len": 4096}
    memory = f"{(machine.resident_bytes() + 1200 * 2**20) // 2**20}MiB"
    with pytest.raises(NoRoomForRequests) as refused, opened(directory, memory=memory, **asked):
        pass
    error = refused.value
    assert error.needed_bytes > error.memory_bytes
    assert len(error.fits) == 3
    for line in error.fits:
        gc.collect()  # of this process nothing else may count than what a new one would have
        assert planned_bytes(directory, **{"memory": memory, **asked, **flags(line)})


def planned_bytes(directory: Path, **changes: object) -> int:
    with opened(directory, **changes) as service:
        return service.report.plan.memory.total_bytes


def test_fast_rows_are_those_of_the_engine(tmp_path: Path) -> None:
    directory = tiny_models.shared(tmp_path, "llama")
    for fast in (True, False):
        with opened(directory, fast=fast) as service:
            kinds = {type(module) for module in service.engine.model.modules()}
            assert (OneRowLinear in kinds) == fast


def test_a_budget_that_is_too_small_for_anything_is_refused_as_always(directory: Path) -> None:
    from headrace.errors import BudgetTooSmall

    with pytest.raises(BudgetTooSmall), opened(directory, memory="1MiB"):
        pass


def test_a_model_that_cannot_be_batched_is_one_clear_error(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path / "m", "llama", torch.float32)
    tiny_models.edit_config(directory, layer_types=["chunked_attention"] * tiny_models.LAYERS)
    with pytest.raises(UnsupportedModel, match="chunked_attention"), opened(directory):
        pass


def test_longer_requests_than_the_model_allows_are_refused(directory: Path) -> None:
    with pytest.raises(InvalidSetting, match="at most 4096"), opened(directory, max_model_len=5000):
        pass


def test_the_length_is_the_model_s_or_the_usual_one(directory: Path, tmp_path: Path) -> None:
    with opened(directory, max_model_len=None) as service:
        assert service.model_len == 2048
    with opened(tiny_models.write(tmp_path / "m", "llama"), max_model_len=None) as service:
        assert service.model_len == 256


def test_prompts_become_tokens_or_one_clear_error(directory: Path) -> None:
    async def check(service: Service) -> None:
        assert await service.encode_text("the", "prompt") == service.tokenizer("the")["input_ids"]
        chat = await service.encode_chat([{"role": "user", "content": "the"}])
        assert len(chat) > 1
        with pytest.raises(InvalidField, match="no tokens"):
            await service.encode_text("", "prompt")
        with pytest.raises(InvalidField, match="cannot fit"):
            await service.encode_text("a" * 10_000, "prompt")
        with pytest.raises(InvalidField, match="template refuses"):
            await service.encode_chat([{"content": "the"}])
        with pytest.raises(UnsupportedField, match="tool calls"):
            await service.encode_chat([{"role": "user", "content": "the"}], [{"type": "function"}])
        service.tokenizer.chat_template = None
        with pytest.raises(UnsupportedField, match="no chat template"):
            await service.encode_chat([{"role": "user", "content": "the"}])
        with pytest.raises(InvalidField, match=f"has {tiny_models.VOCABULARY} tokens"):
            service.check_tokens([3, tiny_models.VOCABULARY], "prompt")
        assert service.answer_tokens([1] * 100, None, "messages") == 28
        assert service.answer_tokens([1] * 100, 28, "max_tokens") == 28
        for prompt, asked in (([1] * 100, 29), ([1] * 128, None)):
            with pytest.raises(ContextLengthExceeded):
                service.answer_tokens(prompt, asked, "max_tokens")

    with opened(directory) as service:
        asyncio.run(check(service))


def test_seeds_of_several_answers_differ() -> None:
    assert len({answer_seed(1, index) for index in range(100)} | {answer_seed(2, index) for index in range(100)}) == 200
    assert answer_seed(1, 0) == 1
    assert answer_seed(None, 0) != answer_seed(None, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"port": -1},
        {"max_num_seqs": 0},
        {"max_model_len": 1},
        {"max_num_batched_tokens": 3},
        {"block_size": 2},
        {"num_gpu_blocks_override": 1},
        {"max_waiting": -1},
        {"max_request_size": "7"},
        {"drain_timeout": -1.0},
        {"api_key": " "},
        {"kv_offload_gb": 1.0},
        {"memory": "3"},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(directory: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        options(directory, **change)


def test_the_name_is_the_last_part_of_the_path_unless_told() -> None:
    assert ServeOptions(model="/models/Llama-3").name == "Llama-3"
    assert ServeOptions(model="org/name").name == "name"
    assert ServeOptions(model="org/name", served_model_name="mine").name == "mine"
