"""Drafts, and their verification: the same bits as one token after the other, whatever was drafted."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fakes import one_thread
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, ids, shared

from headrace import machine, machinefile
from headrace.engine import Engine
from headrace.errors import CannotSpeculate
from headrace.generate import Answer, Sampling, encode, generate
from headrace.speculation import ByToken, Drafter, obstacle

pytestmark = pytest.mark.slow

GREEDY = Sampling(40, 0)
REPEATING = "the weights of the weights of the"


@pytest.fixture(scope="module", autouse=True)
def _fast_and_alone() -> Iterator[None]:
    """The rates of a machine on which a pass waits for its weights, so that drafts are worth it."""
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure_compute_bytes_per_s", lambda dtype: 1e12)
        patch.setattr(machine, "measure_operations_per_s", lambda dtype: 1e15)
        patch.setattr("headrace.overheads.measure_overhead_s", lambda: (0.0, 0.0))
        patch.setattr(machinefile, "read_cached", lambda: None)
        yield


def ask(engine: Engine, sampling: Sampling = GREEDY, text: str = REPEATING, **options: Any) -> Answer:
    prompt = encode(engine.tokenizer, [{"role": "user", "content": text}], raw=True)
    options = {"drafter": engine.drafter, **options}
    return generate(engine.model, engine.tokenizer, prompt, sampling, **options)


# --- the bits -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def passes(model: Any, prompt: torch.Tensor, cuts: list[int], verifier: ByToken) -> torch.Tensor:
    """Logits of tokens behind a prompt, verified in passes of so many tokens."""
    verifier.is_on = False
    cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).cache
    cache.activate_past_recording()
    verifier.is_on = True
    more = ids(1, sum(cuts), seed=3)
    made = []
    for part in torch.split(more, cuts, dim=1):
        made.append(model(input_ids=part, use_cache=True, cache=cache).logits)
        cache.crop(0)
    verifier.is_on = False
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_pass_over_several_tokens_has_the_bits_of_one_after_the_other(
    root: Path, architecture: str, dtype: torch.dtype
) -> None:
    """Below, at and beyond the width of a sliding window, which is 8."""
    with Engine.open(shared(root, architecture, dtype), weights_share=0.5, speculate="lookup") as engine:
        assert engine.report().offloaded_bytes > 0
        assert engine.drafter is not None
        verifier = engine.drafter.verifier
        for length, cuts in ((3, [9]), (7, [1, 3, 1]), (20, [2, 3])):
            one = passes(engine.model, ids(1, length), [1] * sum(cuts), verifier)
            assert torch.equal(passes(engine.model, ids(1, length), cuts, verifier), one), length
        assert verifier.together == 0
        assert engine.report().counters.slot_misses == 0


def test_without_it_the_bits_are_others(root: Path) -> None:
    """What it is there for: a product over several rows sums in another order. If this fails, it may be needless."""
    with Engine.open(shared(root, "llama", torch.float32), speculate="lookup") as engine:
        assert engine.drafter is not None
        verifier = engine.drafter.verifier
        one = passes(engine.model, ids(1, 9), [1] * 9, verifier)
        with torch.inference_mode():
            cache = engine.model(input_ids=ids(1, 9), use_cache=True).cache
            whole = engine.model(input_ids=ids(1, 9, seed=3), use_cache=True, cache=cache).logits
    assert not torch.equal(whole, one)
    assert torch.allclose(whole, one, atol=1e-3)


def test_a_module_that_takes_what_cannot_be_cut_runs_over_all_tokens_at_once(root: Path) -> None:
    with Engine.open(shared(root, "llama"), speculate="lookup") as engine:
        assert engine.drafter is not None
        verifier, layer = engine.drafter.verifier, engine.model.model.layers[0]
        verifier.is_on = True
        hidden = torch.zeros(1, 3, tiny_models.HIDDEN, dtype=torch.bfloat16)
        places = torch.arange(3)[None]
        turned = engine.model.model.rotary_emb(hidden, position_ids=places)
        layer(hidden, position_embeddings=turned, position_ids=places)
        assert verifier.together == 0
        layer(hidden, position_embeddings=turned, position_ids=places, alibi=torch.zeros(4, 1, 3))
        assert verifier.together == 1


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3-moe", "gpt2"])
@pytest.mark.parametrize("speculate", ["lookup", "itself", "smaller"])
def test_greedy_answers_are_those_without_drafts(
    root: Path, architecture: str, dtype: torch.dtype, speculate: str
) -> None:
    directory = shared(root, architecture, dtype)
    layers = {"n_layer": 2} if architecture == "gpt2" else {"num_hidden_layers": 2}
    if architecture == "gemma3":
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    smaller = shared(root, architecture, dtype, **layers) if speculate == "smaller" else directory
    with Engine.open(directory, weights_share=0.5) as engine:
        plain = ask(engine)
        texts = [ask(engine, text=text).token_ids for text in ("a", "the b the")]
    asked = "lookup" if speculate == "lookup" else str(smaller)
    with Engine.open(directory, weights_share=0.5, speculate=asked, sampling=GREEDY) as engine:
        drafted = ask(engine)
        assert [ask(engine, text=text).token_ids for text in ("a", "the b the")] == texts
        report = engine.report()
        assert report.offloaded_bytes > 0
        assert report.counters.slot_misses == 0
        assert engine.drafter is not None
        assert engine.drafter.verifier.together == 0
        assert (report.plan.memory.draft_bytes > 0) == (speculate != "lookup")
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.drafted_tokens > 0
    assert plain.drafted_tokens == 0
    if speculate == "itself":
        # Right but for ties: a draft takes the tokens that it has missed at once, and two rows have other last bits.
        assert drafted.accepted_tokens >= 0.9 * drafted.drafted_tokens
        assert drafted.tokens_per_pass is not None
        # Random weights are never sure, and a draft that is unsure stops after its first token.
        assert drafted.tokens_per_pass > 1.8


@pytest.fixture(scope="module")
def llama(root: Path) -> Iterator[Engine]:
    """With the model itself as the draft, so that every draft is right and passes are few."""
    directory = shared(root, "llama", torch.float32)
    with Engine.open(directory, weights_share=0.5, speculate=str(directory), sampling=GREEDY) as engine:
        yield engine


def test_the_figures_add_up(llama: Engine) -> None:
    before = llama.report().counters.passes
    pieces: list[str] = []
    ticks: list[int] = []
    answer = ask(llama, on_text=pieces.append, on_token=lambda: ticks.append(1))
    assert len(ticks) == len(answer.token_ids) == len(answer.decode_seconds) + 1
    assert llama.report().counters.passes - before == answer.decode_passes + 1
    assert answer.accepted_tokens + answer.decode_passes == len(answer.decode_seconds)
    assert answer.tokens_per_pass == len(answer.decode_seconds) / answer.decode_passes
    assert len(set(answer.decode_seconds)) <= answer.decode_passes  # the tokens of a pass share its time
    assert all(seconds > 0 for seconds in answer.decode_seconds)
    assert "".join(pieces) == answer.text


def test_text_comes_in_the_same_pieces(llama: Engine) -> None:
    made: list[list[str]] = []
    for drafter in (None, llama.drafter):
        made.append([])
        ask(llama, on_text=made[-1].append, drafter=drafter)
    assert made[0] == made[1]


def test_an_end_token_inside_of_a_draft_ends_the_answer(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(llama, drafter=None).token_ids
    for end in dict.fromkeys(whole[:12]):
        monkeypatch.setattr(llama.model.generation_config, "eos_token_id", end)
        assert ask(llama).token_ids == whole[: whole.index(end) + 1]


@pytest.mark.parametrize("tokens", [1, 2, 3, 11, 12])
def test_an_answer_has_the_length_that_was_asked_for(llama: Engine, tokens: int) -> None:
    whole = ask(llama, drafter=None).token_ids
    answer = ask(llama, Sampling(tokens, 0))
    assert answer.token_ids == whole[:tokens]


def test_stop_ends_it_after_the_pass_that_runs(llama: Engine) -> None:
    whole = ask(llama).token_ids
    stop = threading.Event()
    answer = ask(llama, on_token=stop.set, stop=stop)
    assert answer.stopped
    assert answer.token_ids == whole[:1]
    assert ask(llama, stop=threading.Event()).token_ids == whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_an_exception_of_the_listener_leaves_a_model_that_works(llama: Engine, error: type[BaseException]) -> None:
    whole = ask(llama)
    fail: Iterator[int] = itertools.count()

    def on_token() -> None:
        if next(fail) == 3:
            raise error

    with pytest.raises(error):
        ask(llama, on_token=on_token)
    assert llama.drafter is not None
    assert not llama.drafter.verifier.is_on
    assert "_get_candidate_generator" not in vars(llama.model)
    assert ask(llama).token_ids == whole.token_ids
    llama._backend.schedule.check_integrity()


@given(words=st.lists(st.sampled_from(["the ", "a ", "weights ", "of ", "it\n"]), min_size=1, max_size=12))
@settings(max_examples=15)
def test_any_prompt_has_the_answer_that_it_has_without_drafts(lookup: Engine, words: list[str]) -> None:
    text = "".join(words)
    plain = ask(lookup, Sampling(12, 0), text=text, drafter=None)
    assert ask(lookup, Sampling(12, 0), text=text).token_ids == plain.token_ids


@pytest.fixture(scope="module")
def lookup(root: Path) -> Iterator[Engine]:
    with Engine.open(shared(root, "llama"), weights_share=0.5, speculate="lookup", sampling=GREEDY) as engine:
        yield engine


# --- answers that are drawn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_what_is_drawn_keeps_its_distribution(root: Path, kind: str) -> None:
    """The second and third token of 600 answers, with drafts and without: total variation as of two equal samples."""
    directory = shared(root, "llama", torch.float32)
    asked = "lookup" if kind == "lookup" else str(shared(root, "llama", torch.float32, num_hidden_layers=2))
    hot = Sampling(3, temperature=0.3)
    with Engine.open(directory, speculate=asked, sampling=hot) as engine:
        drawn = []
        for drafter in (None, None, engine.drafter):
            seeds = range(len(drawn) * 600, (len(drawn) + 1) * 600)
            answers = [ask(engine, Sampling(3, 0.3, seed=seed), drafter=drafter).token_ids for seed in seeds]
            drawn.append([answer[1:] for answer in answers])
    apart = _apart(drawn[0], drawn[1])
    assert _apart(drawn[0], drawn[2]) < 1.5 * apart + 0.05


def _apart(left: list[Any], right: list[Any]) -> float:
    """Total variation of two samples."""
    return sum(abs(left.count(each) - right.count(each)) for each in {*left, *right}) / (2 * len(left))


def test_the_seed_decides(llama: Engine) -> None:
    hot = [ask(llama, Sampling(10, 1.5, seed=seed)).token_ids for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


# --- other tokenizers, and what cannot be done ------------------------------------------------------------------------


def other_tokens(directory: Path, vocabulary: int) -> Path:
    """A draft whose tokens are the same letters with other numbers, and more of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if directory.exists():
        return directory
    tiny_models.write(directory, "llama", torch.float32, num_hidden_layers=2, vocab_size=vocabulary)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    inner = Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(["<pad>", "<s>", "</s>", *letters])}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
    return directory


