"""Several tokens per pass: who drafts them, what is counted, and a verification with the bits of plain decoding.

The drafting, the accepting and the cropping of the cache are transformers' assisted generation. Does not know that
weights move.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from headrace.blocks import Blocks
from headrace.lookup import Lookup


def obstacle(model: Any) -> str:
    """Why drafts cannot be verified with `model`; empty if they can."""
    if getattr(model, "_is_stateful", False) or any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=model.config).layers
    ):
        return "it keeps a state that no draft can be taken out of again"
    generation = model.generation_config
    if generation.cache_implementation not in (None, "dynamic"):
        return f"its generation config asks for the cache {generation.cache_implementation!r}, which cannot be cut"
    if generation.use_cache is False or (generation.num_beams or 1) > 1:
        return "its generation config asks for beams, or for no cache"
    text = model.config.get_text_config()
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        return "its layers attend in chunks"
    return ""


# --- drafting -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Of one answer."""

    passes: int = 0
    """The one over the prompt included."""
    drafted: int = 0
    """Tokens that passes verified beside the one they make anyway."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """Who drafts how many tokens for each pass of `model`: a search in the text so far, or a smaller model."""

    tokens: int
    """For a pass, at most."""
    verifier: ByToken
    draft: Any | None = None
    """The smaller model; None is lookup."""
    tokenizers: tuple[Any, Any] | None = None
    """The model's and the draft's, if they differ: then drafts are translated by way of their text."""
    pass_tokens: float | None = None
    """Of lookup: tokens that are computed while a pass waits, or None to draft all that is found."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for transformers' generate."""
        if self.draft is None:
            return {"prompt_lookup_num_tokens": self.tokens}  # has `_generator` asked
        self.draft.generation_config.num_assistant_tokens = self.tokens
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        if self.tokenizers is None:
            return {"assistant_model": self.draft}
        tokenizer, assistant_tokenizer = self.tokenizers
        return {"assistant_model": self.draft, "tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}

    @contextlib.contextmanager
    def drafting(self, model: Any, *, exact: bool) -> Iterator[Counts]:
        """Within it `model.generate` with our arguments counts what it drafts, and verifies it bit for bit if `exact`.

        The pass over the prompt gets no draft: a product over more rows could give the prompt other bits.
        """
        counts = Counts()
        make = model._get_candidate_generator
        verifier = self.verifier if exact else None
        model._get_candidate_generator = lambda *args, **kwargs: _AfterPrompt(
            self._generator(make(*args, **kwargs)), counts, verifier
        )
        log = logging.getLogger("transformers.generation")
        level = log.level
        log.setLevel(logging.ERROR)  # of what it does itself, for each draft, it says that it is deprecated
        try:
            yield counts
        finally:
            log.setLevel(level)
            del model._get_candidate_generator
            self.verifier.is_on = False

    def _generator(self, made: Any) -> CandidateGenerator:
        """What drafts: transformers' generator for a draft model, our own search in the place of its."""
        if self.draft is not None:
            return made  # type: ignore[no-any-return]
        return Lookup(self.tokens, self.pass_tokens, made.eos_token_id, made.max_length)


class _AfterPrompt(CandidateGenerator):
    """Another generator's candidates, counted, and none for the first pass."""

    def __init__(self, inner: Any, counts: Counts, verifier: ByToken | None) -> None:
        self._inner = inner
        self._counts = counts
        self._verifier = verifier
        self.requires_model_outputs = inner.requires_model_outputs

    def get_candidates(self, input_ids: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What the pass that follows verifies."""
        self._counts.passes += 1
        if self._counts.passes == 1:
            self._show_prompt(input_ids, **kwargs)
            return input_ids, None
        if self._verifier is not None:
            self._verifier.is_on = True
        candidates, logits = self._inner.get_candidates(input_ids, **kwargs)
        self._counts.drafted += candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def _show_prompt(self, input_ids: Any, **kwargs: Any) -> None:
        """A draft model has to have seen the prompt by itself before it sees more; the token it adds is not used."""
        if isinstance(self._inner, AssistedCandidateGenerator):
            tokens = self._inner.num_assistant_tokens
            self._inner.num_assistant_tokens = 1
            self._inner.get_candidates(input_ids, **kwargs)
            self._inner.num_assistant_tokens = tokens

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        if self._counts.passes > 1:
            self._inner.update_candidate_strategy(input_ids, scores, num_matches)


# --- verifying ------------------------------------------------------------------------------------------------------


class ByToken:
    """Runs a pass over several tokens block by block, and inside of each block token by token.

    A product over several rows may sum in another order than one over a single row, and then two tokens that nearly tie
    change places. Here each block computes for each token what it would compute if that token came alone, while the
    block's weights are in place: they are read once for all of them, and computed with once for each.

    Guarantees: while `is_on`, logits of a pass over t tokens of one sequence, behind a filled cache, are those of t
    passes over one token each, bit for bit, as long as `together` does not grow.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.is_on = False
        self.together = 0
        """Runs of a module over several tokens at once, because it takes something that cannot be cut by token."""
        modules = {block.module for block in blocks.moving if block.kind in ("layer", "head")}
        modules |= {site.module for weight in blocks.fixed for site in weight.sites}
        for module in modules:
            if not isinstance(module, nn.Embedding):
                self._wrap(module)

    def _wrap(self, module: nn.Module) -> None:
        forward = module.forward
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(forward).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]

        indices = (getattr(each, "layer_idx", None) for each in module.modules())
        place = next((index for index in indices if isinstance(index, int)), None)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or len(args) > len(names):
                return forward(*args, **kwargs)
            return self._run(forward, dict(zip(names, args, strict=False)) | kwargs, place)

        module.forward = run

    def _run(self, forward: Callable[..., Any], arguments: Mapping[str, Any], place: int | None) -> Any:
        hidden = next(iter(arguments.values()), None)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[1] == 1:
            return forward(**arguments)
        tokens = hidden.shape[1]
        if not all(_is_by_token(leaf, tokens) for name, leaf in _leaves(arguments) if not _is_mask(name)):
            self.together += 1
            return forward(**arguments)
        return _joined([forward(**_of_token(arguments, index, place)) for index in range(tokens)])


def _leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, leaf) for name, value in arguments.items() for leaf in pytree.tree_leaves(value))


