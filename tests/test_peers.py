"""vLLM's and SGLang's rules, with numbers that were checked by hand or seen there."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest
from fakes import machine
from public_configs import fields

from headrace.datasheets import data_sheet
from headrace.errors import ConfigError, GpuTooSmall, HostTooSmall, InvalidOffloadConfig, InvalidSetting, UnknownSetting
from headrace.peers import commandline, sglang, vllm
from headrace.peers.layout import PeerModel, PeerParam, peer_model
from headrace.peers.recommend import Recommended, Wish, recommend
from headrace.peers.review import Review, review
from headrace.sizing.families import outline
from headrace.sizing.quantized import quantize

GIB, MIB = 2**30, 2**20


def peers(name: str, gpus: int = 1) -> PeerModel:
    some = fields(name)
    dtype = some.dtype or "bfloat16"
    return peer_model(quantize(outline(some), some, dtype), some, dtype, gpus)


def small(count: int, *sizes: int) -> PeerModel:
    """Layers of parameters of these sizes."""
    layer = tuple(PeerParam(f"mlp.p{index}.weight", (size,), 1.0) for index, size in enumerate(sizes))
    return PeerModel((layer,) * count, 0, 0, 0, 0, 0, 0)


def wish(device: str, **changes: Any) -> Wish:
    here = dataclasses.replace(machine(), accelerator=data_sheet(device).accelerator())
    values: dict[str, Any] = {
        "model": "org/name",
        "engine": "vllm",
        "machine": here,
        "gpus": 1,
        "tokens": 2048,
        "sequences": 1,
        "utilization": 0.9,
        "host_bytes": 512 * GIB,
    }
    return Wish(**{**values, **changes})


# --- layout ---------------------------------------------------------------------------------------------------------


def test_projections_and_experts_are_fused_under_their_names_there() -> None:
    dense = [param.name for param in peers("llama-3.1-8b").layers[0]]
    assert dense[:4] == [
        "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
    ]  # fmt: skip
    sparse = {param.name for param in peers("qwen3-30b-a3b").layers[0]}
    assert {"mlp.experts.w13_weight", "mlp.experts.w2_weight", "mlp.gate.weight"} <= sparse
    assert "mlp.shared_experts.gate_up_proj.weight" in {param.name for param in peers("deepseek-v2-lite").layers[1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-8b-awq-int4", "deepseek-v3"])
def test_one_gpu_holds_everything_and_two_hold_a_little_more_than_half_each(name: str) -> None:
    some = fields(name)
    whole = quantize(outline(some), some, some.dtype or "").nbytes(some.dtype or "")
    one, two = peers(name), peers(name, 2)
    padding = 64 * 2 * 2 * 8192
    assert whole <= one.stack_bytes + one.around_bytes <= whole + padding
    assert 0.5 <= (two.stack_bytes + two.around_bytes) / whole < 0.51


def test_a_gpu_has_at_least_one_key_value_head_and_all_of_a_latent_one() -> None:
    assert peers("llama-3.1-8b", 2).kv_bytes_per_token * 2 == peers("llama-3.1-8b").kv_bytes_per_token
    assert peers("llama-3.1-8b", 8).kv_bytes_per_token == peers("llama-3.1-8b", 16).kv_bytes_per_token
    assert peers("deepseek-v2-lite", 2).kv_bytes_per_token == peers("deepseek-v2-lite").kv_bytes_per_token
    assert peers("deepseek-v2-lite").kv_bytes_per_token == 27 * (512 + 64) * 2


# --- vLLM's rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "pinned"), [(0, 0), (1, 1), (2, 2), (3, 4), (257 * GIB, 512 * GIB), (2**40, 2**40), (2**40 + 1, 2**41)]
)
def test_a_pinned_tensor_takes_the_next_power_of_two(nbytes: int, pinned: int) -> None:
    assert vllm.pinned_bytes(nbytes) == pinned


@pytest.mark.parametrize(
    ("name", "weights_mib", "pinned_mib"), [("llama-3.1-8b", 416, 480), ("llama-3.1-8b-awq-int4", 104, 120)]
)
def test_what_the_host_pays_for_a_layer(name: str, weights_mib: int, pinned_mib: int) -> None:
    """vllm#56410: 48 + 32 + 224 + 112 MiB become 64 + 32 + 256 + 128; packed in 4 bits, a quarter of that."""
    layer = [max(param.pieces) for param in peers(name).layers[0] if param.nbytes > MIB]
    assert sum(layer) == weights_mib * MIB
    assert sum(map(vllm.pinned_bytes, layer)) == pinned_mib * MIB


def test_uva_takes_the_parameter_that_crosses_the_budget_as_well() -> None:
    model = small(4, 300, 200)
    assert [vllm.uva(model, budget, frozenset()).nbytes for budget in (0, 1, 300, 301, 500, 501, 10**6)] == [
        0, 300, 300, 500, 500, 800, 2000,
    ]  # fmt: skip
    assert vllm.uva(model, 250, frozenset({"p1"})).layers[1][0] == 1, "only what matches, from layer after layer"