def test_drafts_in_other_tokens_are_translated(root: Path) -> None:
    directory = shared(root, "llama", torch.float32)
    draft = other_tokens(root / "others", 384)
    with Engine.open(directory, weights_share=0.5) as engine:
        plain = ask(engine)
    with Engine.open(directory, weights_share=0.5, speculate=str(draft), sampling=GREEDY) as engine:
        assert engine.drafter is not None
        assert engine.drafter.tokenizers is not None
        answer = ask(engine)
    assert answer.token_ids == plain.token_ids
    assert answer.drafted_tokens > 0


def test_drafts_in_other_tokens_are_refused_where_they_cannot_be_translated(root: Path) -> None:
    directory = shared(root, "llama", torch.float32)
    with pytest.raises(CannotSpeculate, match="only where --temperature is 0"):
        Engine.open(directory, speculate=str(other_tokens(root / "others", 384)), sampling=Sampling(4, 0.7))
    with pytest.raises(CannotSpeculate, match="as many"):
        Engine.open(directory, speculate=str(other_tokens(root / "as many", 512)), sampling=GREEDY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_implementation": "static"}, "'static', which cannot be cut"),
        ({"num_beams": 2}, "beams"),
        ({"use_cache": False}, "no cache"),
    ],
)
def test_what_cannot_verify_is_told(root: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    import json
    import shutil

    directory = shutil.copytree(shared(root, "llama"), tmp_path / "m")
    file = directory / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CannotSpeculate, match=words):
        Engine.open(directory, speculate="lookup")
    with Engine.open(directory, weights_share=0.5, speculate="auto") as engine:
        assert engine.drafter is None
        (choice,) = [choice for choice in engine.plan.choices if choice.name == "speculation"]
        assert choice.value == "off"
        assert choice.reason == obstacle(engine.model)


