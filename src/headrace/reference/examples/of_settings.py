"""Examples of what was asked for and cannot be done as asked."""

from headrace.reference.examples import Example

EXAMPLES = (
    Example(
        error="InvalidSize",
        checkpoint=True,
        before="headrace run models/tiny -p Hi --memory 3",
        after="headrace run models/tiny -p Hi --memory 3GiB --max-tokens 2",
    ),
    Example(
        error="InvalidSetting",
        before="headrace check --offload-group-size -4",
        after="headrace check --offload-group-size 4",
    ),
    Example(
        error="UnknownSetting",
        given="import headrace",
        before='headrace.OffloadConfig(prefetch={"offload_groupsize": 4})',
        after='headrace.OffloadConfig(prefetch={"offload_group_size": 4})',
    ),
    Example(
        error="InvalidOffloadConfig",
        before="headrace check --offload-num-in-group 8 --offload-group-size 4",
        after="headrace check --offload-num-in-group 4 --offload-group-size 4",
    ),
    Example(
        error="NothingOffloaded",
        checkpoint=True,
        before="headrace run models/tiny -p Hi --offload-group-size 100",
        after="headrace run models/tiny -p Hi --offload-group-size 3 --max-tokens 2",
    ),
    Example(
        error="ModelNotFound",
        checkpoint=True,
        given="""
from headrace.sources.models import resolve
""",
        before='resolve("nobody/no-such-model")',
        after='resolve("models/tiny")',
    ),
    Example(
        error="PathNotFound",
        checkpoint=True,
        before="headrace run ./models/tinny -p Hi",
        after="headrace run ./models/tiny -p Hi --max-tokens 2",
    ),
    Example(
        error="UnsupportedModel",
        checkpoint=True,
        given="""
import json
from pathlib import Path

from headrace.sources.models import resolve

file = Path("models/tiny/config.json")
config = json.loads(file.read_text())
""",
        before="""
file.write_text(json.dumps(config | {"model_type": "lama"}))
resolve("models/tiny")
""",
        after="""
file.write_text(json.dumps(config | {"model_type": "llama"}))
resolve("models/tiny")
""",
    ),
    Example(
        error="RemoteCodeRefused",
        checkpoint=True,
        given="""
import json
from pathlib import Path

from headrace.sources.models import resolve

file = Path("models/tiny/config.json")
own_code = {"model_type": "custom", "auto_map": {"AutoModelForCausalLM": "modeling_custom.CustomForCausalLM"}}
file.write_text(json.dumps(json.loads(file.read_text()) | own_code))
""",
        before='resolve("models/tiny")',
        after='resolve("models/tiny", trust_remote_code=True)',
    ),
    Example(
        error="PickleRefused",
        checkpoint=True,
        given="""
from pathlib import Path

from headrace.sources.models import resolve

Path("models/old").mkdir(parents=True)
Path("models/old/pytorch_model.bin").write_bytes(b"a pickle")
""",
        before='resolve("models/old")',
        after='resolve("models/tiny")  # the same weights as safetensors',
    ),
    Example(
        error="PromptTooLong",
        checkpoint=True,
        before='headrace run models/tiny -p "How long is this question?" --context 8',
        after='headrace run models/tiny -p "How long is this question?" --context 128 --max-tokens 2',
    ),
    Example(
        error="NotLoadedHere",
        checkpoint=True,
        given="""
import headrace
from transformers import AutoModelForCausalLM
""",
        before="""
model = AutoModelForCausalLM.from_pretrained("models/tiny")
headrace.report(model)
""",
        after="""
model, tokenizer = headrace.load("models/tiny")
headrace.report(model)
""",
    ),
    Example(
        error="BadBatchLine",
        given="""
from pathlib import Path

from headrace.batchfile import read_requests

file = Path("questions.jsonl")
""",
        before="""
file.write_text('{"promt": "Hi"}')
read_requests(file, {})
""",
        after="""
file.write_text('{"prompt": "Hi"}')
read_requests(file, {})
""",
    ),
    Example(
        error="OtherBatch",
        given="""
import contextlib
from pathlib import Path

from headrace.batchfile import Answers, read_requests

questions, answers = Path("questions.jsonl"), Path("answers.jsonl")

def answer():
    requests = read_requests(questions, {})
    with contextlib.closing(Answers(answers, requests)) as file:
        file.write(requests[0], {"text": "Hello"})

questions.write_text('{"prompt": "Hi"}')
answer()
""",
        before="""
questions.write_text('{"prompt": "Good morning"}')
answer()
""",
        after="""
questions.write_text('{"prompt": "Hi"}')
answer()
""",
    ),
    Example(
        error="CannotSpeculate",
        checkpoint=True,
        given="""
import json
from pathlib import Path

from headrace.engine import Engine

file = Path("models/tiny/generation_config.json")
config = json.loads(file.read_text())
""",
        before="""
file.write_text(json.dumps(config | {"num_beams": 3}))
Engine.open("models/tiny", speculate="lookup")
""",
        after="""
file.write_text(json.dumps(config))
Engine.open("models/tiny", speculate="lookup").close()
""",
    ),
    Example(
        error="BudgetTooSmall",
        checkpoint=True,
        before="headrace run models/tiny -p Hi --memory 64MiB",
        after="headrace run models/tiny -p Hi --memory 4GiB --max-tokens 2",
    ),
    Example(
        error="BudgetBeyondMemory",
        checkpoint=True,
        given="""
import math
import os
import shutil
from pathlib import Path

import headrace
import torch
from headrace.importing.writer import TensorSpec, plan_shards
from headrace.machine import available_bytes
from transformers import AutoConfig, AutoModelForCausalLM

# A model that is larger than what is free. All of it is zeros, so its file takes no room on the disk.
large = Path(shutil.copytree("models/tiny", "models/large"))
config = AutoConfig.from_pretrained(large)
config.intermediate_size = 2**18
config.num_hidden_layers = math.ceil(available_bytes() / (3 * 2 * config.hidden_size * config.intermediate_size)) + 2
config.save_pretrained(large)
with torch.device("meta"):
    parameters = AutoModelForCausalLM.from_config(config).named_parameters()
tensors = [TensorSpec(name, "BF16", tuple(parameter.shape)) for name, parameter in parameters]
(file,) = plan_shards(tensors, shard_bytes=2**60)
(large / file.file).write_bytes(file.header)
os.truncate(large / file.file, file.nbytes)
""",
        before='headrace.load("models/large", memory="1TiB", context=64)',
        after='headrace.load("models/large", memory="2GiB", context=64)',
    ),
    Example(
        error="NotEnoughMemory",
        checkpoint=True,
        given="import headrace",
        before='headrace.load("models/tiny", context=10**10)',
        after='headrace.load("models/tiny", context=256)',
    ),
    Example(
        error="PackageNotFound",
        before="headrace reference build click_no_such",
        after="headrace reference build click",
    ),
    Example(
        error="SourceUnusable",
        given="""
from pathlib import Path

Path("src/mill").mkdir(parents=True)
Path("src/mill/__init__.py").write_text('def grind(grain):\\n    assert grain, "no grain"\\n')
Path("notes").mkdir()
""",
        before="headrace reference build mill --source notes",
        after="headrace reference build mill --source src",
    ),
    Example(
        error="VersionUnavailable",
        given="""
import os
import zipfile
from pathlib import Path

for version in ("1.0", "1.1"):
    Path("wheels").mkdir(exist_ok=True)
    with zipfile.ZipFile("wheels/mill-%s-py3-none-any.whl" % version, "w") as wheel:
        wheel.writestr("mill/__init__.py", 'def grind(grain):\\n    assert grain, "no grain"\\n')
        metadata = "Metadata-Version: 2.1\\nName: mill\\nVersion: %s\\n" % version
        wheel.writestr("mill-%s.dist-info/METADATA" % version, metadata)
        wheel.writestr("mill-%s.dist-info/WHEEL" % version, "Wheel-Version: 1.0\\n")
os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": os.path.abspath("wheels")}
""",
        before="headrace reference build mill --versions 1.0,1.2",
        after="headrace reference build mill --versions 1.0,1.1",
    ),
    Example(
        error="NotInReference",
        before="headrace reference search budget --package headrace",
        after="""
headrace reference build headrace
headrace reference search budget --package headrace
""",
    ),
    Example(
        error="UnknownErrorId",
        before="headrace explain 0123456789abcdef",
        after="""
from headrace.cli.app import main
from headrace.errors import PathNotFound

assert main(["explain", PathNotFound.error_id()]) == 0
""",
    ),
)
