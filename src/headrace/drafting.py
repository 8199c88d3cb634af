"""The smaller model that drafts, if one does: found, built, checked against the one it drafts for, and loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from headrace import model, residents, sources, store
from headrace.copying.disk import DiskReader
from headrace.core import ModelShape, Plan
from headrace.errors import CannotSpeculate
from headrace.generate import Sampling
from headrace.metrics import Metrics
from headrace.speculation import ByToken, Drafter, obstacle

Speculate = Literal["auto", "off", "lookup", "draft"]

OFF = "Leave it out, or pass --speculate off."
OTHERS = "Use a draft model of the same family, or --speculate lookup, which needs none."


def kind_of(asked: str) -> Speculate:
    """What `--speculate ASKED` means: a word, or else a model."""
    return asked if asked in ("auto", "off", "lookup") else "draft"  # type: ignore[return-value]


class Speculating:
    """What was asked for, from the question to who drafts. Without a question nobody does."""

    def __init__(self, asked: str | None, skeleton: model.Skeleton, tokenizer: Any, sampling: Sampling) -> None:
        """Raises: CannotSpeculate."""
        self.kind = None if asked is None else kind_of(asked)
        self._asked = asked or ""
        self._skeleton = skeleton
        self._tokenizer = tokenizer
        self._greedy = sampling.is_greedy(skeleton.model.generation_config)
        self._draft: Draft | None = None
        self._tokenizers: tuple[Any, Any] | None = None
        self._obstacle = obstacle(skeleton.model) if self.kind not in (None, "off") else ""
        if self._obstacle and self.kind != "auto":
            raise self._refused(self._obstacle, OFF)

    def find_draft(
        self, *, trust_remote_code: bool, on_progress: residents.Progress | None, on_device: bool, fast_rows: bool
    ) -> None:
        """Find and build the draft model, if one was named. Raises: UserError, CheckpointError."""
        if self.kind != "draft":
            return
        if on_device:
            raise self._refused("a draft model computes on the processor only", "Use --speculate lookup.")
        directory = sources.resolve(self._asked, trust_remote_code=trust_remote_code, on_progress=on_progress)
        self._draft = Draft(directory, trust_remote_code=trust_remote_code, fast_rows=fast_rows)
        self._tokenizers = self._translation()

    def _translation(self) -> tuple[Any, Any] | None:
        """Two tokenizers to translate drafts with, or None if both models have the same tokens."""
        assert self._draft is not None
        is_same = self._tokenizer.get_vocab() == self._draft.tokenizer.get_vocab()
        models: tuple[Any, Any] = (self._skeleton.model, self._draft.model)
        ours, theirs = (each.config.get_text_config().vocab_size for each in models)
        if is_same and ours == theirs:
            return None
        if ours == theirs:
            raise self._refused("the draft has other tokens, but as many, which transformers takes for the same")
        if not self._greedy:
            raise self._refused("the draft has other tokens, and those are translated only where --temperature is 0")
        return self._tokenizer, self._draft.tokenizer

    def _refused(self, reason: str, suggestion: str = OTHERS) -> CannotSpeculate:
        name = str(self._tokenizer.name_or_path)
        return CannotSpeculate(asked=self._asked, model=name, reason=reason, suggestion=suggestion)

    def demand(self) -> dict[str, Any]:
        """The planner's question."""
        return {
            "speculate": self.kind,
            "greedy": self._greedy,
            "cannot_speculate": self._obstacle,
            "draft": None if self._draft is None else self._draft.shape,
        }

    def carry_out(self, plan: Plan, on_progress: residents.Progress | None) -> Drafter | None:
        """Load the draft model and wrap the blocks, before a backend wraps them again. Raises: ReadError."""
        if not plan.speculation.tokens:
            return None
        if self._draft is not None:
            self._draft.load(on_progress)
        small = None if self._draft is None else self._draft.model
        chosen = plan.speculation
        verifier = ByToken(self._skeleton.blocks)
        return Drafter(chosen.tokens, verifier, small, self._tokenizers, chosen.pass_tokens)


class Draft:
    """A small causal language model without its weights, until `load`."""

    def __init__(self, directory: Path, *, trust_remote_code: bool, fast_rows: bool) -> None:
        """Raises: CheckpointError, UnsupportedModel."""
        self.tokenizer = model.load_tokenizer(directory, trust_remote_code=trust_remote_code)
        self._checkpoint = store.open_checkpoint(directory)
        self._skeleton = model.build(
            directory, self._checkpoint, trust_remote_code=trust_remote_code, fast_rows=fast_rows
        )
        self.model: Any = self._skeleton.model

    @property
    def shape(self) -> ModelShape:
        return self._skeleton.shape

    def load(self, on_progress: residents.Progress | None) -> None:
        """Bring all of its weights to memory. Raises: ReadError."""
        files = {name: self._checkpoint.path(name) for name in self._checkpoint.files}
        reader = DiskReader(files, Metrics())
        try:
            weights = list(self._skeleton.blocks.weights())
            residents.load(weights, self._skeleton.converters, reader, on_progress, "loading the draft model")
        finally:
            reader.close()
