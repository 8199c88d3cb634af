"""A transformers model on the meta device, cut into blocks, with every weight traced to its bytes in the checkpoint.

Knows transformers; does not know where weights will live or how they get there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace import errors
from headrace.blocks import Block, Blocks, Weight, find_stacks, named_sites
from headrace.core import BlockKind, BlockShape, ModelShape, ParamShape, Segment, StoredTensor
from headrace.linears import FoldedLinear, use_fast_rows
from headrace.lowbit.modules import Int4Linear, Int8Embedding, Int8Linear, LowBitLinear
from headrace.origins import collect_weights, trace, untie_different
from headrace.sizing import running
from headrace.sizing.fields import Fields
from headrace.sizing.quantized import foreign
from headrace.sizing.scheme import QUANT_METHOD, UnknownScheme, scheme_of
from headrace.sizing.shape import used_share
from headrace.sizing.stored import copied_share, stored_dtype
from headrace.store import Checkpoint


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model without weights, and how to get each of them."""

    model: nn.Module
    blocks: Blocks
    shape: ModelShape
    dtype: torch.dtype
    converters: Mapping[str, Callable[[], torch.Tensor]]
    """By weight name: what makes a weight that is not stored as the model holds it (cast, fused, transposed)."""
    ignored: tuple[str, ...]
    """Stored tensors that the model has no use for."""
    fast_bytes: int = 0
    """Of the matrices that fast rows are for, if they were asked for."""


def build(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    trust_remote_code: bool = False,
    dequantize: bool = False,
    fast_rows: bool = False,
) -> Skeleton:
    """The model that `directory`'s config describes, on the meta device; buffers are real.

    It runs in the dtype that most of its bytes are stored in: casting would mean work for every byte that streams.
    With `dequantize`, weights that others have quantized become plain ones as they are converted. With `fast_rows`
    single rows in bfloat16 are multiplied by torch's own kernel (`linears`).

    Raises: UnsupportedModel, ForeignQuantization, OtherLayout, TensorMismatch.
    """
    config = _load_config(directory, trust_remote_code)
    settings = _quantization(config)
    reader = _dequantizer(directory, config, settings) if dequantize else None
    if reader is None:
        _check_quantization(directory, settings)
    stored = checkpoint.tensors.values()
    dtype = getattr(torch, stored_dtype(stored)) if reader is None else _dtype_of(config)
    model = _empty_model(directory, config, dtype, trust_remote_code)
    _apply_fp32_rules(model, dtype)
    fast_bytes = use_fast_rows(model) if fast_rows else 0
    sources, ignored = trace(model, checkpoint, reader)
    untie_different(model, checkpoint, sources)
    weights, converters = collect_weights(directory, model, checkpoint, sources)
    blocks = _cut(model, weights)
    shape = dataclasses.replace(_shape(model, blocks, config, dtype), copied_share=copied_share(stored))
    return Skeleton(model, blocks, shape, dtype, converters, tuple(ignored), fast_bytes)


def shape_without_weights(directory: Path, fields: Fields, *, trust_remote_code: bool = False) -> ModelShape:
    """The shape of the model that `directory`'s config describes, with no checkpoint: as if all of it could move.

    Raises: UnsupportedModel.
    """
    config = _load_config(directory, trust_remote_code)
    _check_quantization(directory, _quantization(config))
    dtype = getattr(torch, fields.dtype or "float32")
    model = _empty_model(directory, config, dtype, trust_remote_code)
    _apply_fp32_rules(model, dtype)
    anywhere = StoredTensor("", "", (), Segment("", 0, 0))  # not to be read: a weight that could
    weights = {}
    for identity, sites in named_sites(model).items():
        parameter = sites[0].module._parameters[sites[0].attribute]
        assert parameter is not None
        weights[identity] = Weight(tuple(sites), parameter, (anywhere,))
    return _shape(model, _cut(model, weights), config, dtype)


_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken", "*.spm")
"""Patterns of the files of which a tokenizer has at least one."""


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer. Raises: UnsupportedModel."""
    from transformers import AutoTokenizer

    add = "Put the model's tokenizer.json and tokenizer_config.json beside the weights."
    if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise errors.UnsupportedModel(model=str(directory), reason="it has no tokenizer files", suggestion=add)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise errors.UnsupportedModel(
            model=str(directory),
            reason=f"its tokenizer cannot be loaded ({_first_line(error)})",
            suggestion=add,
        ) from error


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that the model's config allows, if it says."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    value = getattr(text, "max_position_embeddings", None)
    return value if isinstance(value, int) else None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines or isinstance(error, LookupError):  # of those the text is only what was looked up
        return ": ".join([type(error).__name__, *lines[:1]])
    return lines[0][:300]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Its loading chatter is about weights it did not load: ours to load."""
    library = logging.getLogger("transformers")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.setLevel(level)


