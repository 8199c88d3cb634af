"""From a config to the outline of its model, whatever family it is of. Knows no checkpoint."""

from __future__ import annotations

from headrace.sizing.classic import CLASSIC
from headrace.sizing.decoders import DECODERS
from headrace.sizing.fields import Fields, UnknownFamily
from headrace.sizing.outline import Outline
from headrace.sizing.towers import TOWERS

MODEL_TYPES = frozenset({*DECODERS, *CLASSIC, *TOWERS})
"""What `outline` knows."""


def outline(fields: Fields) -> Outline:
    """Every tensor of the model that `fields` describe, as the model holds it when nothing is quantized.

    Raises: UnknownFamily for a model type that is not here, ConfigLacksFields.
    """
    name = fields.model_type
    if name in DECODERS:
        made = DECODERS[name].outline(fields)
    elif name in CLASSIC:
        made = CLASSIC[name](fields)
    elif name in TOWERS:
        made = TOWERS[name](fields)
    else:
        raise UnknownFamily(f"its model_type {name!r} is none of the {len(MODEL_TYPES)} whose sizes are known here")
    fields.check()
    return made
