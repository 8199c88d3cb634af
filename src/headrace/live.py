"""A module that is in memory, cut into weights that can move. Knows no checkpoint, no backend and no file.

Ties are found by memory, not by name: parameters whose bytes overlap are one weight, whatever their shapes, strides and
dtypes, and each sees it afterwards as it did before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headrace.blocks import Block, Form, Site, Weight, named_sites, span_bytes
from headrace.core import TENSOR_ALIGNMENT, BlockKind
from headrace.errors import CannotOffload

MAIN_SHARE = 4
"""A list of modules that holds at least one part in so many of what the largest one does is a main stack too (an
encoder beside a decoder), to which group rules apply; a smaller one (a stem, a head) is not."""


@dataclass(eq=False)
class Live:
    """A weight and the parameters of the user that it was made of."""

    weight: Weight
    bytes: torch.Tensor | None
    """1-d uint8 over its memory; None once it was released, and for what cannot move."""
    originals: dict[Site, nn.Parameter] = field(default_factory=dict)
    device: torch.device = field(init=False)
    """Where it was."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        original = next(iter(self.originals.values()))
        self.device = original.device
        self.nbytes = _stored_bytes(original) if self.bytes is None else self.weight.nbytes

    @property
    def movable(self) -> bool:
        return self.bytes is not None

    def release(self) -> None:
        """Drop the data, leave what says so at the sites; who holds a parameter holds an empty one for now."""
        self.bytes = None
        for form in self.weight.forms:
            for site in form.sites:
                site.bind(form.meta)
        for original in self.originals.values():
            with torch.inference_mode(original.is_inference()):  # it stays what it is
                original.data = torch.empty(0, dtype=original.dtype, device=original.device)

    @contextlib.contextmanager
    def lent(self, memory: torch.Tensor) -> Iterator[None]:
        """For a while its sites hold parameters that are views of `memory`, where the user has not put others."""
        lent = []
        try:
            for form in self.weight.forms:
                parameter = nn.Parameter(_view(memory, form), form.meta.requires_grad)
                for site in form.sites:
                    if site.module._parameters.get(site.attribute) is form.meta:
                        lent.append((site, form.meta))
                        site.bind(parameter)
            yield
        finally:
            for site, meta in lent:
                site.bind(meta)

    def restore(self, memory: torch.Tensor) -> None:
        """Give the user's parameters their data back, as views of `memory` (1-d uint8), and put them at their sites.

        A site that holds something else by now was changed by the user and is left alone.
        """
        self.bytes = memory
        for form in self.weight.forms:
            for site in form.sites:
                original = self.originals[site]
                with torch.inference_mode(original.is_inference()):
                    original.data = _view(memory, form)
                original.requires_grad = form.meta.requires_grad  # as the user has it by now
                if site.module._parameters.get(site.attribute) is form.meta:
                    site.bind(self.originals[site])


def _view(memory: torch.Tensor, form: Form) -> torch.Tensor:
    """What `form` sees of `memory`: a tensor of its own, for a view would be of inference mode as `memory` is."""
    offset = (memory.storage_offset() + form.offset) // form.meta.itemsize
    view = torch.empty(0, dtype=form.meta.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), offset, form.meta.shape, form.meta.stride())


def lives(root: nn.Module) -> list[Live]:
    """Every weight of `root`, once. Raises: CannotOffload."""
    _check_has_data(root)
    plain: list[Held] = []
    found: list[Live] = []
    parameters = {id(parameter): parameter for parameter in root.parameters()}
    for identity, sites in named_sites(root).items():
        parameter = parameters[identity]
        if _is_plain(parameter):
            plain.append((parameter, sites))
        else:
            found.append(_fixed(parameter, sites))
    others: list[Held] = [(tensor, []) for tensor in _other_tensors(root) if _is_plain(tensor)]
    for group in _overlapping([*plain, *others]):
        mine = [(parameter, sites) for parameter, sites in group if sites]
        if mine and len(mine) == len(group) and _in_one_storage(group):
            found.append(_joined(mine))
        else:  # somebody else looks at the same memory: it would not see what comes back
            found += [_fixed(parameter, sites) for parameter, sites in mine]
    return found


Held = tuple[torch.Tensor, list[Site]]
"""A tensor and where it is a parameter: nowhere, if it is a buffer or a plain attribute."""


