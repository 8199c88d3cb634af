"""GGUF to safetensors: the same numbers, whole or not at all, and a clear word for every broken file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from safetensors import safe_open

from headrace import importing, sources
from headrace.errors import CorruptGguf, NotWritable, WriteError
from headrace.importing import cache as checkpoints
from headrace.importing import convert, writer

DTYPES = {"F32": torch.float32, "F16": torch.float16, "Q8_0": torch.bfloat16, "BF16": torch.bfloat16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return importing.cache_directory()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind="Q8_0")


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors.update({name: opened.get_tensor(name).clone() for name in opened.keys()})  # noqa: SIM118
    return tensors


def theirs(file: Path, dtype: torch.dtype, config: Path | None = None) -> Any:
    """What transformers makes of the file, without us."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {"config": AutoConfig.from_pretrained(config)} if config else {}
    with convert.quiet():
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **given)


# --- the same model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("architecture", tiny_gguf.SHAPES)
def test_every_architecture_and_kind_has_the_state_of_transformers_own_loading(
    architecture: str, kind: str, tied: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    file = tiny_gguf.write(tmp_path / "tiny.gguf", architecture, kind=kind, tie_word_embeddings=tied)
    directory = importing.import_gguf(file)
    expected = theirs(file, DTYPES[kind], directory).state_dict()
    with convert.quiet():
        actual = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    on_disk = stored(directory)
    assert {tensor.dtype for tensor in on_disk.values()} == {DTYPES[kind]}
    assert ("lm_head.weight" in on_disk) is not tied


@pytest.mark.slow
def test_smollm2_is_the_same_model_with_the_same_tokenizer_and_answers_paris(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = sources.demo_gguf()
    directory = importing.import_gguf(file)
    with convert.quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        their_tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = theirs(file, torch.bfloat16).state_dict()
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())

    for text in ("Hello, world 1234", "  two\n\n spaces", "naïve 日本語 🎉", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer(text)["input_ids"] == their_tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    their_prompt = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt["input_ids"][0].tolist() == their_prompt["input_ids"]

    answer = model.generate(**prompt, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1].item() == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == answer[-1].item()


@pytest.mark.slow
def test_a_turn_ends_at_the_token_of_the_chat_template_too(llama: Path) -> None:
    directory = importing.import_gguf(llama)
    written = json.loads((directory / "generation_config.json").read_text())
    assert written["eos_token_id"] == [0, 2]  # the file says 0, its template ends turns with <|im_end|>
    assert (directory / "chat_template.jinja").read_text() == tiny_gguf.TEMPLATE


def test_no_processing_touches_the_tensors_that_are_never_whole() -> None:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    weights = np.ones((6, 4), np.float32)
    for kind in {TensorProcessor, *TENSOR_PROCESSORS.values()}:
        for name in convert._AS_STORED:
            done: dict[str, Any] = {}
            result = kind(config={"num_attention_heads": 2, "num_key_value_heads": 1}).process(
                weights=weights, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": done}
            )
            assert np.array_equal(done.get("lm_head.weight", result.weights), weights), (kind, name)


@pytest.mark.slow
def test_pieces_give_the_same_bytes_as_the_whole(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stored(importing.import_gguf(llama))
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "2")
    monkeypatch.setattr(convert, "_PIECE_BYTES", 1000)
    pieces = stored(importing.import_gguf(llama))
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, ("linear", 4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            ("yarn", 2.0),
        ),
    ],
)
def test_stretched_positions_are_carried_over(
    values: dict[str, Any], expected: tuple[str, float], tmp_path: Path
) -> None:
    directory = importing.import_gguf(tiny_gguf.write(tmp_path / "tiny.gguf", values=values))
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == expected


@pytest.mark.slow
def test_llama3s_table_becomes_llama3s_rule(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_gguf.config("llama", rope_parameters=rule, hidden_size=512)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 10000.0 ** (torch.arange(0, 128, 2) / 128)
    table = {"rope_freqs.weight": (plain / stretched).numpy()}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", extra=table, hidden_size=512, head_dim=128)
    assert AutoConfig.from_pretrained(importing.import_gguf(file)).rope_parameters == rule

    table = {"rope_freqs.weight": np.linspace(1, 8, 64, dtype=np.float32)}
    other = tiny_gguf.write(tmp_path / "other.gguf", extra=table, hidden_size=512, head_dim=128)
    with pytest.raises(CorruptGguf, match="not Llama 3's"):
        importing.import_gguf(other)


# --- the files ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shards_hold_whole_layers_and_data_begins_at_a_page(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stored(importing.import_gguf(llama))
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "2")
    planned = writer.plan_shards
    monkeypatch.setattr(checkpoints, "plan_shards", lambda tensors: planned(tensors, shard_bytes=100_000))
    directory = importing.import_gguf(llama)
    several = stored(directory)
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)

    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in several.values())
    layers: dict[str, set[str]] = {}
    for name, file in index["weight_map"].items():
        if ".layers." in name:
            layers.setdefault(name.split(".")[2], set()).add(file)
    assert all(len(holding) == 1 for holding in layers.values())
    for file in files:
        with (directory / file).open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(header))
        assert (8 + header) % 4096 == 0
        entries.pop("__metadata__")
        assert all(entry["data_offsets"][0] % 64 == 0 for entry in entries.values())


