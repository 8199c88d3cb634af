"""A module that is in memory, cut into weights that can move. Knows no checkpoint, no backend and no file.

Ties are found by memory, not by name: parameters whose bytes overlap are one weight, whatever their shapes, strides and
dtypes, and each sees it afterwards as it did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from headrace.blocks import Block, Form, Site, Weight, find_stacks, named_sites, span_bytes, tensor_view
from headrace.core import TENSOR_ALIGNMENT
from headrace.errors import CannotOffload


@dataclass(eq=False)
class Live:
    """A weight and the parameters of the user that it was made of."""

    weight: Weight
    bytes: torch.Tensor | None
    """1-d uint8 over its memory; None once it was released, and for what cannot move."""
    originals: dict[Site, nn.Parameter] = field(default_factory=dict)
    device: torch.device = field(init=False)
    """Where it was."""

    def __post_init__(self) -> None:
        self.device = next(iter(self.originals.values())).device

    @property
    def movable(self) -> bool:
        return self.bytes is not None

    def release(self) -> None:
        """Drop the data; whoever holds one of the parameters still holds a parameter, empty for now."""
        self.bytes = None
        for original in self.originals.values():
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)

    def restore(self, memory: torch.Tensor) -> None:
        """Give the user's parameters their data back, as views of `memory` (1-d uint8), and put them at their sites.

        A site that holds something else by now was changed by the user and is left alone.
        """
        self.bytes = memory
        for form in self.weight.forms:
            for site in form.sites:
                self.originals[site].data = tensor_view(memory, form.offset, form.meta)
                if site.module._parameters.get(site.attribute) is form.meta:
                    site.bind(self.originals[site])


def lives(root: nn.Module) -> list[Live]:
    """Every weight of `root`, once. Raises: CannotOffload."""
    moving: list[tuple[nn.Parameter, list[Site]]] = []
    fixed: list[Live] = []
    parameters = {id(parameter): parameter for parameter in root.parameters()}
    for identity, sites in named_sites(root).items():
        parameter = parameters[identity]
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CannotOffload(
                reason=f"{sites[0].name} has no shape yet",
                suggestion="Run the module once, so that its lazy layers get their weights, then offload it.",
            )
        if parameter.is_meta:
            raise CannotOffload(
                reason=f"{sites[0].name} is on the meta device and has no data",
                suggestion="Load its weights first; of a checkpoint, headrace.load() never has all of them in memory.",
            )
        if _is_plain(parameter):
            moving.append((parameter, sites))
        else:
            weight = Weight(tuple(sites), parameter, ())
            fixed.append(Live(weight, None, dict.fromkeys(sites, parameter)))
    return [*(_joined(group) for group in _overlapping(moving)), *fixed]


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether its bytes are all there is to it. Subclasses (quantized weights) know more than we would bring back."""
    data = parameter.data
    return type(parameter) is nn.Parameter and type(data) is torch.Tensor and data.layout == torch.strided


def _overlapping(
    parameters: Sequence[tuple[nn.Parameter, list[Site]]],
) -> list[list[tuple[nn.Parameter, list[Site]]]]:
    """Groups whose bytes overlap, in the order of their first members."""
    order = {id(parameter): number for number, (parameter, _) in enumerate(parameters)}
    by_place = sorted(parameters, key=lambda entry: (str(entry[0].device), entry[0].data_ptr(), order[id(entry[0])]))
    groups: list[list[tuple[nn.Parameter, list[Site]]]] = []
    end, device = 0, None
    for parameter, sites in by_place:
        begin, nbytes = parameter.data_ptr(), span_bytes(parameter)
        if nbytes and groups and parameter.device == device and begin < end:
            groups[-1].append((parameter, sites))
        else:
            groups.append([(parameter, sites)])
            end = 0
        if nbytes:
            end, device = max(end, begin + nbytes), parameter.device
    for group in groups:
        group.sort(key=lambda entry: order[id(entry[0])])
    return sorted(groups, key=lambda group: order[id(group[0][0])])