def _check_has_data(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotOffload(
                reason=f"{name or 'it'} is a ScriptModule, whose weights cannot be replaced",
                suggestion="Offload the module that it was made of.",
            )
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise CannotOffload(
                reason=f"{name} has no shape yet",
                suggestion="Run the module once, so that its lazy layers get their weights, then offload it.",
            )
        if tensor.is_meta:
            raise CannotOffload(
                reason=f"{name} is on the meta device and has no data",
                suggestion="Load its weights first; of a checkpoint, headrace.load() never has all of them in memory.",
            )


def _fixed(parameter: torch.Tensor, sites: Sequence[Site]) -> Live:
    assert isinstance(parameter, nn.Parameter)
    return Live(Weight(tuple(sites), parameter, ()), None, dict.fromkeys(sites, parameter))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all there is to it. Subclasses (quantized weights) know more than we would bring back."""
    data = tensor.data
    if type(tensor) not in (torch.Tensor, nn.Parameter) or type(data) is not torch.Tensor:
        return False
    if data.layout != torch.strided or data.is_nested or data.is_quantized:
        return False
    return not (data.is_conj() or data.is_neg())


def _other_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """What else is looked at: buffers, tensors in plain attributes or in containers there (`nn.LSTM` has a list)."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            yield from module.layers[0].parameters()  # it asks them whether it may take another way
        for name, value in vars(module).items():
            if name in ("_parameters", "_modules"):
                continue
            inside: Any = value.values() if isinstance(value, dict) else value
            items = list(inside) if isinstance(value, (dict, list, tuple)) else [value]
            yield from (item for item in items if isinstance(item, torch.Tensor))


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Of a tensor that is more than strided bytes: those of the tensors it is made of, as far as they can be seen."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_stored_bytes(getattr(tensor, name)) for name in names)
    if tensor.layout == torch.sparse_coo:
        return _stored_bytes(tensor._indices()) + _stored_bytes(tensor._values())
    return tensor.numel() * tensor.element_size()


def _overlapping(tensors: Sequence[Held]) -> list[list[Held]]:
    """Groups whose bytes overlap, in the order of their first members."""
    order = {id(tensor): number for number, (tensor, _) in enumerate(tensors)}
    by_place = sorted(tensors, key=lambda held: (str(held[0].device), held[0].data_ptr(), order[id(held[0])]))
    groups: list[list[Held]] = []
    end, device = 0, None
    for tensor, sites in by_place:
        begin, nbytes = tensor.data_ptr(), span_bytes(tensor)
        if nbytes and groups and tensor.device == device and begin < end:
            groups[-1].append((tensor, sites))
        else:
            groups.append([(tensor, sites)])
            end = 0
        if nbytes:
            end, device = max(end, begin + nbytes), tensor.device
    for group in groups:
        group.sort(key=lambda held: order[id(held[0])])
    return sorted(groups, key=lambda group: order[id(group[0][0])])


def _in_one_storage(group: Sequence[Held]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor, _ in group}) == 1


