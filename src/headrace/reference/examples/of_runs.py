"""Examples of what goes wrong while weights move or an answer is written."""

from headrace.reference.examples import Example

_LOAD = """
from pathlib import Path

import headrace
import torch

offload = headrace.OffloadConfig(prefetch={"offload_group_size": 1})
model, tokenizer = headrace.load("models/tiny", offload=offload)
tokens = torch.tensor([[5, 6, 7]])
"""

EXAMPLES = (
    Example(
        error="DemoFailed",
        checkpoint=True,
        given="""
from pathlib import Path
from unittest import mock

from headrace import sources
from headrace.cli import demo

# The small checkpoint in the place of the real model, and a fault that loses half of its bytes, imitated.
here = mock.patch.object(sources, "demo_gguf", lambda: Path("models/tiny"))
answer_all = demo._answer_all

def with_lost_bytes(console, directory, *, half):
    if not half:
        file = directory / "model.safetensors"
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.seek(size // 2)
            stream.write(bytes(size - size // 2))
    return answer_all(console, directory, half=half)
""",
        before="""
with here, mock.patch.object(demo, "_answer_all", with_lost_bytes):
    demo.demo(as_json=False)
""",
        after="""
with here:
    demo.demo(as_json=False)
""",
    ),
    Example(
        error="ReadError",
        checkpoint=True,
        given=_LOAD,
        before="""
Path("models/tiny/model.safetensors").write_bytes(b"")
model.generate(tokens, max_new_tokens=2)
""",
        after="model.generate(tokens, max_new_tokens=2)",
    ),
    Example(
        error="WriteError",
        given="""
from pathlib import Path
from unittest import mock

from headrace.importing import cache

# A file system that is nearly full, imitated.
target = Path("checkpoints/m").absolute()
full = mock.patch.object(cache, "_free_bytes", lambda target: 2**20)
""",
        before="""
with full:
    cache._check_space(target, 2**30)
""",
        after="""
with full:
    cache._check_space(target, 2**10)
""",
    ),
    Example(
        error="NotWritable",
        given="""
import os
from pathlib import Path

from headrace.reference import build, packages

Path("file").write_text("")
""",
        before="""
os.environ["XDG_CACHE_HOME"] = os.path.abspath("file")
build.build(packages.installed("click"))
""",
        after="""
os.environ["XDG_CACHE_HOME"] = os.path.abspath("cache")
build.build(packages.installed("click"))
""",
    ),
    Example(
        error="EndpointFailed",
        given="""
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from headrace.reference.endpoint import Endpoint

class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps({"choices": [{"message": {"content": "It happens."}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass

def ask(port):
    return Endpoint.open("http://127.0.0.1:%d/v1" % port, "a-model").answer("When does it happen?")
""",
        before="ask(port=1)  # nobody listens there",
        after="""
with HTTPServer(("127.0.0.1", 0), Model) as server:
    answering = threading.Thread(target=server.handle_request)
    answering.start()
    assert ask(server.server_port) == "It happens."
    answering.join()
""",
    ),
    Example(
        error="OutputFailed",
        checkpoint=True,
        before="headrace run models/tiny -p Hi --max-tokens 2 --trace /dev/full",
        after="headrace run models/tiny -p Hi --max-tokens 2 --trace trace.json",
    ),
    Example(
        error="MissingPackage",
        given="""
import sys
from unittest import mock

from headrace.cli.run import require_engine

without = mock.patch.dict(sys.modules, accelerate=None)  # as if it were not installed
""",
        before="""
with without:
    require_engine()
""",
        after="require_engine()",
    ),
    Example(
        error="OffloadedWeightsError",
        checkpoint=True,
        given=_LOAD,
        before="model.state_dict()",
        after="""
resident, tokenizer = headrace.load("models/tiny", memory="4GiB")
resident.state_dict()
""",
    ),
    Example(
        error="ClosedError",
        checkpoint=True,
        given=_LOAD,
        before="""
model.headrace_engine.close()
model.generate(tokens, max_new_tokens=2)
""",
        after="""
model.generate(tokens, max_new_tokens=2)
model.headrace_engine.close()
""",
    ),
)
