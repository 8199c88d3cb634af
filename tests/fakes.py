"""Fakes for the low rooms, and small things to try them with. Each fake is checked once against the real thing.

`execute` and `ScriptedReader` in test_copying_disk.py, against DiskReader; `write_by_hand` in test_store.py, against
safetensors; `ControlGroups` in test_machine.py, against the kernel.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.copying.disk import DiskReader
from headrace.core import BlockShape, Link, Machine, ModelShape, ParamShape, Segment, Tier
from headrace.metrics import Metrics
from headrace.planner import Demand
from headrace.reference.closest import Rarity, template_words
from headrace.reference.records import Expectation, History, Page, Prose, Site
from headrace.store import Read

MIB = 2**20


# --- tiny models ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For torch: tiny models only wait for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def small_matrices() -> Iterator[None]:
    """One thread, and rates of the cores that are not measured: where they decide nothing."""
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.machine.measure_compute_bytes_per_s", lambda dtype: 1e10)
        patch.setattr("headrace.machine.measure_fast_row_bytes_per_s", lambda: 2e10)
        patch.setattr("headrace.machine.measure_low_bits_per_s", lambda bits, dtype: 1e10)
        yield


# --- files --------------------------------------------------------------------------------------------------------


def write_by_hand(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file of just this header (an object, text or bytes) and data, whether that makes sense or not."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def bytes_that_differ(nbytes: int, seed: int = 0) -> bytes:
    """Bytes of which no two neighbouring pages are alike."""
    return bytes((index * 7 + index // 251 + seed) % 256 for index in range(nbytes))


def execute(reads: Iterable[Read], files: Mapping[str, bytes], target: bytearray) -> None:
    """What DiskReader does, in memory and in order."""
    for read in reads:
        staging = files[read.file][read.offset : read.offset + read.nbytes]
        assert len(staging) >= read.needed_bytes, "a read beyond the end of the file"
        for copy in read.copies:
            assert copy.source_offset + copy.nbytes <= read.needed_bytes, "a copy of what was not read"
            piece = staging[copy.source_offset : copy.source_offset + copy.nbytes]
            target[copy.target_offset : copy.target_offset + copy.nbytes] = piece


# --- a disk that does as it is told ---------------------------------------------------------------------------------


class ScriptedReader(DiskReader):
    """A DiskReader whose reads ask `script` first: it may raise OSError, or return how many bytes to read at most."""

    def __init__(self, paths: Mapping[str, Path], metrics: Metrics | None = None, **options: Any) -> None:
        self.script: Callable[[int], int | None] = lambda offset: None
        """Called with the offset in the file, on the reader's thread."""
        super().__init__(paths, metrics or Metrics(), **options)

    def _pread(self, file: Any, into: memoryview, offset: int) -> int:
        most = self.script(offset)
        return super()._pread(file, into if most is None else into[:most], offset)


