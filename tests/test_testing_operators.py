"""Which memory an operator reads and writes, in autograd's words and in those of inference mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.testing.kernels import KernelMode
from headrace.testing.operators import Call, extent, tensors_in


def seen(run: Callable[[], object]) -> list[Call]:
    """The operators with data that run, from first to last."""
    calls: list[Call] = []

    def launch(call: Call) -> Any:
        if not call.touches_no_data:
            calls.append(call)
        return call.run()

    with KernelMode(launch):
        run()
    return calls


def used(calls: list[Call], tensor: torch.Tensor) -> str:
    """`r` and `w` for each use of this memory."""
    at = tensor.data_ptr()
    uses = (access for call in calls for access in call.accesses() if access.tensor.data_ptr() == at)
    return " ".join("r" * access.reads + "w" * access.writes for access in uses)


X = torch.arange(12.0).reshape(3, 4)
INDEX = torch.tensor([0, 2])

# What is run on a tensor of 3 x 4, and how it is used.
USES: list[tuple[str, Callable[[torch.Tensor], object], str]] = [
    ("sum", lambda x: x.sum(), "r"),
    ("a list", lambda x: torch.cat([X, x]), "r"),
    ("by keyword", lambda x: torch.add(input=X, other=x), "r"),
    ("matmul", lambda x: X @ x.T, "r"),
    ("linear", lambda x: nn.functional.linear(X, x), "r"),
    ("in place", lambda x: x.add_(1), "rw"),
    ("a row in place", lambda x: x[0].mul_(2), "rw"),
    ("copy_", lambda x: x.copy_(X), "w"),
    ("copy_ from", lambda x: torch.empty(3, 4).copy_(x), "r"),
    ("fill_", lambda x: x.fill_(3), "w"),
    ("out", lambda x: torch.add(X, 1, out=x), "w"),
    ("rows", lambda x: x[INDEX], "r"),
    ("rows in place", lambda x: x.index_add_(0, INDEX, X[:2]), "rw"),
    ("another dtype", lambda x: x.to(torch.float16), "r"),
    ("the same dtype", lambda x: x.to(torch.float32), ""),
    ("a copy for reshape", lambda x: x.T.reshape(12), "r"),
    ("contiguous", lambda x: x.T.contiguous(), "r"),
    ("views", lambda x: x.T.unsqueeze(0)[..., 1:].view_as(x.T.unsqueeze(0)[..., 1:]).detach(), ""),
    ("shape alone", lambda x: (torch.empty_like(x), torch.zeros_like(x), x.new_empty(3), x.shape, len(x)), ""),
]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
@pytest.mark.parametrize(("run", "uses"), [use[1:] for use in USES], ids=[use[0] for use in USES])
def test_uses(run: Callable[[torch.Tensor], object], uses: str, inference: bool) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        x = X.clone()
        assert used(seen(lambda: run(x)), x) == uses


def test_a_module_computes_the_same_under_the_mode() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    hidden = torch.randn(2, 5, 16)
    with torch.inference_mode():
        results: list[torch.Tensor] = []
        calls = seen(lambda: results.append(layer(hidden)))
        assert torch.equal(results[0], layer(hidden))
    assert all("r" in used(calls, parameter) for parameter in layer.parameters())


def test_what_the_host_waits_for() -> None:
    x = torch.tensor([1.0, 0.0])
    for run in (x.sum().item, x.nonzero, lambda: torch.equal(x, x), lambda: x[x > 0], lambda: bool(x[0])):
        assert any(call.waits for call in seen(run))
    assert not any(call.waits for call in seen(lambda: (x.sum(), x + 1, x.argmax())))


def test_extents() -> None:
    x = torch.zeros(4, 6)
    at = x.data_ptr()
    assert extent(x) == (at, 96)
    assert extent(x[1:3]) == (at + 24, 48)
    assert extent(x[1:3, 2:4]) == (at + 32, 32), "with what lies in between"
    assert extent(x.T) == (at, 96)
    assert extent(x[:0])[1] == 0
    assert extent(torch.zeros(1).expand(5))[1] == 4


def test_tensors_in_nested_results() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert [tensor is one or tensor is two for tensor in tensors_in((one, [two, None, 3]))] == [True, True]