def _joined(group: Sequence[Held]) -> Live:
    first = group[0][0]
    storage = first.untyped_storage()
    # Of an empty tensor torch does not tell where it begins.
    begin = min(parameter.data_ptr() or storage.data_ptr() for parameter, _ in group)
    end = max([begin, *(parameter.data_ptr() + span_bytes(parameter) for parameter, _ in group)])
    # From an aligned place on, so that every form keeps its alignment; but not from before the storage.
    begin = max(storage.data_ptr(), begin // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT) if end > begin else begin
    originals: dict[Site, nn.Parameter] = {}
    sites_of: dict[tuple[object, ...], list[Site]] = {}
    for parameter, sites in group:
        assert isinstance(parameter, nn.Parameter)
        key = (
            parameter.data_ptr() - begin,
            parameter.dtype,
            tuple(parameter.shape),
            parameter.stride(),
            parameter.requires_grad,
        )
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
    # It says whether the user's own one needs grad: then a run that autograd would record is refused.
    return Form(sites, nn.Parameter(meta, requires_grad=parameter.requires_grad), offset)


Named = tuple[str, nn.Module, BlockKind]


def cut(root: nn.Module, blocks: str | Sequence[str | nn.Module] | None, found: Sequence[Live]) -> list[Block]:
    """The blocks of `root` that may move, each with the weights that only it uses.

    `blocks`: a dotted name of a list of modules, or of one module; several of those; the modules themselves; None for
    every list of modules that is found. Raises: CannotOffload.
    """
    named = _found(root) if blocks is None else _named(root, [blocks] if isinstance(blocks, str) else blocks)
    claimed: set[Weight] = set()
    made = []
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    for name, module, kind in named:
        inside = {child for child in module.modules() if _always_under(paths[child], paths[module])}
        own = []
        for live in found:
            sites = (site for form in live.weight.forms for site in form.sites)
            if live.movable and live.weight not in claimed and all(site.module in inside for site in sites):
                own.append(live.weight)
        claimed.update(own)
        if next(module.parameters(), None) is not None:  # it counts as a layer, even if nothing of it can move
            made.append(Block(name, module, tuple(own), kind))
    if not any(block.weights for block in made):
        raise CannotOffload(
            reason="no weight belongs to just one of its blocks",
            suggestion="Name other blocks (blocks=): modules that run one after the other and hold the weights.",
        )
    return made


def _always_under(paths: Sequence[str], of_block: Sequence[str]) -> bool:
    """Whether a module at these paths is never reached but through the block: it may be part of others as well."""
    if len(paths) == 1:
        return True
    return all(any(not own or path == own or path.startswith(f"{own}.") for own in of_block) for path in paths)


def _found(root: nn.Module) -> list[Named]:
    stacks = list(_stacks("", root, 2)) or list(_stacks("", root, 1))[:1]
    if not stacks:
        raise CannotOffload(
            reason="it has no list of modules (ModuleList, Sequential) with weights",
            suggestion="Say what moves: blocks=['encoder', 'decoder'] names modules that run one after the other.",
        )
    largest = max(_nbytes(stack) for _, stack in stacks)
    return [
        (name, module, "layer" if _nbytes(stack) * MAIN_SHARE >= largest else "tower")
        for stack_name, stack in stacks
        for name, module in _callable(stack_name, stack, expand=True)
    ]


def _stacks(name: str, module: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of at least so many modules with weights: decoder stacks, towers. In the module's order.

    Not one that is mostly a single module with a list inside (a backbone and a head in a row): that list then.
    """
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        sizes = {child: _nbytes(child) for child in module if _nbytes(child)}
        main = max(sizes, key=lambda child: sizes[child], default=module)
        is_shell = sizes and 2 * sizes[main] > sum(sizes.values()) and any(_stacks("", main, 2))
        if len(sizes) >= least and not is_shell:
            yield name, module
            return
    for child_name, child in module.named_children():
        yield from _stacks(_join(name, child_name), child, least)


def _nbytes(module: nn.Module) -> int:
    return sum(_stored_bytes(parameter) for parameter in module.parameters())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _callable(name: str, module: nn.Module, *, expand: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """`module`; or what is in it, if it is only a container (a ModuleList, a ModuleDict) whose forward nobody calls."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    if has_forward and not (expand and isinstance(module, nn.Sequential)):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _callable(_join(name, child_name), child)


def _named(root: nn.Module, blocks: Sequence[str | nn.Module]) -> list[Named]:
    names = {module: name for name, module in root.named_modules()}
    named: list[Named] = []
    for block in blocks:
        module = _module(root, block) if isinstance(block, str) else block
        if module not in names:
            raise CannotOffload(
                reason=f"a {type(module).__name__} among the blocks is not part of it",
                suggestion="Pass modules that model.named_modules() lists.",
            )
        named += [(name, child, "layer") for name, child in _callable(names[module], module, expand=True)]
    return list(dict.fromkeys(named))


def _module(root: nn.Module, name: str) -> nn.Module:
    import difflib

    modules: dict[str, nn.Module] = dict(root.named_modules())
    if name not in modules:
        lists = [name for name, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        near = difflib.get_close_matches(name, modules, n=1) or lists[:3] or list(modules)[1:4]
        suggestion = f"Did you mean {' or '.join(near)}?" if near else "Pass the modules themselves."
        raise CannotOffload(reason=f"it has no module named {name!r}", suggestion=suggestion)
    return modules[name]
