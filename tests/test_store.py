"""Files that lie are refused with the right error, true ones are read as safetensors reads them, and the reads that
`coalesce` makes bring every byte where it belongs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import bytes_that_differ, entry, execute, segment, write_by_hand
from hypothesis import given
from hypothesis import strategies as st

from headrace.core import DIRECT_ALIGNMENT, TENSOR_ALIGNMENT, Segment, StoredTensor
from headrace.errors import (
    CheckpointError,
    CorruptHeader,
    CorruptIndex,
    MissingShard,
    NoWeights,
    ReadError,
    TruncatedFile,
    UnknownDtype,
)
from headrace.store import (
    DTYPE_BITS,
    INDEX_NAME,
    MAX_HEADER_BYTES,
    Placement,
    Read,
    coalesce,
    layout,
    layout_as_stored,
    open_checkpoint,
    read_header,
)

PAGE = DIRECT_ALIGNMENT


def good() -> dict[str, Any]:
    """A header of two tensors over 16 bytes of data."""
    return {"a": entry("F32", [2], 0, 8), "b": entry("I16", [2, 2], 8, 16)}


# --- a file that is as it should be ---------------------------------------------------------------------------------


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    path = write_by_hand(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}, **good()}, bytes(16))
    start = path.stat().st_size - 16
    assert read_header(path) == [
        StoredTensor("a", "F32", (2,), Segment("m.safetensors", start, 8)),
        StoredTensor("b", "I16", (2, 2), Segment("m.safetensors", start + 8, 8)),
    ]


def test_file_order_is_the_order_of_the_data_and_not_of_the_header(tmp_path: Path) -> None:
    header = {"later": entry("U8", [3], 5, 8), "first": entry("U8", [5], 0, 5)}
    assert [t.name for t in read_header(write_by_hand(tmp_path / "m.safetensors", header, bytes(8)))] == [
        "first",
        "later",
    ]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert read_header(write_by_hand(tmp_path / "m.safetensors", {})) == []


@pytest.mark.parametrize("at", [0, 8, 16])
def test_an_empty_tensor_may_lie_between_any_two(tmp_path: Path, at: int) -> None:
    header = {**good(), "empty": entry("F32", [0, 7], at, at)}
    path = write_by_hand(tmp_path / "m.safetensors", header, bytes(16))
    assert {t.name: t.nbytes for t in read_header(path)} == {"a": 8, "b": 8, "empty": 0}


def test_the_fake_writer_writes_what_safetensors_reads(tmp_path: Path) -> None:
    import safetensors as library

    data = bytes_that_differ(16)
    path = write_by_hand(tmp_path / "m.safetensors", good(), data)
    assert {name: bytes(info["data"]) for name, info in library.deserialize(path.read_bytes())} == {
        "a": data[:8],
        "b": data[8:],
    }


# --- every lie has its error ----------------------------------------------------------------------------------------

HUGE = 10**4000  # Python reads a number of 4000 digits, and refuses to print a product of two of them

LIES: dict[str, tuple[Any, str]] = {
    "negative offset": ({"a": entry("U8", [16], -4, 12)}, "data_offsets"),
    "negative size": ({"a": entry("U8", [-16], 0, 16)}, "shape"),
    "reversed offsets": ({"a": entry("U8", [16], 16, 0)}, "data_offsets"),
    "one offset": ({"a": {"dtype": "U8", "shape": [16], "data_offsets": [16]}}, "data_offsets"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 8, 16]}}, "data_offsets"),
    "offsets as text": ({"a": {"dtype": "U8", "shape": [16], "data_offsets": ["0", "16"]}}, "data_offsets"),
    "offsets as fractions": ({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0.0, 16.0]}}, "data_offsets"),
    "offsets as truth values": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, "data_offsets"),
    "offsets that are no list": ({"a": {"dtype": "U8", "shape": [16], "data_offsets": 16}}, "data_offsets"),
    "offsets beyond any file": ({"a": entry("U8", [2**63], 0, 2**63)}, "shape"),
    "shape that is no list": ({"a": {"dtype": "U8", "shape": 16, "data_offsets": [0, 16]}}, "shape"),
    "shape with a fraction": ({"a": {"dtype": "U8", "shape": [16.0], "data_offsets": [0, 16]}}, "shape"),
    "shape of thousands of digits": ({"a": entry("U8", [HUGE, HUGE], 0, 16)}, "shape"),
    "shape whose product has too many digits": ({"a": entry("U8", [2**62] * 300, 0, 16)}, "more bytes than a file"),
    "too few bytes for the shape": ({"a": entry("F32", [5], 0, 16)}, "20 bytes"),
    "too many bytes for the shape": ({"a": entry("F32", [3], 0, 16)}, "12 bytes"),
    "wrong item size": ({"a": entry("F64", [4], 0, 16)}, "32 bytes"),
    "overlap": ({"a": entry("U8", [10], 0, 10), "b": entry("U8", [8], 8, 16)}, "overlaps"),
    "overlap by a byte": ({"a": entry("U8", [9], 0, 9), "b": entry("U8", [8], 8, 16)}, "by 1 bytes"),
    "the same bytes twice": ({"a": entry("U8", [16], 0, 16), "b": entry("U8", [16], 0, 16)}, "overlaps"),
    "empty inside of another": ({"a": entry("U8", [16], 0, 16), "b": entry("U8", [0], 4, 4)}, "overlaps"),
    "gap": ({"a": entry("U8", [6], 0, 6), "b": entry("U8", [8], 8, 16)}, "belong to no tensor"),
    "gap of a byte": ({"a": entry("U8", [7], 0, 7), "b": entry("U8", [8], 8, 16)}, "1 bytes before"),
    "gap at the start": ({"a": entry("U8", [12], 4, 16)}, "belong to no tensor"),
    "trailing bytes": ({"a": entry("U8", [12], 0, 12)}, "after the last tensor"),
    "a trailing byte": ({"a": entry("U8", [15], 0, 15)}, "1 bytes after the last tensor"),
    "no tensors but bytes": ({}, "after the last tensor"),
    "no dtype": ({"a": {"shape": [16], "data_offsets": [0, 16]}}, "lacks"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 16]}}, "lacks"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [16]}}, "lacks"),
    "entry that is no object": ({"a": [0, 16]}, "lacks"),
    "list": ([], "not a JSON object"),
    "number": ("7", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "text": ("hello", "not JSON"),
    "empty": ("", "not JSON"),
    "cut in the middle": ('{"a": {"dtype": "U8"', "not JSON"),
    "two documents": ("{} {}", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not JSON"),
    "UTF-16": ('{"__metadata__": {}}'.encode("utf-16"), "not JSON"),
    "NaN": ('{"a": NaN}', "not JSON"),
    "infinite offset": ('{"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, Infinity]}}', "not JSON"),
    "the same key twice": ('{"a": {}, "a": {}}', "'a' is there twice"),
    "the same key twice within": ('{"a": {"dtype": "U8", "dtype": "U8"}}', "'dtype' is there twice"),
    "too deep": ('{"a":' + "[" * 200_000, "not JSON"),
    "a number of too many digits": ('{"a": ' + "9" * 5000 + "}", "not JSON"),
}


def lie(name: str) -> tuple[Any, str]:
    header, why = LIES[name]
    return (json.dumps(header) if not isinstance(header, (str, bytes)) else header), why


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies(tmp_path: Path, name: str) -> None:
    header, why = lie(name)
    path = write_by_hand(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(CorruptHeader) as caught:
        open_checkpoint(tmp_path)
    assert why in caught.value.what
    assert str(path) in caught.value.what


@pytest.mark.parametrize("name", LIES)
def test_what_the_library_refuses_is_what_we_refuse(tmp_path: Path, name: str) -> None:
    """All lies are lies to safetensors too, so that no file of its making is refused here."""
    import safetensors as library

    header, _ = lie(name)
    path = write_by_hand(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(library.SafetensorError), library.safe_open(path, "np"):
        pass


@pytest.mark.parametrize("dtype", ["F7", "", "f32", "F4", None, 7, ["F32"], {"F32": 1}, True])
def test_an_unknown_dtype(tmp_path: Path, dtype: Any) -> None:
    header = {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 16]}}
    write_by_hand(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(UnknownDtype) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tensor == "w"
    assert "BF16" in caught.value.fix


def test_a_header_length_beyond_the_limit(tmp_path: Path) -> None:
    for length in (MAX_HEADER_BYTES + 1, 2**64 - 1):
        write_by_hand(tmp_path / "model.safetensors", good(), bytes(16), length=length)
        with pytest.raises(CorruptHeader, match=str(length)):
            open_checkpoint(tmp_path)


def test_a_header_length_past_the_end(tmp_path: Path) -> None:
    path = write_by_hand(tmp_path / "model.safetensors", good(), bytes(16), length=1000)
    with pytest.raises(TruncatedFile) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.facts == {"file": str(path), "expected_bytes": 1008, "actual_bytes": path.stat().st_size}


def test_a_header_length_of_zero(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "model.safetensors", good(), bytes(16), length=0)
    with pytest.raises(CorruptHeader, match="not JSON"):
        open_checkpoint(tmp_path)


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    """Every prefix of a file is refused, and never as anything but cut off."""
    whole = write_by_hand(tmp_path / "model.safetensors", good(), bytes(16)).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(TruncatedFile) as caught:
            open_checkpoint(tmp_path)
        assert caught.value.actual_bytes == length
        assert caught.value.expected_bytes > length


@given(st.binary(max_size=200))
def test_no_garbage_leaks_a_foreign_exception(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "model.safetensors"
    for content in (garbage, struct.pack("<Q", len(garbage)) + garbage):
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            read_header(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["U8", "F32"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries({"dtype": st.just("U8") | JSON, "shape": JSON, "data_offsets": JSON}) | JSON,
        max_size=3,
    )
)
def test_no_header_leaks_a_foreign_exception(tmp_path_factory: pytest.TempPathFactory, header: Any) -> None:
    path = write_by_hand(tmp_path_factory.mktemp("json") / "model.safetensors", header, bytes(16))
    try:
        read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)


# --- directories and indexes ----------------------------------------------------------------------------------------


def shards(directory: Path, contents: Mapping[str, Sequence[str]], weight_map: Any = None) -> Path:
    """Files of one-byte tensors, and an index that is true unless another weight map is given."""
    for file, names in contents.items():
        header = {name: entry("U8", [1], index, index + 1) for index, name in enumerate(names)}
        write_by_hand(directory / file, header, bytes(len(names)))
    truth = {name: file for file, names in contents.items() for name in names}
    index = directory / INDEX_NAME
    index.write_text(json.dumps({"metadata": {}, "weight_map": truth if weight_map is None else weight_map}))
    return index


TWO = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}


def test_shards_with_a_true_index(tmp_path: Path) -> None:
    shards(tmp_path, TWO)
    checkpoint = open_checkpoint(tmp_path)
    assert {name: tensor.segment.file for name, tensor in checkpoint.tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-1.safetensors",
        "c": "model-2.safetensors",
    }
    assert checkpoint.nbytes == 3
    assert checkpoint.files == {file: (tmp_path / file).stat().st_size for file in TWO}
    assert checkpoint.path("model-2.safetensors") == tmp_path / "model-2.safetensors"


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    shards(tmp_path, TWO)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not ours")
    assert set(open_checkpoint(tmp_path).files) == set(TWO)


def test_model_safetensors_goes_before_others_beside_it(tmp_path: Path) -> None:
    shards(tmp_path, {"model.safetensors": ["a"], "adapter.safetensors": ["z"]})
    (tmp_path / INDEX_NAME).unlink()
    assert set(open_checkpoint(tmp_path).tensors) == {"a"}


def test_shards_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path, TWO).unlink()
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_shards(tmp_path: Path, index: bool) -> None:
    made = shards(tmp_path, {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["b"]})
    if not index:
        made.unlink()
    with pytest.raises(CorruptHeader, match=r"'b' is also in 'model-1.safetensors'"):
        open_checkpoint(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    index = shards(tmp_path, TWO)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(MissingShard) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.facts == {"index": str(index), "shard": "model-1.safetensors", "tensors": 2}


def test_a_truncated_shard(tmp_path: Path) -> None:
    shards(tmp_path, TWO)
    os.truncate(tmp_path / "model-2.safetensors", (tmp_path / "model-2.safetensors").stat().st_size - 1)
    with pytest.raises(TruncatedFile, match="model-2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", '{"weight_map": NaN}', "[" * 200_000, '{"weight_map": {"a": "x", "a": "y"}}', "\xff"],
    ids=["empty", "cut", "nonsense", "NaN", "too deep", "key twice", "not UTF-8"],
)
def test_an_index_that_is_not_json(tmp_path: Path, text: str) -> None:
    shards(tmp_path, TWO).write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptIndex, match="not JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("index", [[], 7, None, {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_weight_map(tmp_path: Path, index: Any) -> None:
    shards(tmp_path, TWO).write_text(json.dumps(index))
    with pytest.raises(CorruptIndex, match="weight_map"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "model-1.safetensors/",
        "..",
        ".",
        "",
        None,
        7,
        [],
    ],
)
def test_an_index_that_reaches_outside_of_its_directory(tmp_path: Path, file: Any) -> None:
    shards(tmp_path, TWO, {"a": file})
    with pytest.raises(CorruptIndex, match="not a file name"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["a" * 300, "nul\0byte", "\ud800"])
def test_an_index_with_a_name_that_no_file_can_have(tmp_path: Path, file: str) -> None:
    shards(tmp_path, TWO, {"a": file})
    with pytest.raises(MissingShard):
        open_checkpoint(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    shards(tmp_path, TWO, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(CorruptIndex, match=r"'a' is in 'model-1.safetensors', not in 'model-2.safetensors'"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_is_in_the_index_alone(tmp_path: Path) -> None:
    shards(tmp_path, TWO, {"a": "model-1.safetensors", "ghost": "model-2.safetensors"})
    with pytest.raises(CorruptIndex, match=r"'ghost' is not in 'model-2.safetensors'"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(NoWeights) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.found == ["README.md"]


def test_what_only_looks_like_a_file_is_not_there(tmp_path: Path) -> None:
    """A directory of that name, and a link into a cache from which the file is gone."""
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "model-1.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(NoWeights):
        open_checkpoint(tmp_path)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ReadError) as caught:
        read_header(tmp_path / "gone.safetensors")
    assert "gone.safetensors" in str(caught.value)
    assert os.strerror(2) in str(caught.value)
    (tmp_path / INDEX_NAME).mkdir()
    with pytest.raises(ReadError, match="index"):
        open_checkpoint(tmp_path)


# --- agreement with the library -------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NUMPY_DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "float32", "int64", "float64"]
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(NUMPY_DTYPES), SHAPES),
    max_size=6,
)


def stored_bytes(path: Path, tensor: StoredTensor) -> bytes:
    content = path.read_bytes()
    return content[tensor.segment.offset : tensor.segment.offset + tensor.segment.nbytes]


@pytest.mark.slow
@given(TENSORS, st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), min_size=1, max_size=2))
def test_files_of_the_library_are_read_as_it_reads_them(
    tmp_path_factory: pytest.TempPathFactory, described: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Any
) -> None:
    import numpy
    import safetensors.numpy as library

    path = tmp_path_factory.mktemp("library") / "model.safetensors"
    saved = {
        name: numpy.frombuffer(bytes_that_differ(math.prod(shape) * numpy.dtype(dtype).itemsize, seed), "uint8")
        .view(dtype)
        .reshape(shape)
        for seed, (name, (dtype, shape)) in enumerate(described.items())
    }
    library.save_file(saved, path, metadata)
    loaded = library.load_file(path)
    found = open_checkpoint(path.parent).tensors
    assert set(found) == set(loaded)
    for name, array in loaded.items():
        assert found[name].shape == array.shape
        assert stored_bytes(path, found[name]) == array.tobytes()
        assert DTYPE_BITS[found[name].dtype] == array.dtype.itemsize * 8


@pytest.mark.slow
def test_every_dtype_of_torch_that_we_know(tmp_path: Path) -> None:
    import safetensors.torch as library
    import torch

    known = {name: dtype for name, dtype in library._TYPES.items() if name in DTYPE_BITS}
    assert {"BF16", "F8_E4M3", "F8_E5M2", "U64", "C64"} <= set(known)
    saved = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in known.items()}
    saved["scalar"] = torch.tensor(2.5)
    saved["empty"] = torch.zeros(0, 4, dtype=torch.bfloat16)
    path = tmp_path / "model.safetensors"
    library.save_file(saved, path)
    found = open_checkpoint(tmp_path).tensors
    assert set(found) == set(saved)
    for name, tensor in saved.items():
        assert found[name].shape == tuple(tensor.shape)
        assert stored_bytes(path, found[name]) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found[name].dtype == name or name in ("scalar", "empty")
    assert found["scalar"].shape == ()
    assert found["empty"].nbytes == 0


# --- reads ----------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.sampled_from([0, 1, 8, PAGE - 1, PAGE, PAGE + 1]), st.integers(0, 5 * PAGE))
OFFSETS = st.one_of(st.integers(0, 12).map(lambda page: page * PAGE), st.integers(0, 12 * PAGE))
WANTED = st.lists(st.tuples(st.sampled_from(["x", "y"]), OFFSETS, SIZES), max_size=8)


def placed(wanted: Sequence[tuple[str, int, int]], order: Sequence[int]) -> tuple[list[Placement], int]:
    """Placements one after the other in the target, in another order than that of the files."""
    offsets, size = layout(nbytes for _, _, nbytes in wanted)
    return [Placement(segment(*wanted[index]), offsets[index]) for index in order], size


def pages(wanted: Sequence[tuple[str, int, int]]) -> set[tuple[str, int]]:
    """Every page that holds a wanted byte."""
    return {
        (file, page)
        for file, offset, nbytes in wanted
        if nbytes
        for page in range(offset // PAGE, (offset + nbytes - 1) // PAGE + 1)
    }


def check_reads(reads: Sequence[Read], wanted: Sequence[tuple[str, int, int]], chunk_bytes: int) -> None:
    for read in reads:
        assert read.offset % PAGE == read.nbytes % PAGE == 0
        assert 0 < read.needed_bytes <= read.nbytes <= chunk_bytes
        assert read.nbytes - read.needed_bytes < PAGE
        assert all(copy.nbytes > 0 for copy in read.copies)
    read_pages = [
        (read.file, page) for read in reads for page in range(read.offset // PAGE, (read.offset + read.nbytes) // PAGE)
    ]
    assert len(set(read_pages)) == len(read_pages), "a page is read twice"
    assert set(read_pages) == pages(wanted), "not just the pages that hold wanted bytes"


FILES = {"x": bytes_that_differ(20 * PAGE), "y": bytes_that_differ(20 * PAGE, 99)}


@pytest.mark.slow
@given(WANTED, st.randoms(use_true_random=False), st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE, 64 * PAGE]))
def test_reads_bring_every_byte_where_it_belongs(
    wanted: list[tuple[str, int, int]], random: Any, chunk_bytes: int
) -> None:
    order = list(range(len(wanted)))
    random.shuffle(order)
    placements, size = placed(wanted, order)
    reads = coalesce(placements, chunk_bytes)
    check_reads(reads, wanted, chunk_bytes)
    target = bytearray(b"\xee" * size)
    execute(reads, FILES, target)
    expected = bytearray(b"\xee" * size)
    for placement in placements:
        part = placement.segment
        at = placement.target_offset
        expected[at : at + part.nbytes] = FILES[part.file][part.offset : part.offset + part.nbytes]
    assert target == expected


def test_a_short_segment_inside_of_a_long_one() -> None:
    """Ranges may overlap: the short one ends before the later chunks of the long one begin."""
    wanted = [("x", 0, 4 * PAGE), ("x", 100, 50), ("x", 3 * PAGE + 10, 20)]
    placements, size = placed(wanted, [0, 1, 2])
    reads = coalesce(placements, PAGE)
    check_reads(reads, wanted, PAGE)
    target = bytearray(size)
    execute(reads, FILES, target)
    assert target[: 4 * PAGE] == FILES["x"][: 4 * PAGE]
    assert target[placements[1].target_offset :][:50] == FILES["x"][100:150]


@pytest.mark.slow
@given(WANTED, st.lists(st.booleans(), min_size=30, max_size=30), st.sampled_from([PAGE, 2 * PAGE, 64 * PAGE]))
def test_reads_go_right_into_place_where_nothing_else_lies(
    wanted: list[tuple[str, int, int]], steady: list[bool], chunk_bytes: int
) -> None:
    segments = [segment(*each) for each in wanted]
    offsets, size = layout_as_stored([[each] for each in segments], steady[: len(segments)])
    assert size % PAGE == 0
    places = sorted(
        (offset, offset + each.nbytes) for offset, each in zip(offsets, segments, strict=True) if each.nbytes
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert not places or places[-1][1] <= size
    for offset, each, any_place in zip(offsets, segments, steady, strict=False):
        assert offset % TENSOR_ALIGNMENT == 0 or (any_place and offset % PAGE == each.offset % PAGE)
    placements = [Placement(each, offset) for each, offset in zip(segments, offsets, strict=True)]
    reads = coalesce(placements, chunk_bytes, size)
    target = bytearray(size)
    for read in reads:
        if read.target_offset is None:
            execute([read], FILES, target)
        else:
            data = FILES[read.file][read.offset : read.offset + read.nbytes]
            target[read.target_offset : read.target_offset + len(data)] = data
    assert len(target) == size
    for placement in placements:
        part, at = placement.segment, placement.target_offset
        assert target[at : at + part.nbytes] == FILES[part.file][part.offset : part.offset + part.nbytes]


def test_a_layer_is_read_right_into_place() -> None:
    sizes, offset, segments = [8192, 1024 * 4096, 33 * PAGE, 4096], 123_464, []
    for size in sizes:
        segments.append(segment("x", offset, size))
        offset += size
    offsets, size = layout_as_stored([[each] for each in segments], [True] * 4)
    placements = [Placement(each, at) for each, at in zip(segments, offsets, strict=True)]
    assert all(read.target_offset is not None for read in coalesce(placements, 16 * PAGE, size))
    assert all(read.target_offset is None for read in coalesce(placements, 16 * PAGE)), "the target may be anything"
    assert size <= sum(sizes) + 2 * PAGE
    unsteady, _ = layout_as_stored([[each] for each in segments], [False] * 4)
    assert all(at % TENSOR_ALIGNMENT == 0 for at in unsteady)


def test_nothing_wanted_reads_nothing() -> None:
    assert coalesce([], PAGE) == ()
    assert coalesce([Placement(segment("x", 5, 0), 0)], PAGE) == ()


@pytest.mark.parametrize("gap", [0, 1, PAGE - 1])
def test_neighbours_are_one_read(gap: int) -> None:
    first, second = ("x", 100, 1000), ("x", 1100 + gap, 3000)
    assert len(coalesce(placed([first, second], [1, 0])[0], 64 * PAGE)) == 1


def test_what_lies_apart_is_not_joined() -> None:
    assert len(coalesce(placed([("x", 0, 10), ("x", 10 + PAGE, 10)], [0, 1])[0], 64 * PAGE)) == 2
    assert len(coalesce(placed([("x", 0, 10), ("y", 10, 10)], [0, 1])[0], 64 * PAGE)) == 2


def test_a_layer_is_a_few_large_reads_of_hardly_more_than_its_bytes() -> None:
    """Nine tensors of a layer, as they lie in a file: at an odd place, one after the other."""
    sizes = [4096 * 4096 * 2, 1024 * 4096 * 2, 1024 * 4096 * 2, 4096 * 4096 * 2, 8192, 8192, *[4096 * 14336 * 2] * 3]
    offset, wanted = 123_464, []
    for size in sizes:
        wanted.append(("x", offset, size))
        offset += size
    chunk_bytes = 4 * 2**20
    reads = coalesce(placed(wanted, range(len(wanted)))[0], chunk_bytes)
    payload = sum(sizes)
    assert len(reads) == -(-(payload + 123_464 % PAGE) // chunk_bytes)
    assert payload <= sum(read.nbytes for read in reads) <= payload + 2 * PAGE <= 1.02 * payload


@given(st.lists(st.integers(0, 3 * PAGE), max_size=9))
def test_a_layout_is_aligned_without_overlap(sizes: list[int]) -> None:
    offsets, size = layout(sizes)
    assert size % PAGE == 0
    end = 0
    for offset, nbytes in zip(offsets, sizes, strict=True):
        assert offset % TENSOR_ALIGNMENT == 0
        assert end <= offset < end + TENSOR_ALIGNMENT
        end = offset + nbytes
    assert end <= size < end + TENSOR_ALIGNMENT + PAGE
