"""Examples of what cannot be quantized, or not to there."""

from headrace.reference.examples import Example

_EDIT = """
import json
from pathlib import Path

import headrace


def edit(file, **changes):
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | changes))
"""

EXAMPLES = (
    Example(
        error="ForeignQuantization",
        checkpoint=True,
        given=_EDIT,
        before="""
edit(Path("models/tiny/config.json"), quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
headrace.load("models/tiny")
""",
        after='headrace.load("models/tiny")',
    ),
    Example(
        error="OtherLayout",
        checkpoint=True,
        given=_EDIT
        + """
from headrace.quantize import job

job.quantize("models/tiny", Path("models/new"), lambda what, done, total: None, bits=4)
file = Path("models/new/config.json")
settings = json.loads(file.read_text())["quantization_config"]
other = "avx2" if settings["layout"] == "avx512" else "avx512"
""",
        before="""
edit(file, quantization_config=settings | {"layout": other})
headrace.load("models/new")
""",
        after='headrace.load("models/new")',
    ),
    Example(
        error="AlreadyQuantized",
        checkpoint=True,
        before="""
headrace quantize models/tiny models/new --no-damage
headrace quantize models/new models/newer --no-damage
""",
        after="headrace quantize models/tiny models/new --no-damage",
    ),
    Example(
        error="NothingToQuantize",
        checkpoint=True,
        given="""
from transformers import GPT2Config, GPT2LMHeadModel

GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=64)).save_pretrained("models/gpt2")
""",
        before="headrace quantize models/gpt2 models/new --no-damage",
        after="headrace quantize models/tiny models/new --no-damage",
    ),
    Example(
        error="OutputExists",
        checkpoint=True,
        before="headrace quantize models/tiny models --no-damage",
        after="headrace quantize models/tiny models/new --no-damage",
    ),
    Example(
        error="NoDiskSpace",
        checkpoint=True,
        given="""
import shutil
from pathlib import Path
from unittest import mock

from headrace.quantize import job

# A disk that is nearly full, imitated.
usage = shutil.disk_usage(".")
full = mock.patch.object(shutil, "disk_usage", lambda path: usage._replace(free=2**20))


def quantize():
    job.quantize("models/tiny", Path("models/new"), lambda what, done, total: None)
""",
        before="""
with full:
    quantize()
""",
        after="quantize()",
    ),
)
