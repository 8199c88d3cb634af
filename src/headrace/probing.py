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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from headrace import machine
from headrace.core import (
    CHUNK_BYTES,
    DIRECT_ALIGNMENT,
    HUGE_PAGE_BYTES,
    READER_THREADS,
    Accelerator,
    Link,
    Machine,
    Products,
    Tier,
)
from headrace.errors import InvalidSetting

if TYPE_CHECKING:
    from headrace.copying.disk import Ticket

DISK_SECONDS = 2.0
SHARE_SECONDS = 0.3
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
    with _readable(file) as path:
        disk_rate, is_direct = measure_disk_bytes_per_s(path)
        disk_share, compute_share = _shares(path)
    where = "a file written for it" if file is None else repr(str(file))
    notes.append(f"disk: {'direct' if is_direct else 'buffered'} reads of {where}")
    copied = measure_memory_bytes_per_s()
    notes.append(f"memory: {copied / 1e9:.1f} GB/s read and written by {machine.cores()} threads that copy")
    kernels, why = _kernels(copied)
    notes.append(why)
    accelerator = _accelerator()
    if accelerator is None:
        notes.append("accelerator: torch sees none")
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
            disk_share=disk_share,
            compute_share=compute_share,
            products=kernels.products,
            int8_bytes_per_s=kernels.int8_bytes_per_s,
            int4_bytes_per_s=kernels.int4_bytes_per_s,
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


def _kernels(copied: float) -> tuple[_Kernels, str]:
    """Measured or estimated, and how."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        guessed = _Kernels(copied / 2, machine.cores() * GUESSED_OPERATIONS_PER_CORE_PER_S)
        return guessed, f"processor: estimated from its memory, since {missing[0]} is not installed"
    from headrace.model import measure_expert_overhead_s, measure_overhead_s, measure_wide_overhead_s

    per_layer, per_pass = measure_overhead_s()
    products = {dtype: machine.measure_products(dtype) for dtype in DTYPES}

    def bytes_per_s() -> float:
        return machine.measure_products(DTYPES[0], product_rows=(1,)).rates[0][1]

    measured = _Kernels(
        bytes_per_s=products[DTYPES[0]].rates[0][1],
        operations_per_s=machine.measure_operations_per_s(DTYPES[0]),
        layer_s=max(per_layer, measure_wide_overhead_s(per_pass, bytes_per_s)),
        pass_s=per_pass,
        expert_s=measure_expert_overhead_s(per_layer),
        products=products,
        int8_bytes_per_s=machine.measure_low_bits_per_s(8),
        int4_bytes_per_s=machine.measure_low_bits_per_s(4),
    )
    return (
        measured,
        f"processor: torch's products in {', '.join(DTYPES)}, 8 and 4 bits; tiny models for what layers cost",
    )


def _shares(path: Path) -> tuple[float, float]:
    """What is left of the disk's rate and of the processor's while both are at work, as they are in a streamed pass."""
    if importlib.util.find_spec("torch") is None:
        return 1.0, 1.0
    import torch

    from headrace.copying.disk import DiskReader
    from headrace.copying.slots import Slab
    from headrace.metrics import Metrics
    from headrace.store import Read

    matrices = [torch.full((2048, 2048), 0.5, dtype=torch.bfloat16) for _ in range(16)]
    token = torch.ones((1, 2048), dtype=torch.bfloat16)
    places = [place * CHUNK_BYTES for place in range(path.stat().st_size // CHUNK_BYTES)][:64]
    target = Slab(CHUNK_BYTES * READER_THREADS)
    metrics = Metrics()
    reader = DiskReader({"probe": path}, metrics)

    def rates(*, multiply: bool, read: bool) -> tuple[float, float]:
        """Products and bytes per second."""
        products, before = 0, metrics.counters().read_bytes
        under_way: deque[Ticket] = deque()
        begin_s = now_s = time.perf_counter()
        following = itertools.cycle(places)
        while now_s - begin_s < SHARE_SECONDS:
            while read and len(under_way) < 2 * READER_THREADS:
                slot = len(under_way) % READER_THREADS * CHUNK_BYTES
                piece = Read("probe", next(following), CHUNK_BYTES, CHUNK_BYTES, (), slot)
                under_way.append(reader.submit([piece], target.address, "probe", keep=target))
            if multiply:
                torch.nn.functional.linear(token, matrices[products % len(matrices)])
                products += 1
            elif read:
                under_way[0].wait()
            while under_way and under_way[0].ready:
                under_way.popleft()
            now_s = time.perf_counter()
        done = products / (now_s - begin_s), (metrics.counters().read_bytes - before) / (now_s - begin_s)
        for ticket in under_way:
            ticket.wait()
        return done

    shares = []
    try:
        with torch.inference_mode():
            rates(multiply=True, read=True)
            for _ in range(3):
                products, _ = rates(multiply=True, read=False)
                _, nbytes = rates(multiply=False, read=True)
                some_products, some_bytes = rates(multiply=True, read=True)
                shares.append((min(1.0, some_bytes / nbytes), min(1.0, some_products / products)))
    finally:
        reader.close()
    return median(disk for disk, _ in shares), median(compute for _, compute in shares)


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