def test_a_layer_larger_than_a_shard_gets_a_file_of_its_own() -> None:
    names = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "norm.weight"]
    specs = [writer.TensorSpec(name, "F32", (64,)) for name in names]
    shards = writer.plan_shards(specs, shard_bytes=300)
    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [
        names[:1],
        names[1:3],
        names[3:5],
        names[5:],
    ]


@pytest.mark.slow
def test_memory_holds_a_piece_and_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced allocations of numpy while weights are written; torch shares their memory or holds one piece."""
    import tracemalloc

    file = tiny_gguf.write(tmp_path / "wide.gguf", kind="F16", hidden_size=256, num_hidden_layers=20)
    peaks = []

    def watch(label: str, done: int, total: int) -> None:
        if done:
            peaks.append(tracemalloc.get_traced_memory()[1])
        if done == total:
            tracemalloc.stop()

    def traced(*arguments: Any) -> None:
        tracemalloc.start()
        writer.write_shards(*arguments)

    monkeypatch.setattr(checkpoints, "write_shards", traced)
    directory = importing.import_gguf(file, on_progress=watch)
    written = (directory / "model.safetensors").stat().st_size
    largest = 4 * max(tensor.numel() for tensor in stored(directory).values())
    assert written > 10 * largest
    assert max(peaks) < 3 * largest + 2**20


# --- the cache ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_import_is_found_again_without_torch(llama: Path, cache: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    first = importing.import_gguf(llama, on_progress=lambda *step: progress.append(step))
    assert progress[0][1] == 0
    assert progress[-1][1] == progress[-1][2] > 0
    assert progress[-1][0] == "importing tiny.gguf"
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}

    code = (
        "import sys; from pathlib import Path; from headrace.importing import import_gguf; "
        f"print(import_gguf(Path({str(llama)!r}))); assert not {{'torch', 'transformers', 'gguf'}} & set(sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert again.stdout.strip() == str(first)
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == before
    assert left_in(cache) == [first.name]


@pytest.mark.slow
def test_a_replaced_file_is_imported_anew(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    first = importing.import_gguf(file)
    status = file.stat()
    tiny_gguf.write(file, values={"general.description": "x"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert importing.import_gguf(file) != first
    second = importing.import_gguf(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert importing.import_gguf(file) != second


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no mark", "short file", "missing file", "mark is not JSON", "killed"])
def test_a_half_written_import_is_noticed_and_done_again(damage: str, llama: Path, cache: Path) -> None:
    directory = importing.import_gguf(llama)
    whole = stored(directory)
    if damage == "no mark":
        (directory / "headrace.json").unlink()
    elif damage == "short file":
        os.truncate(directory / "model.safetensors", 5000)
    elif damage == "missing file":
        (directory / "config.json").unlink()
    elif damage == "mark is not JSON":
        (directory / "headrace.json").write_text("{")
    else:
        directory.rename(directory.with_name(directory.name + ".partial"))
    assert importing.import_gguf(llama) == directory
    again = stored(directory)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert left_in(cache) == [directory.name]


@pytest.mark.slow
def test_killed_in_the_middle_by_the_system(llama: Path, cache: Path) -> None:
    """A process that dies without a chance to clean up, after some of the weights."""
    code = (
        "import os; from pathlib import Path; from headrace.importing import import_gguf; "
        f"import_gguf(Path({str(llama)!r}), on_progress=lambda _, done, total: done * 2 > total and os._exit(9))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert any(name.endswith(".partial") for name in left_in(cache))
    directory = importing.import_gguf(llama)
    assert stored(directory)
    assert not any(name.endswith(".partial") for name in left_in(cache))


@pytest.mark.slow
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_import_leaves_nothing(interruption: type[BaseException], llama: Path, cache: Path) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if done * 2 > total > 0 and done > 0:
            raise interruption

    with pytest.raises(interruption):
        importing.import_gguf(llama, on_progress=interrupt)
    assert left_in(cache) == []


@pytest.mark.slow
def test_two_at_once_do_the_work_once(llama: Path, cache: Path) -> None:
    started: list[str] = []
    results: list[Path] = []

    def run() -> None:
        results.append(
            importing.import_gguf(llama, on_progress=lambda label, done, total: done or started.append(label))
        )

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(started) == 1
    assert left_in(cache) == [results[0].name]


# --- the disk -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_too_little_space_is_seen_before_anything_is_written(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_free_bytes", lambda target: 1000)
    with pytest.raises(WriteError, match="not enough space") as caught:
        importing.import_gguf(llama)
    assert caught.value.needed_bytes > caught.value.free_bytes == 1000
    assert left_in(cache) == []


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_000, 60_000])
def test_a_write_that_fails_leaves_nothing(limit: int, llama: Path, cache: Path) -> None:
    """The kernel refuses to let a file grow: in the tokenizer's own writer, and in the middle of the weights."""
    code = (
        "import resource, signal; from pathlib import Path; from headrace import importing, errors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from headrace.importing import convert\n"
        "save = convert.GgufModel.save_metadata\n"
        "def limited(self, directory):\n"
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); save(self, directory)\n"
        "convert.GgufModel.save_metadata = limited\n"
        f"try: importing.import_gguf(Path({str(llama)!r}))\n"
        "except errors.WriteError as error: print(error.reason)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == os.strerror(errno.EFBIG)
    assert left_in(cache) == []


