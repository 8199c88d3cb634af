"""Random modules, settings and orders of execution: offloaded and resident give the same bits, whatever happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_modules import same, snapshot
from torch import nn

from headrace import offloading
from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.copying import spill
from headrace.errors import CannotOffload, NothingOffloaded
from headrace.offloading import offload

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (16, 16), (2, 3, 4), (129,)]
LAYOUTS = ["own", "transposed", "strided", "expanded", "slice of one buffer", "overlapping slice", "same bytes"]


class Failure(Exception):
    """Raised from inside of a block."""


class Block(nn.Module):
    """Its output depends on each byte of each of its parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            setattr(self, f"w{number}", parameter)
        self.register_buffer("seen", torch.tensor(0.5))
        self.fails = False

    def forward(self, *, value: torch.Tensor) -> dict[str, torch.Tensor]:
        for _, parameter in sorted(self._parameters.items()):
            flat = parameter.to(torch.float64).flatten()
            weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64)
            value = torch.sin(value + (flat * weights).sum())
        if self.fails:
            raise Failure
        return {"value": value + self.seen}


class Model(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            value = self.blocks[index](value=value)["value"]
        return value


@st.composite
def models(draw: Any) -> Model:
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    count = draw(st.integers(1, 5))
    buffers: dict[torch.dtype, torch.Tensor] = {}
    made: list[nn.Parameter] = []

    def parameter() -> nn.Parameter:
        if made and draw(st.integers(0, 7)) == 0:
            return made[draw(st.integers(0, len(made) - 1))]  # tied, within a block or across
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
        layout = draw(st.sampled_from(LAYOUTS))
        numbers = torch.randint(0, 2 if dtype == torch.bool else 100, (*shape,), generator=dice).to(dtype)
        flat = buffers.setdefault(dtype, torch.randint(0, 2, (4096,), generator=dice).to(dtype))
        if layout == "transposed":
            numbers = numbers.permute(tuple(reversed(range(numbers.dim()))))
        elif layout == "strided" and shape:
            numbers = numbers[..., ::2]
        elif layout == "expanded" and shape:
            numbers = numbers[:1].expand(shape[0] and 4, *shape[1:])
        elif layout in ("slice of one buffer", "overlapping slice"):
            begin = 16 * draw(st.integers(0, 100)) if layout == "overlapping slice" else 300 * min(len(made), 12)
            numbers = flat[begin : begin + numbers.numel()].view(shape)
        elif layout == "same bytes" and made and made[-1].is_contiguous() and made[-1].dtype != torch.bool:
            numbers = made[-1].data.as_strided((made[-1].numel(),), (1,)).view(torch.uint8)
        made.append(nn.Parameter(numbers, requires_grad=False))
        return made[-1]

    return Model([Block([parameter() for _ in range(draw(st.integers(0, 4)))]) for _ in range(count)]).eval()


configs = st.one_of(
    st.builds(
        lambda size, number, step: OffloadConfig(
            prefetch=PrefetchOffloadConfig(
                offload_group_size=size, offload_num_in_group=min(number, size), offload_prefetch_step=step
            )
        ),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 6),
    ),
    st.builds(lambda nbytes: OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=nbytes / 2**30)), st.integers(10, 4000)),
)
passes = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=7), st.one_of(st.none(), st.integers(0, 4))), min_size=1, max_size=4
)


@pytest.fixture(autouse=True, scope="module")
def _cheap_openings() -> Any:
    """Readers of few threads and small pieces, a file in memory: what is tested is not the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "READER_THREADS", 2)
        patch.setattr(offloading, "SMALL_CHUNK_BYTES", 4096)
        patch.setattr(spill, "_directory", lambda: spill.Path("/dev/shm"))
        yield


@settings(max_examples=2000)
@given(models(), configs, passes)
def test_offloaded_is_resident(model: Model, config: OffloadConfig, runs: Any) -> None:
    resident, before = copy.deepcopy(model), snapshot(model)
    try:
        handle = offload(model, config)
    except (NothingOffloaded, CannotOffload):
        assert same(snapshot(model), before)
        return
    assert handle.report().offloaded_bytes > 0
    value = torch.tensor(0.25, dtype=torch.float64)
    with torch.inference_mode():
        for order, failing in runs:
            order = [index for index in order if index < len(model.blocks)]
            for some in (model, resident):
                for index, block in enumerate(some.blocks):
                    block.fails = index == failing
            expected: torch.Tensor | None
            try:
                expected = resident(value, order)
            except Failure:
                expected = None
            if expected is None:
                with pytest.raises(Failure):
                    model(value, order)
            else:
                assert torch.equal(model(value, order), expected)
    for block in model.blocks:
        block.fails = False
    assert same(dict(handle.state_dict()), dict(resident.state_dict()))
    handle.close()
    assert same(snapshot(model), before)
