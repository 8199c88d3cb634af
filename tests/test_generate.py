"""transformers' generation on streamed weights, and the answer that is streamed, timed and stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small_matrices
from tiny_models import EOS, PAD, ids, plain, shared, write_tokenizer
from transformers import AutoTokenizer

from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.engine import Engine
from headrace.generate import Answer, Sampling, encode, generate
from headrace.model import load_tokenizer

pytestmark = pytest.mark.slow

BACKENDS: dict[str, dict[str, Any]] = {
    "memory": {"weights_share": 0.5},
    "groups": {"offload": OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=3, offload_num_in_group=2))},
    "uva": {"offload": OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1.0))},
}


@pytest.fixture(scope="module", autouse=True)
def _small_matrices() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3-moe"])
def directory(root: Path, request: pytest.FixtureRequest) -> Path:
    return shared(root, request.param)


@pytest.fixture(scope="module")
def resident(directory: Path) -> Any:
    return plain(directory)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(directory: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.open(directory, **BACKENDS[request.param]) as engine:
        yield engine


@pytest.fixture
def streamed(engine: Engine) -> Iterator[Any]:
    """The model, and afterwards a look whether anything moved."""
    before = engine.report().counters
    yield engine.model
    report = engine.report()
    assert report.offloaded_bytes > 0
    assert report.counters.read_bytes > before.read_bytes
    assert report.counters.blocks_run > before.blocks_run
    assert report.counters.slot_misses == 0
    if report.backend == "prefetch":
        engine._backend.schedule.check_integrity()


def padded() -> dict[str, torch.Tensor]:
    prompt, mask = ids(3, 10, seed=5), torch.ones(3, 10, dtype=torch.long)
    for row, padding in enumerate((0, 3, 6)):
        prompt[row, :padding], mask[row, :padding] = PAD, 0
    return {"input_ids": prompt, "attention_mask": mask}


def one(length: int = 9, seed: int = 5) -> dict[str, torch.Tensor]:
    prompt = ids(1, length, seed=seed)
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


# --- generate works unchanged -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 40},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 8},
    ],
    ids=["greedy", "no cache", "sampling", "beams", "sampled beams", "penalty"],
)
@pytest.mark.parametrize("batch", ["one", "padded batch"])
def test_the_same_tokens(streamed: Any, resident: Any, batch: str, arguments: dict[str, Any]) -> None:
    made = []
    for model in (streamed, resident):
        torch.manual_seed(11)
        made.append(model.generate(**(one() if batch == "one" else padded()), max_new_tokens=8, **arguments))
    assert torch.equal(*made)


def test_scores_are_the_same_bits(streamed: Any, resident: Any) -> None:
    arguments = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (model.generate(**padded(), **arguments) for model in (streamed, resident))
    assert len(ours.logits) == len(theirs.logits) > 1
    assert all(torch.equal(left, right) for left, right in zip(ours.logits, theirs.logits, strict=True))


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_the_cache_goes_on_in_the_next_call(streamed: Any, resident: Any, keyword: str) -> None:
    made = []
    for model in (streamed, resident):
        arguments = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        output = model.generate(**one(), **arguments)
        turns = [output.sequences]
        for seed in (21, 22):  # a chat: what was said, and one more question
            text = torch.cat([output.sequences, ids(1, 5, seed=seed)], dim=1)
            arguments |= {"attention_mask": torch.ones_like(text), keyword: output.cache}
            if keyword == "cache":
                output = model.generate(input_ids=text, **arguments)
            else:  # the name that most code uses still, and transformers says so
                with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
                    output = model.generate(input_ids=text, **arguments)
            turns.append(output.sequences)
        made.append(turns)
    assert made[0][-1].shape[1] == 9 + 4 + 5 + 4 + 5 + 4
    assert all(torch.equal(left, right) for left, right in zip(*made, strict=True))


def test_generate_after_generate_and_after_a_failed_one(streamed: Any, resident: Any) -> None:
    arguments = {"max_new_tokens": 6, "do_sample": False}
    first = streamed.generate(**one(), **arguments)
    with pytest.raises((ValueError, IndexError)):
        streamed.generate(input_ids=torch.tensor([[3, 10**6]]), **arguments)
    streamed.generate(**one(seed=6), **arguments)
    assert torch.equal(streamed.generate(**one(), **arguments), first)
    assert torch.equal(resident.generate(**one(), **arguments), first)


# --- Sampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {"max_new_tokens": 256}),
        (
            Sampling(max_tokens=3, temperature=0),
            {"max_new_tokens": 3, "do_sample": False, "temperature": None, "top_p": None, "top_k": None},
        ),
        (
            Sampling(temperature=0.0, top_p=0.5, seed=1),
            {"max_new_tokens": 256, "do_sample": False, "temperature": None, "top_p": None, "top_k": None},
        ),
        (Sampling(temperature=0.5), {"max_new_tokens": 256, "do_sample": True, "temperature": 0.5}),
        (Sampling(top_p=0.5), {"max_new_tokens": 256, "do_sample": True, "top_p": 0.5}),
        (
            Sampling(temperature=2, top_p=0.5, seed=4),
            {"max_new_tokens": 256, "do_sample": True, "temperature": 2, "top_p": 0.5},
        ),
    ],
)
def test_sampling_becomes_arguments(sampling: Sampling, expected: dict[str, Any]) -> None:
    assert sampling.arguments() == expected


# --- the answer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(root: Path) -> Iterator[Engine]:
    with Engine.open(shared(root, "llama"), weights_share=0.5) as engine:
        assert engine.report().offloaded_bytes > 0
        yield engine


def ask(engine: Engine, sampling: Sampling, text: str = "the weights", **arguments: Any) -> Answer:
    prompt = encode(engine.tokenizer, [{"role": "user", "content": text}], raw=True)
    return generate(engine.model, engine.tokenizer, prompt, sampling, **arguments)


@pytest.mark.parametrize("sampling", [Sampling(12, 0), Sampling(12, 1.0, seed=3), Sampling(12, 0.8, 0.9, seed=4)])
def test_the_streamed_text_is_the_decoded_tokens(llama: Engine, sampling: Sampling) -> None:
    pieces: list[str] = []
    ticks: list[int] = []
    answer = ask(llama, sampling, on_text=pieces.append, on_token=lambda: ticks.append(len(pieces)))
    assert answer.text == "".join(pieces)
    assert answer.text == llama.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert "" not in pieces
    assert len(answer.token_ids) == len(ticks) == len(answer.decode_seconds) + 1 <= 12
    assert answer.prompt_tokens == len(llama.tokenizer("the weights").input_ids)
    assert answer.seconds_to_first_token > 0
    assert all(seconds > 0 for seconds in answer.decode_seconds)
    assert answer.stopped is False
    assert answer.seconds_per_token is not None
    assert min(answer.decode_seconds) <= answer.seconds_per_token <= max(answer.decode_seconds)
    assert answer.tokens_per_s == pytest.approx(len(answer.decode_seconds) / sum(answer.decode_seconds))


def test_the_answer_is_the_one_of_generate(root: Path, llama: Engine) -> None:
    answer = ask(llama, Sampling(10, 0))
    prompt = llama.tokenizer("the weights", return_tensors="pt")
    expected = plain(shared(root, "llama")).generate(**prompt, max_new_tokens=10, do_sample=False)
    assert list(answer.token_ids) == expected[0, prompt.input_ids.shape[1] :].tolist()


def test_the_seed_decides(llama: Engine) -> None:
    hot = [ask(llama, Sampling(10, 1.5, seed=seed)).token_ids for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_one_token_has_no_time_between_tokens(llama: Engine) -> None:
    answer = ask(llama, Sampling(1, 0))
    assert len(answer.token_ids) == 1
    assert answer.decode_seconds == ()
    assert answer.seconds_per_token is None
    assert answer.tokens_per_s is None


def test_stop_ends_the_answer(llama: Engine) -> None:
    whole = ask(llama, Sampling(12, 0))
    stop = threading.Event()
    count: list[int] = []

    def tick() -> None:
        count.append(1)
        if len(count) == 3:
            stop.set()

    answer = ask(llama, Sampling(12, 0), on_token=tick, stop=stop)
    assert answer.stopped is True
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert 3 <= len(answer.token_ids) <= 4
    again = ask(llama, Sampling(12, 0), stop=threading.Event())
    assert again.token_ids == whole.token_ids


def test_an_end_token_ends_the_answer(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(llama, Sampling(12, 0)).token_ids
    end = whole[4]
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", end)
    assert ask(llama, Sampling(12, 0)).token_ids == whole[: whole.index(end) + 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_an_exception_of_the_listener_leaves_a_model_that_works(llama: Engine, error: type[BaseException]) -> None:
    def fail(text: str) -> None:
        raise error

    whole = ask(llama, Sampling(12, 0))
    with pytest.raises(error):
        ask(llama, Sampling(12, 0), on_text=fail)
    assert ask(llama, Sampling(12, 0)).token_ids == whole.token_ids
    llama._backend.schedule.check_integrity()


def test_a_tokenizer_without_a_padding_token(root: Path, llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(llama, Sampling(6, 0)).token_ids
    bare = load_tokenizer(shared(root, "llama"))
    prompt = bare("the weights", return_tensors="pt").input_ids
    monkeypatch.setattr(llama.model.generation_config, "pad_token_id", None)
    for token in ("pad_token", "eos_token"):
        setattr(bare, token, None)
        assert bare.pad_token_id is None
        assert generate(llama.model, bare, prompt, Sampling(6, 0)).token_ids == whole


# --- encode -------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "the c"},
]


def test_a_chat_goes_through_the_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    made = encode(tokenizer, CHAT, raw=False)
    assert made.shape[0] == 1
    assert tokenizer.decode(made[0]) == "<s>user: a</s><s>assistant: b</s><s>user: the c</s><s>assistant: "
    assert made[0].tolist().count(EOS) == 3


def test_raw_is_the_last_message_as_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    made = encode(tokenizer, CHAT, raw=True)
    assert tokenizer.decode(made[0]) == "the c"
    assert made.shape == (1, len(tokenizer("the c").input_ids))
    assert made.dtype == torch.long


def test_without_a_template_a_chat_is_its_last_message(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=False))
    assert tokenizer.chat_template is None
    assert torch.equal(encode(tokenizer, CHAT, raw=False), encode(tokenizer, CHAT, raw=True))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template is None