def test_a_model_with_a_state_cannot_take_drafts_back() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mamba", vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=4, intermediate_size=64
    )
    assert "state" in obstacle(AutoModelForCausalLM.from_config(config))


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_chooses(root: Path) -> None:
    directory = shared(root, "llama")
    chosen = {}
    for name, options in {
        "streamed": {"weights_share": 0.5},
        "resident": {},
        "sampled": {"weights_share": 0.5, "sampling": Sampling(4, 0.7)},
    }.items():
        with Engine.open(directory, speculate="auto", **options) as engine:
            chosen[name] = engine.plan.speculation.kind
            assert (engine.drafter is not None) == (name == "streamed")
            assert isinstance(engine.drafter, Drafter | None)
    assert chosen == {"streamed": "lookup", "resident": "off", "sampled": "off"}


# --- the real model ---------------------------------------------------------------------------------------------------


def test_a_draft_model_is_part_of_the_budget(tmp_path: Path) -> None:
    """SmolLM2 drafts for itself, in a process of its own: all of the draft is in memory, of the model what is left."""
    import json
    import subprocess
    import sys

    from headrace import sources

    directory = str(sources.resolve(sources.demo_gguf()))
    question = ["-p", "Why is the sky blue?", "--temperature", "0", "--max-tokens", "24", "--json", "-q"]
    documents = []
    for flags in (["--speculate", directory, "--memory", "900MiB"], ["--speculate", "off"]):
        command = [sys.executable, "-m", "headrace", "run", directory, *question, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout.splitlines()[-1]))
    drafted, plain = documents
    report = drafted["report"]
    assert report["plan"]["memory"]["draft_bytes"] > 250 * 2**20
    assert report["offloaded_bytes"] > 50 * 2**20
    assert report["counters"]["read_bytes"] > 0
    assert report["peak_memory_bytes"] <= report["requested_bytes"] == 900 * 2**20
    assert drafted["answers"][0]["token_ids"] == plain["answers"][0]["token_ids"]
    assert drafted["tokens_per_pass"] > 1.5  # how many are drafted follows from what this machine can do
    assert plain["tokens_per_pass"] == 1