def _is_mask(name: str) -> bool:
    return name == "attention_mask"


def _is_by_token(leaf: Any, tokens: int) -> bool:
    """Whether it has one row for each token, or is the same for all of them."""
    if not isinstance(leaf, torch.Tensor):
        return True
    return leaf.dim() in (2, 3) and leaf.shape[:2] == (1, tokens)


def _of_token(arguments: Mapping[str, Any], index: int, place: int | None) -> dict[str, Any]:
    """The arguments of a run over that token alone; in memory of its own, since kernels choose by alignment."""

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        return leaf[:, index : index + 1].clone()

    return {
        name: _mask_alone(value, arguments, place) if _is_mask(name) else pytree.tree_map_only(torch.Tensor, cut, value)
        for name, value in arguments.items()
    }


def _mask_alone(mask: Any, arguments: Mapping[str, Any], place: int | None) -> torch.Tensor | None:
    """The mask that transformers gives a token which comes alone: it sees all that its cache has.

    None, but where a sliding window is full: there a mask that masks nothing, and with it another kernel is taken.
    """
    cache = next((value for value in arguments.values() if isinstance(value, Cache)), None)
    if not isinstance(mask, torch.Tensor) or cache is None or place is None:
        return None
    window = getattr(cache.layers[place], "sliding_window", None)
    if window is None or cache.get_seq_length(place) + 1 < window:
        return None
    everything = torch.ones if mask.dtype == torch.bool else torch.zeros
    return everything(1, 1, 1, window, dtype=mask.dtype, device=mask.device)


def _joined(outputs: Sequence[Any]) -> Any:
    """Hidden states of all tokens as one run would have given them."""
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(list(outputs), dim=1)
    return (torch.cat([output[0] for output in outputs], dim=1), *outputs[-1][1:])
