"""Many requests in one batch: each as if it were alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fakes import one_thread
from live_server import is_idle, opened, wait_until

from headrace.batching.batcher import CacheSize
from headrace.batching.sampling import SamplingParams
from headrace.errors import GenerationFailed, HeadraceError, InvalidSetting, NotReady, ReadError
from headrace.server.service import Service

GREEDY = SamplingParams(temperature=0)
NO_END: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


async def read(generation: Any) -> list[int]:
    return [token async for token, _ in generation]


def ask(service: Service, prompts: Sequence[Sequence[int]], tokens: int, params: Any = GREEDY) -> list[list[int]]:
    """All prompts at once; `params` for all of them, or one for each."""

    async def together() -> list[list[int]]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        generations = [
            service.batcher.submit(prompt, chosen, tokens, NO_END) for prompt, chosen in zip(prompts, each, strict=True)
        ]
        return await asyncio.gather(*map(read, generations))

    return asyncio.run(together())


def prompts_of(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    chosen = random.Random(seed)
    return [[chosen.randrange(3, tiny_models.VOCABULARY) for _ in range(length)] for length in lengths]


LENGTHS = (1, 7, 16, 17, 40, 3, 33)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3", "qwen3-moe"])
def test_greedy_answers_of_a_mixed_batch_are_those_of_generate(root: Path, architecture: str) -> None:
    """In float32, where no two logits tie: the same tokens, bit for bit the same choice at every step."""
    directory = tiny_models.shared(root, architecture, torch.float32)
    plain = tiny_models.plain(directory, torch.float32)
    prompts = prompts_of(LENGTHS)
    with opened(directory, share=0.5) as service:
        assert service.report.offloaded_bytes > 0
        together = ask(service, prompts, 12)
        alone = [ask(service, [prompt], 12)[0] for prompt in prompts]
    assert together == alone
    for prompt, answer in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        expected = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=12,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_in_bfloat16_a_batch_differs_from_one_request_only_where_two_tokens_tie(root: Path) -> None:
    """A product over many rows sums in another order than one over a single row. Up to the first difference the tokens
    are equal, and there the two candidates' logits are as near as two of bfloat16's steps (2 x 2**-8 of their size)."""
    directory = tiny_models.shared(root, "llama")
    plain = tiny_models.plain(directory)
    prompts = prompts_of(LENGTHS, seed=2)
    with opened(directory, share=0.5) as service:
        together = ask(service, prompts, 24)
        alone = [ask(service, [prompt], 24)[0] for prompt in prompts]
    for prompt, one, many in zip(prompts, alone, together, strict=True):
        at = next((index for index in range(24) if one[index] != many[index]), None)
        if at is not None:
            logits = plain(input_ids=torch.tensor([prompt + one[:at]])).logits[0, -1].float()
            gap = abs(float(logits[one[at]] - logits[many[at]]))
            assert gap <= 2**-7 * float(logits.abs().max()), (at, gap)


def test_what_is_sampled_depends_on_the_seed_and_not_on_the_batch(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)
    prompts = prompts_of((5, 9, 30, 12))
    params = [SamplingParams(temperature=1.3, top_p=0.9, top_k=50, seed=seed) for seed in (1, 2, 3, 1)]
    with opened(directory) as service:
        together = ask(service, prompts, 8, params)
        alone = [ask(service, [prompt], 8, one)[0] for prompt, one in zip(prompts, params, strict=True)]
        other = ask(service, [prompts[0]], 8, SamplingParams(temperature=1.3, seed=9))[0]
    assert together == alone
    assert other != alone[0]


@pytest.mark.slow
def test_when_the_cache_is_full_requests_wait_and_lose_nothing(root: Path) -> None:
    """Ten blocks of 16 tokens for four requests that take up to five each."""
    directory = tiny_models.shared(root, "llama", torch.float32)
    prompts = prompts_of((20, 25, 30, 35, 33, 28), seed=3)
    with opened(directory) as service:
        expected = ask(service, prompts, 40)
    with opened(directory, num_gpu_blocks_override=10) as service:
        assert service.batcher.statistics().kv_blocks == 10
        assert ask(service, prompts, 40) == expected
        wait_until(lambda: is_idle(service))


def test_prompts_that_begin_alike_share_their_blocks(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)
    prompt = prompts_of((50,))[0]
    with opened(directory) as service:
        seen: list[int] = []
        service.batcher._manager.on_pass = lambda prefill, decoding, seconds, failure: seen.append(prefill)
        first = ask(service, [prompt], 2)
        second = ask(service, [prompt], 2)
        wait_until(lambda: is_idle(service))
        assert service.batcher.statistics().kv_blocks_cached == 3
    assert first == second
    assert [tokens for tokens in seen if tokens] == [50, 2]


@pytest.mark.slow
def test_cancelled_requests_give_their_blocks_back_and_disturb_nobody(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)
    prompts = prompts_of((20, 20, 20, 20, 20, 20, 20, 20), seed=4)

    async def cancel_every_other(service: Service) -> list[list[int]]:
        generations = [service.batcher.submit(prompt, GREEDY, 30, NO_END) for prompt in prompts]
        for generation in generations[::2]:
            await anext(aiter(generation))
            generation.cancel()
            generation.cancel()
        return await asyncio.gather(*map(read, generations[1::2]))

    with opened(directory) as service:
        expected = ask(service, prompts[1::2], 30)
        assert asyncio.run(cancel_every_other(service)) == expected
        wait_until(lambda: is_idle(service))


def test_a_request_that_is_cancelled_before_it_is_seen_never_runs_to_its_end(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)

    async def at_once(service: Service) -> None:
        for prompt in prompts_of((10,) * 20):
            service.batcher.submit(prompt, GREEDY, 100, NO_END).cancel()

    with opened(directory) as service:
        asyncio.run(at_once(service))
        wait_until(lambda: is_idle(service))
        assert service.batcher.passes < 200


class Failing:
    """Breaks the next so many passes, as a disk would."""

    def __init__(self, service: Service, error: Exception) -> None:
        self.left = 0
        self._error = error
        model = service.engine.model
        forward = model.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                raise self._error
            return forward(*args, **kwargs)

        model.forward = run


READ_ERROR = ReadError(file="model.safetensors", offset=0, nbytes=1, reason="Input/output error")


async def outcome(generation: Any) -> list[int] | HeadraceError:
    try:
        return await read(generation)
    except HeadraceError as error:
        return error


def test_a_pass_that_fails_fails_its_own_requests_with_the_one_right_error(root: Path) -> None:
    """Two requests are part of it, three wait behind them and go on."""
    directory = tiny_models.shared(root, "llama", torch.float32)
    prompts = prompts_of((10, 11, 12, 13, 14), seed=5)

    async def with_a_failure(service: Service, failing: Failing) -> list[Any]:
        generations = [service.batcher.submit(prompt, GREEDY, 10, NO_END) for prompt in prompts]
        first = aiter(generations[0])
        await anext(first)
        failing.left = 1
        rest = [asyncio.ensure_future(outcome(generation)) for generation in generations[1:]]
        with pytest.raises(ReadError):
            async for _ in first:
                pass
        return await asyncio.gather(*rest)

    with opened(directory, max_num_seqs=2) as service:
        expected = ask(service, prompts[2:], 10)
        second, *others = asyncio.run(with_a_failure(service, Failing(service, READ_ERROR)))
        assert isinstance(second, ReadError)
        assert second.facts == READ_ERROR.facts
        assert others == expected
        assert service.batcher.trouble() is None
        assert service.batcher.failed_passes == 1
        wait_until(lambda: is_idle(service))


def test_a_disk_that_is_gone_for_good_is_told_and_one_that_comes_back_too(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)

    async def one(service: Service) -> Any:
        return await outcome(service.batcher.submit([5, 6, 7], GREEDY, 4, NO_END))

    with opened(directory) as service:
        failing = Failing(service, READ_ERROR)
        failing.left = 3
        for _ in range(3):
            assert service.batcher.trouble() is None
            assert isinstance(asyncio.run(one(service)), ReadError)
        trouble = service.batcher.trouble()
        assert trouble is not None
        assert "Input/output error" in trouble
        assert service.batcher.alive
        assert len(asyncio.run(one(service))) == 4
        assert service.batcher.trouble() is None


def test_an_error_that_nobody_foresaw_is_told_by_its_kind_alone(root: Path) -> None:
    """Its text may quote what somebody else has asked."""
    directory = tiny_models.shared(root, "llama", torch.float32)

    async def one(service: Service) -> Any:
        return await outcome(service.batcher.submit([5, 6, 7], GREEDY, 4, NO_END))

    with opened(directory) as service:
        Failing(service, RuntimeError("secret")).left = 1
        error = asyncio.run(one(service))
        assert isinstance(error, GenerationFailed)
        assert error.reason == "RuntimeError"


def test_logits_that_are_no_numbers_fail_one_request_and_not_its_batch(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)
    prompts = prompts_of((5, 9), seed=6)

    async def one_broken(service: Service) -> list[Any]:
        generations = [service.batcher.submit(prompt, GREEDY, 6, NO_END) for prompt in prompts]
        generations[0].row._penalized = lambda scores: scores * torch.nan  # type: ignore[method-assign]
        return await asyncio.gather(*map(outcome, generations))

    with opened(directory) as service:
        expected = ask(service, [prompts[1]], 6)[0]
        broken, fine = asyncio.run(one_broken(service))
        assert isinstance(broken, GenerationFailed)
        assert "not numbers" in broken.reason
        assert fine == expected
        wait_until(lambda: is_idle(service))


def test_closing_fails_what_is_left_and_refuses_what_comes(root: Path) -> None:
    directory = tiny_models.shared(root, "llama", torch.float32)

    async def close_in_between(service: Service) -> Any:
        generation = service.batcher.submit([5, 6, 7], GREEDY, 100, NO_END)
        await anext(aiter(generation))
        service.batcher.close()
        service.batcher.close()
        with pytest.raises(NotReady):
            service.batcher.submit([5], GREEDY, 4, NO_END)
        return await outcome(generation)

    with opened(directory) as service:
        assert isinstance(asyncio.run(close_in_between(service)), NotReady)
        assert not service.batcher.alive


def test_the_planned_cache_has_room_for_every_request_and_pads_nothing() -> None:
    size = CacheSize.planned(num_seqs=3, model_len=100, batched_tokens=1024, block_size=16)
    assert (size.num_blocks, size.batched_tokens, size.reserved) == (21, 300, True)
    config = size.config()
    assert (config.page_size, config.max_batch_tokens, config.max_requests_per_batch) == (16, 300, 3)
    assert config.use_cuda_graph is False
    assert config.q_padding_interval_size == config.kv_padding_interval_size == 0
    smaller = CacheSize.planned(3, 100, 1024, 16, num_blocks=10)
    assert (smaller.num_blocks, smaller.reserved) == (10, False)
    with pytest.raises(InvalidSetting, match="at least 7"):
        CacheSize.planned(3, 100, 1024, 16, num_blocks=6)