def _load_config(directory: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise errors.UnsupportedModel(
            model=str(directory),
            reason=f"transformers cannot read its config ({_first_line(error)})",
            suggestion="Upgrade with `pip install -U transformers`, or check config.json.",
        ) from error
    return config


def _quantization(config: Any) -> dict[str, Any]:
    """The config's `quantization_config`; empty if there is none."""
    settings = getattr(config, "quantization_config", None) or {}
    return dict(settings) if isinstance(settings, dict) else dict(settings.to_dict())


def _dequantizer(directory: Path, config: Any, settings: dict[str, Any]) -> Any | None:
    """What tells transformers' conversions to make plain weights; the model itself is then built as a plain one."""
    if not settings or settings.get("quant_method") == QUANT_METHOD:
        return None
    from headrace.lowbit.foreign import UnreadableQuantization, dequantizer

    try:
        made = dequantizer(settings)
    except UnreadableQuantization as unreadable:
        raise errors.UnsupportedModel(
            model=str(directory),
            reason=str(unreadable).rstrip("."),
            suggestion="Take the model's unquantized checkpoint, or a .gguf file of it.",
        ) from None
    del config.quantization_config
    return made


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _check_quantization(directory: Path, settings: dict[str, Any]) -> None:
    """Refuse quantized weights that are not stored as the kernels here read them."""
    if not settings:
        return
    method = settings.get("quant_method")
    if method != QUANT_METHOD:
        raise foreign(str(directory), str(method))
    from headrace.lowbit.packing import layout_here

    try:
        layout = scheme_of(settings).layout
    except UnknownScheme as unknown:
        raise errors.UnsupportedModel(
            model=str(directory), reason=str(unknown), suggestion="Quantize the original again with this Headrace."
        ) from None
    if layout not in ("", here := layout_here()):
        raise errors.OtherLayout(model=str(directory), layout=layout, here=here or "another one")


def _empty_model(directory: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    try:
        with quiet_transformers(), no_init_weights(), init_empty_weights(include_buffers=False):
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, dtype=dtype, trust_remote_code=trust_remote_code)
        model.tie_weights()
        _use_low_bits(model, dtype)
    except Exception as error:
        raise errors.UnsupportedModel(
            model=str(directory),
            reason=f"transformers cannot build a language model from its config ({_first_line(error)})",
            suggestion="Use a checkpoint of a causal language model that this transformers version knows.",
        ) from error
    if (directory / "generation_config.json").exists():
        try:
            with quiet_transformers():
                model.generation_config = GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError) as error:
            raise errors.UnsupportedModel(
                model=str(directory),
                reason=f"its generation_config.json cannot be read ({_first_line(error)})",
                suggestion="Copy it again from where the model came from, or delete it: config.json then decides.",
            ) from error
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None:
        head.__class__ = FoldedLinear
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def _use_low_bits(model: Any, dtype: torch.dtype) -> None:
    """Put modules for weights of few bits where the config says that there are such."""
    settings = getattr(model.config, "quantization_config", None)
    if settings:
        from transformers.quantizers.auto import AutoHfQuantizer

        from headrace.lowbit.quantizer import register

        register()
        AutoHfQuantizer.from_config(settings, pre_quantized=True).preprocess_model(model, dtype=dtype)


def _apply_fp32_rules(model: Any, dtype: torch.dtype) -> None:
    """Some models keep a few weights and buffers in float32 whatever the dtype; from_pretrained sees to that."""
    from transformers.core_model_loading import build_glob_alternation

    kept = model._get_dtype_plan(dtype)
    if not kept:
        return
    pattern, _, _ = build_glob_alternation(list(kept))
    for sites in named_sites(model).values():  # tied ones stay tied
        if pattern.search(sites[0].name):
            raised = nn.Parameter(model.get_parameter(sites[0].name).to(torch.float32), requires_grad=False)
            for site in sites:
                site.bind(raised)
    stored = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in stored and pattern.search(name):
            model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(torch.float32)


# --- cutting into blocks -------------------------------------------------------------------------------------------