def _joined(group: Sequence[tuple[nn.Parameter, list[Site]]]) -> Live:
    first = group[0][0]
    storage = first.untyped_storage()
    begin = min(parameter.data_ptr() for parameter, _ in group)
    end = max(parameter.data_ptr() + span_bytes(parameter) for parameter, _ in group)
    # From an aligned place on, so that every form keeps its alignment; but not from before the storage.
    begin = max(storage.data_ptr(), begin // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT) if end > begin else begin
    originals: dict[Site, nn.Parameter] = {}
    sites_of: dict[tuple[object, ...], list[Site]] = {}
    for parameter, sites in group:
        key = (parameter.data_ptr() - begin, parameter.dtype, tuple(parameter.shape), parameter.stride())
        sites_of.setdefault(key, []).extend(sites)
        originals |= dict.fromkeys(sites, parameter)
    forms = [_form(tuple(sites), originals[sites[0]], begin) for sites in sites_of.values()]
    weight = Weight(forms[0].sites, forms[0].meta, (), tuple(forms[1:]), forms[0].offset)
    memory = torch.empty(0, dtype=torch.uint8, device=first.device)
    memory.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,))
    return Live(weight, memory, originals)


def _form(sites: tuple[Site, ...], parameter: nn.Parameter, begin: int) -> Form:
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    offset = parameter.data_ptr() - begin if parameter.numel() else 0
    return Form(sites, nn.Parameter(meta, requires_grad=False), offset)


def cut(root: nn.Module, blocks: str | Sequence[str | nn.Module] | None, found: Sequence[Live]) -> list[Block]:
    """The blocks of `root` that may move, each with the weights that only it uses.

    `blocks`: a dotted name of a list of modules, or of one module; several of those; the modules themselves; None for
    every list of modules that is found. Raises: CannotOffload.
    """
    modules = _found(root) if blocks is None else _named(root, [blocks] if isinstance(blocks, str) else blocks)
    claimed: set[Weight] = set()
    made = []
    for name, module in modules:
        inside = set(module.modules())
        own = []
        for live in found:
            sites = (site for form in live.weight.forms for site in form.sites)
            if live.movable and live.weight not in claimed and all(site.module in inside for site in sites):
                own.append(live.weight)
        claimed.update(own)
        if own:
            made.append(Block(name, module, tuple(own)))
    if not made:
        raise CannotOffload(
            reason="no weight belongs to just one of its blocks",
            suggestion="Name other blocks (blocks=): modules that run one after the other and hold the weights.",
        )
    return made


def _found(root: nn.Module) -> list[tuple[str, nn.Module]]:
    found = [(f"{name}.{index}", child) for name, stack in find_stacks(root) for index, child in enumerate(stack)]
    if found:
        return found
    if isinstance(root, nn.Sequential):
        return list(root.named_children())
    sequences = [(name, module) for name, module in root.named_modules() if isinstance(module, nn.Sequential)]
    found = [(f"{name}.{index}", child) for name, sequence in sequences[:1] for index, child in enumerate(sequence)]
    if not found:
        raise CannotOffload(
            reason="it has no list of modules (ModuleList, Sequential)",
            suggestion="Say what moves: blocks=['encoder', 'decoder'] names modules that run one after the other.",
        )
    return found


def _named(root: nn.Module, blocks: Sequence[str | nn.Module]) -> list[tuple[str, nn.Module]]:
    names = {module: name for name, module in root.named_modules()}
    named: list[tuple[str, nn.Module]] = []
    for block in blocks:
        module = _module(root, block) if isinstance(block, str) else block
        if module not in names:
            raise CannotOffload(
                reason=f"a {type(module).__name__} among the blocks is not part of it",
                suggestion="Pass modules that model.named_modules() lists.",
            )
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            named += [(f"{names[module]}.{index}".lstrip("."), child) for index, child in enumerate(module)]
        else:
            named.append((names[module], module))
    return list(dict.fromkeys(named))


def _module(root: nn.Module, name: str) -> nn.Module:
    import difflib

    modules: dict[str, nn.Module] = dict(root.named_modules())
    if name not in modules:
        lists = [name for name, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        near = difflib.get_close_matches(name, modules, n=1) or lists[:3] or list(modules)[1:4]
        raise CannotOffload(reason=f"it has no module named {name!r}", suggestion=f"Did you mean {' or '.join(near)}?")
    return modules[name]
