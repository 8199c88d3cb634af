"""What this machine can do, measured: disk, memory, matrices, the link to an accelerator. Wires rooms; knows no model.

Without torch the rates of its kernels are estimated from the memory's own rate, and the result says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import mmap
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from headrace import machine
from headrace.core import (
    CHUNK_BYTES,
    DIRECT_ALIGNMENT,
    HUGE_PAGE_BYTES,
    READER_THREADS,
    Accelerator,
    Contention,
    Link,
    Machine,
    Products,
    Tier,
)
from headrace.errors import InvalidSetting

if TYPE_CHECKING:
    from headrace.copying.disk import DiskReader, Ticket
    from headrace.metrics import Metrics

DISK_SECONDS = 2.0
SHARE_SECONDS = 0.15
SHARE_TIMES = 6
SCRATCH_BYTES = 256 * 2**20
"""Of the file that is written if none is given; it is removed again."""
COPY_BYTES = 128 * 2**20
DEVICE_SIDE = 8192
"""Of the matrices that an accelerator multiplies."""
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Probed:
    """A machine and how its figures came about."""

    machine: Machine
    notes: tuple[str, ...]


def probe(file: Path | None = None) -> Probed:
    """Measure this machine, in a few seconds. `file`: a large one on the disk that is meant.

    Raises: InvalidSetting for a file that cannot be read.
    """
    notes = []
    begin = machine.ProcessorTime.now()
    with _readable(file) as path:
        disk_rate, is_direct = measure_disk_bytes_per_s(path)
        contention = _contention(path)
    where = "a file written for it" if file is None else repr(str(file))
    notes.append(f"disk: {'direct' if is_direct else 'buffered'} reads of {where}")
    copied = measure_memory_bytes_per_s()
    notes.append(f"memory: {copied / 1e9:.1f} GB/s read and written by {machine.cores()} threads that copy")
    kernels, why = _kernels(copied)
    notes.append(why)
    accelerator = _accelerator()
    if accelerator is None:
        notes.append("accelerator: torch sees none")
    busy = machine.others_share(begin, machine.ProcessorTime.now())
    if busy > machine.BUSY_SHARE:
        notes.append(f"others had {busy:.0%} of the processor meanwhile: measure again when they are done")
    return Probed(
        Machine(
            memory_bytes=machine.available_bytes(),
            cores=machine.cores(),
            disk=Link(Tier.DISK, Tier.DEVICE, disk_rate),
            compute_bytes_per_s=kernels.bytes_per_s,
            compute_operations_per_s=kernels.operations_per_s,
            layer_overhead_s=kernels.layer_s,
            pass_overhead_s=kernels.pass_s,
            expert_overhead_s=kernels.expert_s,
            contention=contention,
            copy_bytes_per_s=copied / 2 / machine.cores(),
            products=kernels.products,
            int8_bytes_per_s=kernels.int8_bytes_per_s,
            int4_bytes_per_s=kernels.int4_bytes_per_s,
            fast_row_bytes_per_s=kernels.fast_row_bytes_per_s,
            accelerator=accelerator,
        ),
        tuple(notes),
    )


def estimate() -> Probed:
    """What can be said of this machine in a moment: the disk's rate is a guess, the memory's is measured."""
    copied = measure_memory_bytes_per_s(rounds=2)
    return Probed(
        Machine(
            memory_bytes=machine.available_bytes(),
            cores=machine.cores(),
            disk=Link(Tier.DISK, Tier.DEVICE, GUESSED_DISK_BYTES_PER_S),
            compute_bytes_per_s=copied / 2,
            compute_operations_per_s=machine.cores() * GUESSED_OPERATIONS_PER_CORE_PER_S,
        ),
        (
            f"the disk's rate is a guess of {GUESSED_DISK_BYTES_PER_S / 1e9:g} GB/s and the processor's one from how "
            "fast it copies: `headrace machine` measures both",
        ),
    )


GUESSED_DISK_BYTES_PER_S = 1.5e9
GUESSED_OPERATIONS_PER_CORE_PER_S = 5e10


# --- disk -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _readable(file: Path | None) -> Iterator[Path]:
    """The file that was given, or one in the working directory that is removed again."""
    if file is not None:
        if not file.is_file() or file.stat().st_size < CHUNK_BYTES:
            raise InvalidSetting(
                setting="--file",
                value=repr(str(file)),
                allowed=f"a file of at least {CHUNK_BYTES // 2**20} MiB that can be read",
                suggestion="with one of the model's *.safetensors",
            )
        yield file
        return
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".headrace-probe-") as scratch:
        block = os.urandom(CHUNK_BYTES)
        for _ in range(SCRATCH_BYTES // CHUNK_BYTES):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(scratch.name)


def measure_disk_bytes_per_s(file: Path, seconds: float = DISK_SECONDS) -> tuple[float, bool]:
    """The rate of large direct reads all over the file by a few threads, and whether they could be direct.

    Each place is read once, since a second read may come out of a cache below us.
    """
    size = file.stat().st_size
    descriptor, is_direct = _open(file)
    places = iter(_spread(size // CHUNK_BYTES))
    lock, done = threading.Lock(), [0]
    begin_s = time.perf_counter()

    def read() -> None:
        buffer = _read_buffer()
        while time.perf_counter() - begin_s < seconds:
            with lock:
                place = next(places, None)
            if place is None:
                return
            count = os.preadv(descriptor, [buffer], place * CHUNK_BYTES)
            with lock:
                done[0] += count

    threads = [threading.Thread(target=read, name=f"headrace-probe-{number}") for number in range(READER_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return done[0] / max(time.perf_counter() - begin_s, 1e-9), is_direct


def _read_buffer() -> memoryview:
    """Of one chunk, in huge pages as the engine's slots are."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, CHUNK_BYTES + HUGE_PAGE_BYTES, flags=flags)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = -address % HUGE_PAGE_BYTES
    return memoryview(memory)[begin : begin + CHUNK_BYTES]


