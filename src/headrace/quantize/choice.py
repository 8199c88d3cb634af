"""Which modules of a model are stored in how many bits. Knows modules and their sizes, no weight.

- Matrices of the layers get what was asked for; with 4 bits, one whose rows are no multiple of 64 gets 8, and so do
  value projections: a few hundredths of the bytes, and of what 4 bits cost an eighth (docs/log.md).
- The embedding table and the head get 8 bits, whatever was asked for: every token goes through them, and they are read
  in 8 bits no slower than a few layers (docs/log.md).
- Norms, biases, routers, towers beside the main stack and what torch has no kernel for (stacked experts, transposed
  matrices) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from headrace.blocks import find_stacks
from headrace.errors import InvalidSetting, NothingToQuantize
from headrace.lowbit.modules import candidates
from headrace.lowbit.packing import layout_here
from headrace.sizing.scheme import BLOCK_ROWS, GROUP_SIZES, Scheme, folded

DEFAULT_GROUP_SIZE = 64
VALUES = ("v_proj",)
"""Last parts of the names of value projections."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last parts of the names of modules that choose experts: small, and a wrong choice costs more than their bytes."""


def choose(
    model: Any, name: str, *, bits: int, group_size: int, bits_of: Callable[[str], int | None] = lambda path: None
) -> Scheme:
    """The scheme for a model on the meta device. `bits_of`: of a matrix in a layer, or None where the rules decide.

    Raises: InvalidSetting, NothingToQuantize.
    """
    modules = dict(candidates(model))
    in_layers = {path: module for path, module in modules.items() if _is_in(path, _main_stack(model))}
    chosen: dict[str, int] = {}
    for path, module in in_layers.items():
        last = path.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last not in _ROUTERS:
            wanted = bits_of(path) or (8 if last in VALUES else bits)
            chosen[path] = 8 if wanted == 4 and module.out_features % BLOCK_ROWS else wanted
    if not chosen:
        raise NothingToQuantize(model=name, reason="the kernels take plain linear modules, and its layers have none")
    _check_group_size(modules, chosen, group_size)
    chosen |= dict.fromkeys(_ends(model, modules), 8)
    others = [path for path, _ in model.named_modules() if path not in chosen]
    layout = layout_here() if 4 in chosen.values() else ""
    return Scheme(bits, group_size, layout, folded(chosen, others))


def _ends(model: Any, modules: dict[str, Any]) -> list[str]:
    """Table and head; if they are one weight, both or neither."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    named = {id(module): path for path, module in modules.items()}
    can = [end for end in ends if id(end) in named]
    left = {id(getattr(end, "weight", None)) for end in ends if end not in can}
    return [named[id(end)] for end in can if id(end.weight) not in left]


def _main_stack(model: nn.Module) -> str:
    """Name of the largest list of layers."""
    stacks = find_stacks(model)
    return max(stacks, key=lambda each: sum(p.numel() for p in each[1].parameters()), default=("", None))[0]


def _is_in(path: str, stack: str) -> bool:
    return bool(stack) and path.startswith(f"{stack}.")


def _check_group_size(modules: dict[str, Any], chosen: dict[str, int], group_size: int) -> None:
    columns = {modules[path].in_features for path, bits in chosen.items() if bits == 4}
    undivided = sorted(count for count in columns if count % group_size)
    if not undivided:
        return
    works = [size for size in GROUP_SIZES if all(count % size == 0 for count in columns)]
    raise InvalidSetting(
        setting="--group-size",
        value=f"{group_size}, and the model has rows of {undivided[0]} numbers",
        allowed="a divisor of the rows' length, and one of " + ", ".join(map(str, GROUP_SIZES)),
        suggestion=" or ".join(map(str, works)) if works else "with --bits 8, which needs no groups",
    )