@pytest.mark.parametrize(
    ("count", "group", "number", "expected"),
    [(8, 4, 2, [2, 3, 6, 7]), (28, 8, 1, [7, 15, 23]), (5, 8, 4, [4]), (32, 100, 1, [])],
)
def test_prefetch_takes_the_last_of_each_group_and_has_a_buffer_per_step(
    count: int, group: int, number: int, expected: list[int]
) -> None:
    taken = vllm.prefetch(small(count, 300, 200), group, number, number, frozenset())
    assert [index for index, _ in taken.layers] == expected
    assert taken.pool_bytes == (number * 500 if expected else 0)
    assert taken.saved_bytes == len(expected) * 500 - taken.pool_bytes


def test_as_many_buffers_as_layers_save_nothing() -> None:
    assert vllm.prefetch(small(4, 100), 4, 1, 1, frozenset()).saved_bytes == 0
    assert vllm.prefetch(small(4, 100), 4, 1, 3, frozenset()).saved_bytes < 0


def test_sglang_copies_a_layer_whenever_it_runs() -> None:
    taken = sglang.offloaded(small(4, 300, 200), 900)
    assert (taken.nbytes, taken.pool_bytes, taken.overlaps) == (1000, 500, False)
    assert taken.moved_bytes_per_token == 1000


# --- flags that fit -------------------------------------------------------------------------------------------------


def fits(made: Recommended, wanted: Wish) -> bool:
    return (
        made.share.total_bytes <= wanted.capacity_bytes and made.share.pinned_bytes * wanted.gpus <= wanted.host_bytes
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("name", "device", "gpus"),
    [
        ("llama-3.1-8b", "l40s", 1), ("llama-3.1-8b", "t4", 1), ("llama-3.1-70b", "a100-80gb", 1),
        ("llama-3.1-70b", "a100-80gb", 2), ("qwen3-30b-a3b", "rtx-4090", 1), ("llama-3.1-8b-awq-int4", "l4", 1),
    ],
)  # fmt: skip
def test_what_is_recommended_fits_and_is_read_back(engine: str, name: str, device: str, gpus: int) -> None:
    wanted = wish(device, engine=engine, gpus=gpus)
    made = recommend(lambda count: peers(name, count), wanted)
    assert fits(made, wanted)
    if engine == "sglang":
        assert made.command.startswith("python -m sglang.launch_server --model-path org/name")
        return
    line = commandline.parse(shlex.split(made.command))
    assert (line.model, line.gpus, line.tokens, line.utilization) == ("org/name", gpus, 2048, 0.9)
    again = review(line, peers(name, gpus), wanted.machine, 2048, wanted.host_bytes)
    assert again.ok
    assert again.offloaded.layers == made.offloaded.layers
    assert not again.ignored


def test_nothing_is_offloaded_if_everything_fits() -> None:
    made = recommend(peers_of("llama-3.1-8b"), wish("l40s"))
    assert made.flags == ()
    assert made.offloaded.nbytes == 0


def peers_of(name: str) -> Any:
    return lambda count: peers(name, count)


def test_cold_experts_go_before_hot_dense_weights() -> None:
    made = recommend(peers_of("qwen3-30b-a3b"), wish("rtx-4090"))
    assert made.flags[-2:] == ("--cpu-offload-params", "experts")
    assert made.offloaded.moved_bytes_per_token < made.offloaded.nbytes / 10


def test_what_never_fits_says_what_would() -> None:
    wanted = wish("t4", tokens=131072)
    with pytest.raises(GpuTooSmall) as caught:
        recommend(peers_of("llama-3.1-8b"), wanted)
    assert caught.value.needed_bytes > caught.value.capacity_bytes
    ways = dict(way.split() for way in caught.value.ways)
    more = dataclasses.replace(wanted, gpus=int(ways["--gpus"]))
    fewer = dataclasses.replace(wanted, tokens=int(ways["--context"]))
    for each in (more, fewer):
        assert fits(recommend(peers_of("llama-3.1-8b"), each), each)


@pytest.mark.slow
def test_a_host_that_is_too_small_says_how_large_it_must_be() -> None:
    wanted = wish("l4", host_bytes=100 * GIB)
    with pytest.raises(HostTooSmall) as caught:
        recommend(peers_of("llama-3.1-70b"), wanted)
    assert caught.value.needed_bytes > caught.value.payload_bytes > 100 * GIB
    enough = dataclasses.replace(wanted, host_bytes=caught.value.needed_bytes)
    assert fits(recommend(peers_of("llama-3.1-70b"), enough), enough)