def _open(file: Path) -> tuple[int, bool]:
    """A descriptor for direct reads where the file system has them; a first read tells."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | direct)
            try:
                os.preadv(descriptor, [mmap.mmap(-1, DIRECT_ALIGNMENT)], 0)
                return descriptor, True
            except OSError:
                os.close(descriptor)
    return os.open(file, os.O_RDONLY), False


def _spread(count: int) -> list[int]:
    """All places, far from each other first."""
    stride = max(1, count // 64)
    return [place for start in range(stride) for place in range(start, count, stride)]


# --- memory and kernels ---------------------------------------------------------------------------------------------


def measure_memory_bytes_per_s(rounds: int = 5) -> float:
    """Bytes read and written in a second by one thread per core that copies: the median of some rounds."""
    cores = machine.cores()
    piece = COPY_BYTES // cores
    source, target = bytearray(COPY_BYTES), bytearray(COPY_BYTES)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, target)]

    def copy(number: int) -> None:
        ctypes.memmove(addresses[1] + number * piece, addresses[0] + number * piece, piece)  # lets the others run

    rates = []
    for _ in range(rounds + 1):
        threads = [threading.Thread(target=copy, args=(number,)) for number in range(cores)]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(2 * COPY_BYTES / (time.perf_counter() - begin_s))
    return median(rates[1:])


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What the processor reaches, and what layers and passes cost beside their products."""

    bytes_per_s: float
    operations_per_s: float
    layer_s: float = 0.0
    pass_s: float = 0.0
    expert_s: float = 0.0
    products: Mapping[str, Products] = field(default_factory=dict)
    int8_bytes_per_s: float = 0.0
    int4_bytes_per_s: float = 0.0
    fast_row_bytes_per_s: float = 0.0


