"""torch.compile over an offloaded module: what blocks compute is compiled, and each run finds the weights it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_modules import WIDTH, random, same
from tiny_offloads import groups, proves
from torch import nn

from headrace.offloading import offload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gradients")]

BLOCKS = 5


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.copy_(random(WIDTH, WIDTH, seed=index) / 5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) + hidden


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Sequential(*map(Layer, range(BLOCKS))), nn.Linear(WIDTH, 3)).eval()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting(called: list[set[str]]) -> Callable[..., Any]:
    """A compiler that notes what each of its graphs calls, and runs them as they are."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.append({node.name.rstrip("_0123456789") for node in graph.graph.nodes if node.op.startswith("call")})
        return graph.forward

    return compile_graph


@pytest.mark.parametrize("step", [1, 2, BLOCKS])
def test_blocks_are_compiled_and_their_hooks_are_not(step: int) -> None:
    resident, module = model(), model()
    graphs: list[set[str]] = []
    with offload(module, groups(1, 1, step), blocks="1") as handle:
        compiled = torch.compile(module, backend=counting(graphs))
        for rows in (1, 1, 3, 1):
            x = random(rows, WIDTH, seed=rows)
            assert same(compiled(x), resident(x))
        assert proves(handle)
        assert handle.statistics().blocks_run == 4 * BLOCKS
    assert {"linear", "tanh", "add"} in graphs
    assert set.union(*graphs) == {"linear", "tanh", "add"}


def test_a_compiled_module_is_offloaded_afterwards_and_brought_back() -> None:
    resident, module = model(), model()
    graphs: list[set[str]] = []
    compiled = torch.compile(module, backend=counting(graphs))
    x = random(2, WIDTH, seed=1)
    assert same(compiled(x), resident(x))
    handle = offload(module, groups(1), blocks="1")
    for _ in range(3):
        assert same(compiled(x), resident(x))
    assert proves(handle)
    handle.close()
    assert same(compiled(x), resident(x))


# torch's own compiler uses what torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_that_trace_through_weights(backend: str) -> None:
    """These take weights as inputs of their graphs: a graph that kept one would compute with another block's."""
    resident, module = model(), model()
    with offload(module, groups(1), blocks="1") as handle:
        compiled = torch.compile(module, backend=backend)
        for seed in range(3):
            x = random(2, WIDTH, seed=seed)
            torch.testing.assert_close(compiled(x), resident(x))
        assert proves(handle)


def test_asking_for_one_graph_changes_no_result() -> None:
    resident, module = model(), model()
    with offload(module, groups(1), blocks="1") as handle:
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        for _ in range(3):
            assert same(compiled(random(1, WIDTH)), resident(random(1, WIDTH)))
        assert proves(handle)