def _cut(model: Any, weights: Mapping[int, Weight]) -> Blocks:
    """Embedding table, the layers of every stack, head: in the order of a pass; the rest is fixed.

    A weight belongs to the first block that has all of its sites; one that spans blocks is fixed, except for a head
    tied to the embedding table, which moves as the head and is looked up by rows as the table.
    """
    claimed: set[int] = set()
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers: list[Block] = []
    stacks = find_stacks(model)
    main = max(
        (stack for _, stack in stacks), key=lambda stack: sum(p.numel() for p in stack.parameters()), default=None
    )
    for stack_name, stack in stacks:
        for index, module in enumerate(stack):
            own = _own_weights(module, weights, claimed)
            if own:
                kind: BlockKind = "layer" if stack is main else "tower"
                layers.append(Block(f"{stack_name}.{index}", module, own, kind))
    first, last = _table_and_head(model, table, head, weights, claimed)
    fixed = tuple(weight for identity, weight in weights.items() if identity not in claimed)
    return Blocks((*first, *layers, *last), fixed)


def _own_weights(module: nn.Module, weights: Mapping[int, Weight], claimed: set[int]) -> tuple[Weight, ...]:
    inside = set(module.modules())
    own = []
    for parameter in module.parameters():
        weight = weights.get(id(parameter))
        if weight and id(parameter) not in claimed and all(site.module in inside for site in weight.sites):
            claimed.add(id(parameter))
            own.append(weight)
    return tuple(own)


def _table_and_head(
    model: Any, table: Any, head: Any, weights: Mapping[int, Weight], claimed: set[int]
) -> tuple[list[Block], list[Block]]:
    """The block of the embedding table, and the block of the head (with the table's weight if they are tied)."""
    plain_table = isinstance(table, nn.Embedding) and id(table.weight) in weights
    plain_head = isinstance(head, (nn.Linear, LowBitLinear)) and id(head.weight) in weights
    if plain_table and plain_head and table.weight is head.weight:
        weight = weights[id(table.weight)]
        if not _only_sites(weight, table, head):
            return [], []
        claimed.add(id(table.weight))
        others = _own_weights(head, weights, claimed)  # a bias
        return [], [Block(_name_of(model, head), head, (weight, *others), kind="head", table=table)]
    first: list[Block] = []
    last: list[Block] = []
    if plain_table and _only_sites(weights[id(table.weight)], table):
        claimed.add(id(table.weight))
        tables = (weights[id(table.weight)],)
        first.append(Block(_name_of(model, table), table, tables, kind="embedding", table=table))
    if plain_head and (own := _own_weights(head, weights, claimed)):
        last.append(Block(_name_of(model, head), head, own, kind="head"))
    return first, last


def _only_sites(weight: Weight, *modules: nn.Module) -> bool:
    return all(any(site.module is module for module in modules) for site in weight.sites)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


# --- sizes ---------------------------------------------------------------------------------------------------------


def _shape(model: Any, blocks: Blocks, config: Any, dtype: torch.dtype) -> ModelShape:
    text = Fields(config.to_dict(), type(model).__name__).text
    element = dtype.itemsize
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    share = running.expert_share(text)
    cache = running.cache_shape(text, element)
    return ModelShape(
        blocks=tuple(
            BlockShape(
                block.name,
                tuple(
                    ParamShape(
                        weight.name, weight.nbytes, weight.movable, used_share(weight.name, share), _bits(weight)
                    )
                    for weight in block.weights
                ),
                block.kind,
                gathered=block.kind == "embedding",
            )
            for block in blocks.moving
        ),
        fixed_bytes=sum(weight.nbytes for weight in blocks.fixed) + buffers,
        kv_bytes_per_token=cache.full_bytes_per_token,
        activation_bytes_per_token=running.activation_bytes_per_token(text, element),
        head_bytes=_head_bytes(model),
        head_always_copied=dtype == torch.float16,
        logits_bytes=running.logits_bytes(text, element),
        kv_window_bytes_per_token=cache.window_bytes_per_token,
        kv_window_tokens=cache.window_tokens,
        element_bytes=element,
        dtype=str(dtype).removeprefix("torch."),
        score_bytes=running.score_bytes(text, element),
        query_groups=running.query_groups(text),
        hidden_size=running.hidden_size(text),
    )


def _bits(weight: Weight) -> int:
    """Of a matrix for the kernels of few bits; 0 for what is held in a dtype."""
    site = weight.sites[0]
    if site.attribute != "weight":
        return 0
    return (
        4 if isinstance(site.module, Int4Linear) else 8 if isinstance(site.module, (Int8Linear, Int8Embedding)) else 0
    )


def _head_bytes(model: Any) -> int:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or isinstance(head, FoldedLinear):
        return 0
    return head.weight.numel() * head.weight.element_size()