def _kernels(copied: float) -> tuple[_Kernels, str]:
    """Measured or estimated, and how."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        guessed = _Kernels(copied / 2, machine.cores() * GUESSED_OPERATIONS_PER_CORE_PER_S)
        return guessed, f"processor: estimated from its memory, since {missing[0]} is not installed"
    from headrace import overheads

    per_layer, per_pass = overheads.measure_overhead_s()
    products = {
        dtype: replace(
            machine.measure_products(dtype),
            layer_overhead_s=overheads.measure_layer_overhead_s(dtype, per_pass),
            attention_bytes_per_s=machine.measure_attention_bytes_per_s(dtype),
        )
        for dtype in DTYPES
    }
    usual = products[DTYPES[0]]
    measured = _Kernels(
        bytes_per_s=usual.rates[0][1],
        operations_per_s=machine.measure_operations_per_s(DTYPES[0]),
        layer_s=per_layer,
        pass_s=per_pass,
        expert_s=overheads.measure_expert_overhead_s(per_pass, usual.layer_overhead_s),
        products=products,
        int8_bytes_per_s=machine.measure_low_bits_per_s(8),
        int4_bytes_per_s=machine.measure_low_bits_per_s(4),
        fast_row_bytes_per_s=machine.measure_fast_row_bytes_per_s(machine.WEIGHTS_BYTES),
    )
    return (
        measured,
        f"processor: torch's products in {', '.join(DTYPES)}, 8 and 4 bits; small models for what layers cost",
    )


def _contention(path: Path) -> Contention | None:
    """What is left of the disk's rate and of the processor's while both are at work, as they are in a streamed pass."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from headrace.copying.disk import DiskReader
    from headrace.metrics import Metrics

    metrics = Metrics()
    reader = DiskReader({"probe": path}, metrics)
    matrices = machine.square_matrices(DTYPES[0])
    try:
        both = _Both(reader, metrics, path.stat().st_size, matrices)
        with torch.inference_mode():
            return both.contention()
    finally:
        reader.close()


class _Both:
    """Reads of a file and products of matrices, each alone and both at once."""

    def __init__(self, reader: DiskReader, metrics: Metrics, file_bytes: int, matrices: Sequence[Any]) -> None:
        from headrace.copying.slots import Slab

        self._reader = reader
        self._metrics = metrics
        self._places = itertools.cycle(range(0, file_bytes // CHUNK_BYTES * CHUNK_BYTES, CHUNK_BYTES))
        self._under_way: deque[Ticket] = deque()
        self._slots = itertools.cycle(range(2 * READER_THREADS))
        self._target = Slab(CHUNK_BYTES * 2 * READER_THREADS)
        self._matrices = itertools.cycle(matrices)
        self._dtype, self._columns = matrices[0].dtype, matrices[0].shape[1]

    def contention(self) -> Contention:
        """Medians of some trials, with one row: with four the shares were the same (docs/log.md)."""
        trials = []
        self._rates(multiply=True, read=True)
        for _ in range(SHARE_TIMES):
            products, _ = self._rates(multiply=True, read=False)
            _, nbytes = self._rates(multiply=False, read=True)
            some_products, some_bytes = self._rates(multiply=True, read=True)
            trials.append((min(1.0, some_bytes / nbytes), min(1.0, some_products / products)))
        return Contention(median(disk for disk, _ in trials), median(compute for _, compute in trials))

    def _rates(self, *, multiply: bool, read: bool) -> tuple[float, float]:
        """Products and bytes read per second."""
        import torch

        hidden = torch.ones((1, self._columns), dtype=self._dtype)
        products, before = 0, self._metrics.counters().read_bytes
        begin_s = now_s = time.perf_counter()
        while now_s - begin_s < SHARE_SECONDS:
            while read and len(self._under_way) < READER_THREADS:
                self._submit()
            if multiply:
                torch.nn.functional.linear(hidden, next(self._matrices))
                products += 1
            else:
                self._under_way[0].wait()
            while self._under_way and self._under_way[0].ready:
                self._under_way.popleft()
            now_s = time.perf_counter()
        nbytes = self._metrics.counters().read_bytes - before
        while self._under_way:
            self._under_way.popleft().wait()
        return products / (now_s - begin_s), nbytes / (now_s - begin_s)

    def _submit(self) -> None:
        from headrace.store import Read

        piece = Read("probe", next(self._places), CHUNK_BYTES, CHUNK_BYTES, (), next(self._slots) * CHUNK_BYTES)
        self._under_way.append(self._reader.submit([piece], self._target.address, "probe", keep=self._target))


# --- accelerator ----------------------------------------------------------------------------------------------------


def _accelerator() -> Accelerator | None:
    """The first one that torch sees, measured."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    from headrace.copying.accelerator import open_accelerator
    from headrace.copying.rates import measure

    device = open_accelerator(torch.device("cuda:0"))
    assert device is not None
    measured = measure(device, copy_bytes=COPY_BYTES, side=DEVICE_SIDE)
    return replace(measured, name=torch.cuda.get_device_name(device.torch_device))