@pytest.mark.slow
def test_a_full_disk_says_how_much_is_needed_and_free(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write_shards", full)
    with pytest.raises(WriteError, match="No space left on device") as caught:
        importing.import_gguf(llama)
    assert caught.value.needed_bytes > 0
    assert caught.value.free_bytes > 0
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_made(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotWritable, match="Not a directory"):
        importing.import_gguf(llama)


# --- broken files -------------------------------------------------------------------------------------------------


def test_not_a_gguf(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04" + bytes(100)):
        file = tmp_path / "not.gguf"
        file.write_bytes(content)
        with pytest.raises(CorruptGguf, match="magic"):
            importing.import_gguf(file)
    with pytest.raises(CorruptGguf, match="No such file"):
        importing.import_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize(("version", "reason"), [(1, "version is 1"), (99, "version is 99"), (3 << 24, "big-endian")])
def test_a_version_that_is_not_read(version: int, reason: str, llama: Path, tmp_path: Path) -> None:
    content = bytearray(llama.read_bytes()[:64])
    content[4:8] = version.to_bytes(4, "little")
    file = tmp_path / "version.gguf"
    file.write_bytes(content)
    with pytest.raises(CorruptGguf, match=reason):
        importing.import_gguf(file)


@pytest.mark.slow
def test_every_cut_is_noticed(llama: Path, tmp_path: Path, cache: Path) -> None:
    content = llama.read_bytes()
    file = tmp_path / "cut.gguf"
    for length in (*range(1, 400, 7), *range(400, len(content), len(content) // 23), len(content) - 40):
        file.write_bytes(content[:length])
        with pytest.raises(CorruptGguf, match=r"cut off|magic"):
            importing.import_gguf(file)
    assert left_in(cache) == []


@pytest.mark.slow
def test_bytes_that_lie_never_raise_anything_foreign(llama: Path, tmp_path: Path) -> None:
    """Every eighth byte of the header before the vocabulary, and of the tensor table, set to 255."""
    content = llama.read_bytes()
    vocabulary = content.index(b"tokenizer.ggml.tokens")
    table = content.index(b"token_embd.weight") - 8
    file = tmp_path / "lie.gguf"
    for at in (*range(4, vocabulary, 8), *range(table, table + 600, 8)):
        broken = bytearray(content)
        broken[at] = 255
        file.write_bytes(broken)
        with contextlib.suppress(CorruptGguf):
            importing.import_gguf(file)


@pytest.mark.slow
def test_a_model_that_does_not_fit_its_tensors(tmp_path: Path, cache: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"drop": "blk.1.ffn_up.weight"}, "1 weights of the model are not in it .model.layers.1.mlp.up_proj.weight"),
        (
            {"extra": {"blk.0.odd.weight": np.ones(4, np.float32)}},
            "1 of its tensors have no place in the model .blk.0.odd",
        ),
        ({"extra": {"blk.9.attn_q.weight": np.ones(4, np.float32)}}, "no place in the model"),
        ({"values": {"llama.rope.scaling.type": "dynamic"}}, "not supported .'dynamic'"),
        ({"values": {"split.count": 3}}, "one of 3 parts"),
    ]
    for changes, reason in cases:
        with pytest.raises(CorruptGguf, match=reason):
            importing.import_gguf(tiny_gguf.write(tmp_path / "odd.gguf", **changes))
    assert left_in(cache) == []


def test_an_unsupported_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "clip.gguf", "clip")
    writer.add_tensor("a", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CorruptGguf, match="architecture 'clip'"):
        importing.import_gguf(tmp_path / "clip.gguf")


@pytest.mark.slow
def test_a_read_error_in_the_middle(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(np, "fromfile", fails)
    with pytest.raises(CorruptGguf, match=r"reading .* bytes at offset .* Input/output error"):
        importing.import_gguf(llama)
    assert left_in(cache) == []
