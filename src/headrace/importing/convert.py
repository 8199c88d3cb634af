"""What a GGUF file means to transformers: its config, its tokenizer, and its tensors under their own names.

Knows nothing of where the result goes or how it is written. Names and layouts are transformers' (its own loading of
GGUF files), numbers are gguf's (`gguf.quants`); what is ours is that only one tensor is in memory at a time, and that
nothing is dropped in silence: a tensor without a place in the model, or a model weight without a tensor, is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CorruptGguf, HeadraceError, MissingPackage
from headrace.importing.header import GgufHeader, GgufTensor, write_outline
from headrace.importing.rope import UnknownScaling, stretch_positions
from headrace.importing.writer import TensorSpec
from headrace.sizing.gguf import config_of, why_impossible

_PIECE_BYTES = 8 * 2**20
"""Of float32 numbers: rows are decoded and written in pieces of about this size."""
_AS_STORED = ("token_embd.weight", "output.weight")
"""The largest tensors; no architecture's processing touches them, so they never have to be in memory whole."""
_COMPUTED = (".attn_rot_embd.weight", ".rope_freqs.weight")
"""Tables that every model computes from its config."""
_ALSO_SHAPES = (
    ("attention.key_length", "head_dim"),
    ("context_length", "max_position_embeddings"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
"""Metadata that transformers' reading leaves at the default of its config class for some architectures."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<turn|>")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the numbers of one model weight come from; a fused one (gate and up) has several."""

    tensors: tuple[GgufTensor, ...]


class GgufModel:
    """A GGUF file as a transformers model: config, tokenizer and a stream of tensors. Raises CorruptGguf.

    Peak memory of the stream: the largest tensor that needs another layout, as float32, twice.
    """

    def __init__(self, file: Path, header: GgufHeader, scratch: Path) -> None:
        self.file = file
        self.header = header
        _require_packages()
        self._check_ranges()
        with self._foreign("its metadata does not describe a model that transformers can build"):
            self.config = self._read_config(scratch)
            table = next((tensor for tensor in header.tensors if tensor.name == "rope_freqs.weight"), None)
            divisors = None if table is None else next(self._decode(table))
            stretch_positions(self.config, header, divisors)
            self.model = model = _meta_model(self.config)
            self._mapping, self._processor = self._read_mapping(model)
        self.torch_dtype, self.dtype = self._choose_dtype()
        self.config.dtype = self.torch_dtype
        self.config.architectures = [type(model).__name__]
        self._sources: dict[str, _Source] = {}
        self.tensors = self._plan(model)

    def save_metadata(self, directory: Path) -> None:
        """Write config.json, generation_config.json and the tokenizer, with its chat template."""
        with self._foreign("its tokenizer cannot be converted"):
            tokenizer = self._tokenizer()
        self.config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        self._generation_config(tokenizer).save_pretrained(directory)

    def pieces(self, spec: TensorSpec) -> Iterator[Any]:
        """The bytes of one model weight, as buffers of a few MiB in order."""
        import torch

        for piece in self.numbers(spec):
            yield piece.to(self.torch_dtype).contiguous().reshape(-1).view(torch.uint8).numpy()

    def numbers(self, spec: TensorSpec) -> Iterator[Any]:
        """One model weight as float32 tensors of whole rows, of a few MiB in order."""
        import torch

        tensors = self.tensors_of(spec.name)
        if tensors[0].name in _AS_STORED:
            yield from map(torch.from_numpy, self._decode(tensors[0]))
            return
        whole = self._process(spec, tensors)
        step = max(1, _PIECE_BYTES // max(1, 4 * math.prod(spec.shape[1:])))
        yield from (whole[start : start + step] for start in range(0, len(whole), step))

    def tensors_of(self, name: str) -> tuple[GgufTensor, ...]:
        """The file's tensors that a model weight is made of."""
        return self._sources[name].tensors

    def arranged(self, tensor: GgufTensor, numbers: Any) -> Any | None:
        """What becomes of a matrix with these numbers in the place of a tensor of the file; None if nothing does."""
        if tensor.name in _AS_STORED:
            return numbers
        with self._foreign(f"its tensor {tensor.name!r} cannot be converted"):
            result = self._processor.process(
                weights=numbers, name=tensor.name, tensor_key_mapping=self._mapping, parsed_parameters={"tensors": {}}
            )
        return None if result.name is None else result.weights

    # --- config and names -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _foreign(self, what: str) -> Iterator[None]:
        """Other people's parsers raise whatever the bytes lead them to; all of it means that the file is no good."""
        try:
            yield
        except (HeadraceError, MemoryError):
            raise
        except UnknownScaling as error:
            raise self._corrupt(str(error)) from error
        except Exception as error:
            raise self._corrupt(f"{what} ({type(error).__name__}: {_first_line(error)})") from error

    def _corrupt(self, reason: str) -> CorruptGguf:
        return CorruptGguf(file=str(self.file), reason=reason)

    def _read_config(self, scratch: Path) -> Any:
        fast = _late("transformers.integrations.gguf").GGUF_CONFIG_ARCHS
        slow = _late("transformers.modeling_gguf_pytorch_utils").GGUF_SUPPORTED_ARCHITECTURES
        architecture = self.header.architecture
        known = {*slow, *fast, "qwen2moe", "qwen3moe", "gpt-oss", "minimax-m2"}
        if architecture not in known:
            raise self._corrupt(f"transformers cannot read the GGUF architecture {architecture!r}")
        # Before transformers sees it, whose configs list their layers one by one.
        self._refuse_impossible(
            config_of(architecture, self.header.metadata, self.header.rows, self.header.vocabulary_size)
        )
        # Beside the file may lie the config of another model, so transformers gets to see a directory of its own.
        view = scratch / "model.gguf"
        if architecture in fast:
            view.symlink_to(self.file.resolve())
        else:
            write_outline(self.file, self.header, view)
        config = _late("transformers").AutoConfig.from_pretrained(scratch, gguf_file=view.name, local_files_only=True)
        vars(config).pop("_model_name_or_path", None)  # the name of whoever made the file
        for key, name in _ALSO_SHAPES:
            value = self.header.metadata.get(f"{architecture}.{key}")
            if isinstance(value, int) and hasattr(config, name) and not hasattr(config, f"global_{name}"):
                setattr(config, name, value)
        self._refuse_impossible(config.to_dict())
        return config

    def _refuse_impossible(self, config: Mapping[str, Any]) -> None:
        if why := why_impossible(config):
            raise self._corrupt(why)

    def _read_mapping(self, model: Any) -> tuple[dict[str, str], Any]:
        theirs = _late("transformers.modeling_gguf_pytorch_utils")
        kind = theirs.TENSOR_PROCESSORS.get(self.header.architecture, theirs.TensorProcessor)
        processor = kind(config=self.config.to_dict())
        return theirs.get_gguf_hf_weights_map(_Names(model), processor), processor

    def _target(self, name: str) -> str | None:
        return self._mapping.get(name) or self._mapping.get(name.removesuffix(".weight"))

    # --- tensors --------------------------------------------------------------------------------------------------

    def _check_ranges(self) -> None:
        """Every tensor lies within the file, in a quantization that can be decoded."""
        import numpy as np
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        seen: set[str] = set()
        for tensor in self.header.tensors:
            if tensor.name in seen:
                raise self._corrupt(f"its tensor {tensor.name!r} is there twice")
            seen.add(tensor.name)
            try:
                quantization = GGMLQuantizationType(tensor.type_id)
                items, nbytes = GGML_QUANT_SIZES[quantization]
                dequantize(np.zeros((1, nbytes), np.uint8), quantization)
            except (ValueError, KeyError, NotImplementedError) as error:
                raise self._corrupt(f"its tensor {tensor.name!r} has the unsupported type {tensor.type_id}") from error
            if not tensor.shape or tensor.shape[-1] % items:
                raise self._corrupt(f"its tensor {tensor.name!r} has the impossible shape {list(tensor.shape)}")
            end = tensor.offset + math.prod(tensor.shape) // items * nbytes
            if end > self.header.file_bytes:
                raise self._corrupt(
                    f"it is cut off: {tensor.name!r} ends at {end}, the file at {self.header.file_bytes}"
                )

    def _choose_dtype(self) -> tuple[Any, str]:
        import torch
        from gguf.constants import GGMLQuantizationType as Quantization

        types = {tensor.type_id for tensor in self.header.tensors}
        if types == {Quantization.F32}:
            return torch.float32, "F32"
        if types <= {Quantization.F32, Quantization.F16}:
            return torch.float16, "F16"
        return torch.bfloat16, "BF16"

    def _plan(self, model: Any) -> tuple[TensorSpec, ...]:
        """Every weight of the model once, in the model's order, and the tensors it comes from."""
        sources: dict[str, list[GgufTensor]] = {}
        homeless = []
        for tensor in self.header.tensors:
            if target := self._target(tensor.name):
                sources.setdefault(target, []).append(tensor)
            elif not f".{tensor.name}".endswith(_COMPUTED):
                homeless.append(tensor.name)
        if homeless:
            raise self._corrupt(f"{len(homeless)} of its tensors have no place in the model ({_few(homeless)})")
        wanted = _untied(model)
        if missing := [name for name in wanted if name not in sources]:
            raise self._corrupt(f"{len(missing)} weights of the model are not in it ({_few(missing)})")
        self._sources = {name: _Source(tuple(sources[name])) for name in wanted}
        for name, shape in wanted.items():
            have, want = sum(math.prod(tensor.shape) for tensor in sources[name]), math.prod(shape)
            if have != want:
                raise self._corrupt(f"its weights for {name!r} are {have} numbers, and the model has {want} there")
        return tuple(TensorSpec(name, self.dtype, shape) for name, shape in wanted.items())

    def _process(self, spec: TensorSpec, tensors: tuple[GgufTensor, ...]) -> Any:
        """One model weight whole, in the model's layout, as float32."""
        import numpy as np
        import torch

        done: dict[str, Any] = {}
        for tensor in tensors:
            numbers = np.empty(tensor.shape, np.float32)
            flat, start = numbers.reshape(-1), 0
            for piece in self._decode(tensor):
                flat[start : start + piece.size] = piece.reshape(-1)
                start += piece.size
            with self._foreign(f"its tensor {tensor.name!r} cannot be converted"):
                result = self._processor.process(
                    weights=numbers,
                    name=tensor.name,
                    tensor_key_mapping=self._mapping,
                    parsed_parameters={"tensors": done},
                )
            if result.name is not None:
                done[spec.name] = torch.from_numpy(np.asarray(result.weights, dtype=np.float32))
        whole = done.get(spec.name)
        if whole is None or tuple(whole.shape) != spec.shape:
            shape = None if whole is None else list(whole.shape)
            raise self._corrupt(f"{tensors[0].name!r} became {shape}, and the model has {list(spec.shape)} there")
        return whole

    def _decode(self, tensor: GgufTensor) -> Iterator[Any]:
        """The numbers of a tensor as float32, in pieces of whole rows."""
        import numpy as np
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        quantization = GGMLQuantizationType(tensor.type_id)
        items, nbytes = GGML_QUANT_SIZES[quantization]
        row_items = tensor.shape[-1]
        row_bytes = row_items // items * nbytes
        rows = math.prod(tensor.shape[:-1])
        step = max(1, _PIECE_BYTES // max(1, 4 * row_items))
        one_row = (row_items,) if len(tensor.shape) == 1 else None
        for start in range(0, rows, step):
            count = min(step, rows - start)
            raw = self.read(tensor, tensor.offset + start * row_bytes, count * row_bytes)
            with np.errstate(all="ignore"):  # broken files hold infinities; what they decode to is theirs
                yield dequantize(raw.reshape(count, row_bytes), quantization).reshape(one_row or (count, row_items))

    def read(self, tensor: GgufTensor, offset: int, nbytes: int) -> Any:
        """Bytes of the file, uint8. Raises: CorruptGguf."""
        import numpy as np

        try:
            raw = np.fromfile(self.file, np.uint8, nbytes, offset=offset)
        except OSError as error:
            raise self._corrupt(f"reading {nbytes} bytes at offset {offset} failed: {error.strerror}") from error
        if raw.size != nbytes:
            raise self._corrupt(f"it was cut off while it was read, in {tensor.name!r} at offset {offset + raw.size}")
        return raw

    # --- tokenizer and generation ---------------------------------------------------------------------------------

    def _tokenizer(self) -> Any:
        """What AutoTokenizer makes of the file, without its second slow walk through the vocabulary."""
        theirs = _late("transformers.integrations.gguf")
        architecture, vocabulary, settings = theirs.get_gguf_tokenizer(str(self.file))
        backend, more = theirs.convert_gguf_tokenizer(architecture, vocabulary)
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit:
            settings["model_max_length"] = limit
        return _late("transformers").PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)

    def _generation_config(self, tokenizer: Any) -> Any:
        """Greedy, and stopping at every token that the file or its chat template ends a turn with."""
        ends = [self.config.eos_token_id, tokenizer.eos_token_id]
        ends += [self.header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")]
        template = tokenizer.chat_template or ""
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        for token in _END_OF_TURN:
            token_id = tokenizer.convert_tokens_to_ids(token)
            if token in template and token_id in special:
                ends.append(token_id)
        flat = [item for end in ends for item in (end if isinstance(end, list) else [end]) if item is not None]
        unique = list(dict.fromkeys(flat))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (unique or [None])[0]
        return _late("transformers").GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=unique[0] if len(unique) == 1 else unique or None,
            pad_token_id=pad,
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the chatter of transformers and gguf: what matters of it becomes an error here."""
    loggers = [logging.getLogger(name) for name in ("transformers", "gguf")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL + 1)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _late(module: str) -> Any:
    """A module that is imported only when an import really happens, and whose types are not to be relied on."""
    return importlib.import_module(module)


def _require_packages() -> None:
    for package in ("torch", "transformers", "gguf"):
        try:
            _late(package)
        except ImportError as error:
            raise MissingPackage(package=package, purpose="Importing a .gguf file", extra="engine") from error


class _Names:
    """A model as far as naming its tensors goes: itself and its base model.

    transformers would go on into every submodule, to find nothing more, and build gguf's table of names for each.
    """

    def __init__(self, module: Any, depth: int = 1) -> None:
        self._module = module
        self._depth = depth
        self.config = getattr(module, "config", None)
        self.state_dict = module.state_dict

    def named_children(self) -> list[tuple[str, _Names]]:
        if self._depth == 0:
            return []
        return [(name, _Names(child, self._depth - 1)) for name, child in self._module.named_children()]


def _meta_model(config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return _late("transformers").AutoModelForCausalLM.from_config(config)


def _untied(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that has to be stored: a tied one only under its first name."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: set[int] = set()
    wanted: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in tied and id(tensor) not in seen:
            seen.add(id(tensor))
            wanted[name] = tuple(tensor.shape)
    return wanted


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0].rstrip(".")
