"""The fields of a config.json: under any of their names, with what is missing collected. Knows no family of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigLacksFields, Reason
from headrace.sizing.counts import Limit, limit, why_wrong

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where models of several modalities keep the config of their language model."""


class Fields:
    """A config's values by name. What is needed and missing is collected, so that one error can name all of it.

    Parts of it, like `text`, add to the same collection.
    """

    def __init__(self, values: Mapping[str, Any], model: str, *, _whole: Fields | None = None, _path: str = "") -> None:
        self.values = values
        self.model = model
        self._whole = _whole or self
        self._path = _path
        self._missing: dict[str, None] = {}
        self._wrong: dict[str, None] = {}

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 1 under the first of `names` that has one; 1 where it is missing or wrong."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if why := why_wrong(self._path + name, value, Limit(1, limit(name).most)):
                self._whole._wrong[why] = None
                return 1
            return int(value)
        if default is None:
            self._whole._missing[self._path + names[0]] = None
            return 1
        return default

    def optional(self, *names: str) -> int:
        """The same, and 0 where there is none."""
        present = [name for name in names if self.values.get(name)]
        return self.count(*present) if present else 0

    def is_on(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def sequence(self, name: str) -> Sequence[Any]:
        value = self.values.get(name)
        return value if isinstance(value, list) else ()

    def inner(self, name: str) -> Fields:
        """The config of a part, like `vision_config`; empty if there is none."""
        value = self.values.get(name)
        return self._part(name, value if isinstance(value, dict) else {})

    @property
    def text(self) -> Fields:
        """The language model's own config: of a model with towers a part of it, else all of it."""
        for name in _TEXT_CONFIGS:
            if isinstance(values := self.values.get(name), dict):
                tied = self.values.get("tie_word_embeddings")
                return self._part(name, values if tied is None else {"tie_word_embeddings": tied, **values})
        return self

    def with_default(self, name: str, value: Any) -> Fields:
        """The same with a value for what the config does not say."""
        return Fields({name: value, **self.values}, self.model, _whole=self._whole, _path=self._path)

    def _part(self, name: str, values: Mapping[str, Any]) -> Fields:
        return Fields(values, self.model, _whole=self._whole, _path=f"{self._path}{name}.")

    @property
    def dtype(self) -> str | None:
        """Torch's name of the dtype that the weights are meant to have, or None if the config does not say."""
        for values in (self.values, self.text.values):
            value = values.get("dtype") or values.get("torch_dtype")
            if isinstance(value, str):
                return value.removeprefix("torch.")
        return None

    def check(self) -> None:
        """Raises: ConfigLacksFields, if something that was asked for is missing or is no number that it could be."""
        if self._whole is not self:
            self._whole.check()
        if self._missing or self._wrong:
            raise ConfigLacksFields(
                model=self.model,
                model_type=self.model_type or "none",
                missing=list(self._missing),
                wrong=list(self._wrong),
            )


class UnknownFamily(Reason):
    """No family here has this model type."""
