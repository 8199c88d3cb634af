"""Examples of files that are not what a checkpoint should be."""

from headrace.reference.examples import Example

_WRITE = """
import json
import struct
from pathlib import Path

from headrace.store import open_checkpoint


def write(file, header, data):
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


model = Path("models/m")
model.mkdir(parents=True)
weight = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
"""
_OPEN = "open_checkpoint(model)"
_WHOLE = """
write(model / "model.safetensors", {"w": weight}, bytes(8))
open_checkpoint(model)
"""
_SHARDS = """
one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
write(model / one, {"a": weight}, bytes(8))
index = model / "model.safetensors.index.json"
"""
_RESOLVE = """
import json
import shutil
from pathlib import Path

from headrace.sources.models import resolve

file = Path("models/tiny/config.json")
config = json.loads(file.read_text())
"""

EXAMPLES = (
    Example(error="NoWeights", given=_WRITE, before=_OPEN, after=_WHOLE),
    Example(
        error="MissingConfig",
        checkpoint=True,
        given=_RESOLVE,
        before="""
file.unlink()
resolve("models/tiny")
""",
        after='resolve("models/tiny")',
    ),
    Example(
        error="MissingShard",
        given=_WRITE + _SHARDS + 'index.write_text(json.dumps({"weight_map": {"a": one, "b": two}}))\n',
        before=_OPEN,
        after="""
write(model / two, {"b": weight}, bytes(8))
open_checkpoint(model)
""",
    ),
    Example(
        error="CorruptIndex",
        given=_WRITE + _SHARDS,
        before="""
index.write_text("{}")
open_checkpoint(model)
""",
        after="""
index.write_text(json.dumps({"weight_map": {"a": one}}))
open_checkpoint(model)
""",
    ),
    Example(
        error="TruncatedFile",
        given=_WRITE,
        before="""
write(model / "model.safetensors", {"w": weight}, bytes(5))
open_checkpoint(model)
""",
        after=_WHOLE,
    ),
    Example(
        error="CorruptHeader",
        given=_WRITE,
        before="""
write(model / "model.safetensors", {"v": weight, "w": weight}, bytes(8))
open_checkpoint(model)
""",
        after=_WHOLE,
    ),
    Example(
        error="UnknownDtype",
        given=_WRITE,
        before="""
write(model / "model.safetensors", {"w": weight | {"dtype": "F7"}}, bytes(8))
open_checkpoint(model)
""",
        after=_WHOLE,
    ),
    Example(
        error="TensorMismatch",
        checkpoint=True,
        given=_RESOLVE + "import headrace\n",
        before="""
file.write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1, "layer_types": None}))
headrace.load("models/tiny")
""",
        after='headrace.load("models/tiny")',
    ),
    Example(
        error="ChatTemplateFailed",
        checkpoint=True,
        given="""
from pathlib import Path

Path("models/tiny/chat_template.jinja").write_text("{% for m in messages %}")
""",
        before="headrace run models/tiny -p Hi --max-tokens 2",
        after="headrace run models/tiny -p Hi --max-tokens 2 --raw",
    ),
    Example(
        error="CorruptGguf",
        checkpoint=True,
        given="""
from pathlib import Path

from headrace.sources.models import resolve

Path("model.gguf").write_bytes(b"not a model")
""",
        before='resolve("model.gguf")',
        after='resolve("models/tiny")',
    ),
)