# --- a command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --offload-group-size 8 --offload-num-in-group 2 -tp 2",
        "vllm serve --offload_group_size=8 --offload_num_in_group=2 --tensor_parallel_size=2 m",
        "python -m vllm.entrypoints.openai.api_server --model m --offload-group-size=8 --offload-num-in-group=2 -tp 2",
        "VLLM_USE_V1=1 /usr/bin/vllm serve m --enforce-eager --offload-group-size 8 --offload-num-in-group 2 -tp=2",
    ],
)
def test_every_spelling_is_read(text: str) -> None:
    words = shlex.split(text)
    if "--offload_group_size=8" in words:  # a model after a flag with one value is a word of its own
        words = [*words[:2], "m", *words[2:-1]]
    line = commandline.parse(words)
    assert (line.model, line.gpus) == ("m", 2)
    assert line.offload == {"offload_group_size": 8, "offload_num_in_group": 2}


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("auto", None)]
)
def test_lengths_as_vllm_reads_them(text: str, tokens: int | None) -> None:
    assert commandline.parse(["vllm", "serve", "m", "--max-model-len", text]).tokens == tokens


@pytest.mark.parametrize("words", [[], ["vllm"], ["vllm", "serve"], ["sglang", "m"], ["python", "serve.py", "m"]])
def test_what_is_no_line_of_vllm(words: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="vllm serve"):
        commandline.parse(words)


def test_an_offload_flag_that_vllm_does_not_have() -> None:
    with pytest.raises(UnknownSetting, match="'--offload-group-size'"):
        commandline.parse(["vllm", "serve", "m", "--offload-groupsize", "4"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--offload-num-in-group 8 --offload-group-size 4",
            r"offload_num_in_group \(8\) must be <= offload_group_size",
        ),
        ("--offload-backend prefetch", r"offload_num_in_group \(1\) must be <= offload_group_size \(0\)"),
        ("--offload-group-size 4 --offload-prefetch-step 0", r"offload_prefetch_step \(0\) must be >= 1"),
    ],
)
def test_what_vllm_refuses_is_refused(flags: str, words: str) -> None:
    line = commandline.parse(["vllm", "serve", "m", *flags.split()])
    with pytest.raises(InvalidOffloadConfig, match=words):
        line.config()


@pytest.mark.parametrize("flags", ["--cpu-offload-gb lots", "--offload-group-size 1.5", "--offload-backend magic"])
def test_values_that_are_none(flags: str) -> None:
    with pytest.raises(ConfigError):
        commandline.parse(["vllm", "serve", "m", *flags.split()]).config()


def looked_through(flags: str, name: str = "llama-3.1-8b", device: str = "l40s") -> Review:
    here = wish(device).machine
    return review(commandline.parse(["vllm", "serve", "m", *flags.split()]), peers(name), here, 2048, 64 * GIB)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--offload-group-size 100", "the model has 32 layers, so none is; --offload-group-size 32"),
        ("--cpu-offload-gb 4 --cpu-offload-params embed_tokens", "no parameter inside of a layer"),
        ("--offload-group-size 8 --offload-params layers.12.mlp", "no parameter inside of a layer"),
        ("--cpu-offload-params mlp", "not one byte may be offloaded"),
        ("--offload-params mlp", "turns prefetch off"),
    ],
)
def test_what_vllm_ignores_without_a_word_is_told(flags: str, words: str) -> None:
    found = looked_through(flags)
    assert not found.ok
    assert any(words in line for line in found.ignored)


def test_other_settings_without_effect() -> None:
    found = looked_through("--cpu-offload-gb 4 --offload-group-size 8")
    assert any("Prefetch backend will be selected" in line for line in found.ignored)
    assert found.ok
    everything = looked_through("--cpu-offload-gb 40")
    assert any("embeddings, head and towers are not offloaded" in line for line in everything.ignored)


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        ("--offload-group-size 4 --offload-num-in-group 2", "llama-3.1-8b", "--offload-prefetch-step 2 avoids that"),
        ("--offload-group-size 32", "llama-3.1-8b", "nothing is saved"),
        ("--cpu-offload-gb 47", "qwen3-30b-a3b", "--cpu-offload-params experts"),
        ("--cpu-offload-gb 1", "llama-3.1-8b", "the parameter that crosses the budget"),
    ],
)
def test_what_works_badly_is_warned_of(flags: str, name: str, words: str) -> None:
    assert any(words in line for line in looked_through(flags, name).warnings)


def test_what_does_not_fit_is_told() -> None:
    found = looked_through("", "llama-3.1-70b")
    assert not found.ok
    assert "one GPU needs about" in found.misfits[0]
    found = looked_through("--cpu-offload-gb 120", "llama-3.1-70b")
    assert any("pinned memory" in line for line in found.misfits)


def test_a_line_without_offload_flags_is_fine_if_it_fits() -> None:
    found = looked_through("")
    assert found.ok
    assert (found.ignored, found.warnings, found.misfits) == ((), (), ())