class Gate:
    """A script that holds every read until it is opened, and says when the first one has arrived."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        """In the order in which reads arrived."""
        self._arrived = threading.Event()
        self._open = threading.Event()

    def __call__(self, offset: int) -> None:
        self.offsets.append(offset)
        self._arrived.set()
        assert self._open.wait(60), "nobody opened the gate"

    def wait_arrived(self) -> None:
        assert self._arrived.wait(60), "no read came"

    def open(self) -> None:
        self._open.set()


def broken(code: int, *, times: int = 1, at: int | None = None) -> Callable[[int], None]:
    """A script that fails with this errno so many times (at this offset), then lets every read pass."""
    left = [times]
    lock = threading.Lock()

    def script(offset: int) -> None:
        with lock:
            if (at is None or offset == at) and left[0] > 0:
                left[0] -= 1
                raise OSError(code, errno.errorcode[code])

    return script


# --- a machine and a model to plan for ------------------------------------------------------------------------------


def machine(*, disk_bytes_per_s: float = 2e9, compute_bytes_per_s: float = 2e10) -> Machine:
    return Machine(64 * 2**30, 4, Link(Tier.DISK, Tier.DEVICE, disk_bytes_per_s), compute_bytes_per_s)


def layers(*sizes: Sequence[int], kind: Any = "layer", first: int = 0) -> tuple[BlockShape, ...]:
    """Blocks of parameters of these sizes, named as transformers names them."""
    return tuple(
        BlockShape(
            f"model.layers.{number}",
            tuple(ParamShape(f"model.layers.{number}.p{index}.weight", size) for index, size in enumerate(params)),
            kind,
        )
        for number, params in enumerate(sizes, start=first)
    )


def table(nbytes: int, *, name: str = "model.embed_tokens") -> BlockShape:
    """An embedding table that is looked up row by row."""
    return BlockShape(name, (ParamShape(f"{name}.weight", nbytes),), "embedding", gathered=True)


def head(nbytes: int, *, name: str = "lm_head") -> BlockShape:
    return BlockShape(name, (ParamShape(f"{name}.weight", nbytes),), "head")


def model(*blocks: BlockShape, fixed_bytes: int = 0) -> ModelShape:
    return ModelShape(
        blocks=blocks,
        fixed_bytes=fixed_bytes,
        kv_bytes_per_token=1000,
        activation_bytes_per_token=100,
        head_bytes=0,
        head_always_copied=False,
        logits_bytes=50,
    )


def demand(memory_bytes: int | None, *, baseline_bytes: int = 10 * MIB, staging_bytes: int = MIB) -> Demand:
    return Demand(memory_bytes, baseline_bytes, staging_bytes, context_tokens=100, prefill_tokens=10)


def segment(file: str, offset: int, nbytes: int) -> Segment:
    return Segment(file, offset, nbytes)


# --- control groups -------------------------------------------------------------------------------------------------


class ControlGroups:
    """A tree as the kernel shows it: /proc/self/cgroup and /sys/fs/cgroup."""

    def __init__(self, folder: Path, lines: str) -> None:
        self.proc = folder / "self-cgroup"
        self.proc.write_text(lines)
        self.root = folder / "sys-fs-cgroup"
        self.root.mkdir()

    def limit(self, group: str, file: str, text: str) -> None:
        path = self.root / group
        path.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(text)


# --- errors of a package --------------------------------------------------------------------------------------------


class FakeCatalogue:
    """The errors of one version of a package, in memory. It is asked what `reference.matching.Catalogue` says."""

    def __init__(
        self,
        pages: Iterable[Page],
        *,
        package: str = "mill",
        version: str = "1.2",
        commit: str | None = None,
        flags: Mapping[str, str] | None = None,
    ) -> None:
        self.package, self.version, self.commit = package, version, commit
        self._flags = flags or {}
        self._pages = {page.id: page for page in pages}
        self._words = {
            page.id: {word for site in page.sites for template in site.templates for word in template_words(template)}
            for page in self._pages.values()
        }
        self._counts: dict[str, int] = {}
        for group in self._words.values():
            for word in group:
                self._counts[word] = self._counts.get(word, 0) + 1

    def page(self, page_id: str) -> Page | None:
        return self._pages.get(page_id)

    def pages(self) -> Iterable[Page]:
        return self._pages.values()

    def near_ids(self, page_id: str, limit: int) -> list[str]:
        return difflib.get_close_matches(page_id, self._pages, limit, cutoff=0)

    def sites_at(self, file_suffix: str, qualname: str | None = None) -> list[tuple[str, Site]]:
        return [
            (page.id, site)
            for page in self._pages.values()
            for site in page.sites
            if site.file.endswith(file_suffix) and qualname in (None, site.qualname)
        ]

    def rarity(self, words: Sequence[str]) -> Rarity:
        return Rarity(len(self._pages), {word: self._counts.get(word, 0) for word in words})

    def pages_with_words(self, words: Sequence[str], limit: int) -> list[Page]:
        rarity, said = self.rarity(words), set(words)
        shared = {page_id: rarity.total(sorted(said & group)) for page_id, group in self._words.items() if said & group}
        return [self._pages[page_id] for page_id in sorted(shared, key=shared.__getitem__, reverse=True)[:limit]]

    def related(self, page: Page, limit: int = 5) -> list[tuple[Page, str]]:
        files = {site.file for site in page.sites}
        others = [each for each in self.pages() if each != page and files & {site.file for site in each.sites}]
        return [(each, "also in this file") for each in others[:limit]]

    def excerpt(self, site: Site, around: int = 6) -> list[tuple[int, str]]:
        return [(site.line, f"raise {site.error_class}(...)")]

    def permalink(self, place: Site | Expectation) -> str | None:
        return f"https://github.com/example/{self.package}/blob/v{self.version}/{place.file}#L{place.line}"

    def expectations(self, page_id: str) -> list[Expectation]:
        return []

    def bases(self, error_class: str) -> list[str]:
        return []

    def versions(self, page_id: str) -> History | None:
        return History() if page_id in self._pages else None

    def earlier(self, page_id: str) -> list[Page]:
        return []

    def versions_read(self) -> list[tuple[str, str]]:
        return [(self.version, "")]

    def prose(self, page_id: str) -> Prose | None:
        return None

    def source(self, file: str) -> str | None:
        return None

    def flags(self) -> Mapping[str, str]:
        return self._flags