def test_lookup_on_a_summary_makes_several_tokens_per_pass() -> None:
    """SmolLM2 with half of its weights on disk, eight tokens drafted whatever this machine's rates are."""
    from headrace import sources

    text = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text().split("\n\n")
    pieces = [f"Summarize this text:\n\n{piece}" for piece in text if 400 < len(piece) < 900][:2]
    assert len(pieces) == 2
    long = Sampling(60, 0)
    directory = sources.resolve(sources.demo_gguf())
    with Engine.open(directory, weights_share=0.5, speculate="lookup", sampling=long) as engine:
        assert engine.report().offloaded_bytes > 0
        assert engine.drafter is not None
        drafter = dataclasses.replace(engine.drafter, tokens=8, pass_tokens=None)
        made = []
        for piece in pieces:
            prompt = encode(engine.tokenizer, [{"role": "user", "content": piece}], raw=False)
            plain = generate(engine.model, engine.tokenizer, prompt, long)
            made.append(generate(engine.model, engine.tokenizer, prompt, long, drafter=drafter))
            assert made[-1].token_ids == plain.token_ids
    tokens = sum(len(answer.decode_seconds) for answer in made)
    assert tokens / sum(answer.decode_passes for answer in made) >= 1.5  # benchmarks/speculation.py takes more texts
