"""How each request of a batch gets its next token: by its own settings and its own seed, whoever else is in the batch.

transformers' continuous batching samples a whole batch with one generator and one set of settings. It does let a
logits processor see the requests, so this one decides for each of them and leaves nothing to choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from headrace.errors import GenerationFailed

LEAST_TEMPERATURE = 1e-5
"""As in vLLM: logits divided by less could be infinite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """vLLM's names and meanings."""

    temperature: float = 1.0
    """0, and what is next to it, takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token and what is added to its logit."""
    seed: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens are reported beside the chosen one."""


def sampling_defaults(config: Any) -> dict[str, Any]:
    """What the checkpoint's generation config says of sampling, as vLLM takes it over."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of the model's own distribution, before temperature and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Row:
    """One request's place in the batch: what it has chosen so far, and how it chooses next.

    Guarantees: the token at a position depends on the logits, the settings, the seed and what was chosen before, and on
    nothing else. Lives on the batching thread; `logprobs` may be read from another one once the token has been told.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.params = params
        self.prompt = torch.tensor(prompt)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.error: GenerationFailed | None = None
        """Why there is no next token: the request ends, and the others of its batch go on."""
        self._warpers = _warpers(params)

    def __deepcopy__(self, memo: Any) -> Row:
        """A request that lost its cache is started again as a copy of itself, and goes on where it was."""
        return self

    def choose(self, scores: torch.Tensor) -> int:
        """The next token, from float32 logits of shape (vocabulary,), which are left as they are.

        Sets `error` if they are no numbers.
        """
        penalized = self._penalized(scores)
        if not bool(penalized.isfinite().any()) or bool(penalized.isnan().any()):
            self.error = GenerationFailed(reason="its logits are not numbers, as with weights that are damaged")
            return 0
        token = self._draw(penalized)
        self.tokens.append(token)
        if self.params.logprobs is not None:
            self.logprobs.append(_logprob(scores, token, self.params.logprobs))
        return token

    def _penalized(self, scores: torch.Tensor) -> torch.Tensor:
        params = self.params
        if params.repetition_penalty != 1.0:
            seen = torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.long)])
            scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen[None], scores[None])[0]
        if self.tokens and (params.frequency_penalty or params.presence_penalty):
            counts = torch.bincount(torch.tensor(self.tokens), minlength=scores.shape[0])
            scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            scores = scores.index_add(0, torch.tensor(tokens), torch.tensor(biases))
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        if self.params.temperature < LEAST_TEMPERATURE:
            return int(scores.argmax())
        unused: Any = None  # these warpers look at the scores alone
        probabilities = self._warpers(unused, scores[None]).softmax(-1)[0]
        # A generator that is seeded for each position needs no state that a restart could lose.
        generator = torch.Generator().manual_seed(_mix(self.params.seed, len(self.tokens)))
        return int(torch.multinomial(probabilities, 1, generator=generator))


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    chosen: Any = LogitsProcessorList()
    if params.temperature != 1 and params.temperature >= LEAST_TEMPERATURE:
        chosen.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chosen.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chosen.append(MinPLogitsWarper(params.min_p))
    made: LogitsProcessorList = chosen
    return made


def _mix(seed: int, position: int) -> int:
    """A 63-bit seed for one position (splitmix64): neighbours of either have nothing in common."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position + 1) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) % 2**63


def _logprob(scores: torch.Tensor, token: int, top: int) -> TokenLogprob:
    logprobs = scores.log_softmax(-1)
    values, indices = logprobs.topk(min(top, len(logprobs)))
    likeliest = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), likeliest)


class _RowChooser(ContinuousBatchingLogitsProcessor):
    """Lets each request's row choose; what goes on to transformers' argmax is the choice alone."""

    def __init__(self) -> None:
        self.supported_kwargs = {"row": Row}
        self.ignored_kwargs = ()
        self._rows: list[Row] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        self._rows = [request.state.logit_processor_kwargs["row"] for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """From logits of shape (requests, vocabulary); rows beyond those that get a token are padding."""
        chosen = torch.tensor([row.choose(scores[index]) for index, row in enumerate(self._rows)], dtype=torch.long)
        decided = torch.full_like(scores, -torch.inf)
        decided[torch.arange(len(chosen)), chosen] = 0.0
        return decided


def row_chooser() -> ContinuousBatchingLogitsProcessorList:
    """The processors of a batch in which every request carries a `row`."""
    processors: Any = LogitsProcessorList([_RowChooser()])
    made = ContinuousBatchingLogitsProcessorList(processors)
    made.tensors_required = 1
    return made
