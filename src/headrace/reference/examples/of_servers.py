"""Examples of a server that cannot start, and of requests that it refuses.

`headrace serve` is run first, then each request is sent to it; with `&` they do not wait until it is ready, except one
that says `--retry`. What is answered tells by its `doc_url` which error it is.
"""

from headrace.reference.examples import Example

_SERVE = "headrace serve models/tiny\n"
_ASK = "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "
_GOOD = """'{"model": "tiny", "prompt": "Hi", "max_tokens": 2}'"""
_WITH_FILES = """
import json
from pathlib import Path

Path("body.json").write_text(json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 2}))
Path("long.json").write_text(json.dumps({"model": "tiny", "prompt": "Hi " * 2000, "max_tokens": 2}))
Path("headers.txt").write_text("Content-Type: application/json\\n")
Path("long.txt").write_text("Content-Type: application/json\\nX-Note: " + "much " * 4000 + "more\\n")
"""


def _refused(error: str, body: str, flags: str = "") -> Example:
    """A request whose body is refused, and one that is answered."""
    serve = f"headrace serve models/tiny{flags}\n"
    return Example(error=error, checkpoint=True, before=serve + _ASK + body, after=serve + _ASK + _GOOD)


EXAMPLES = (
    _refused("UnsupportedField", """'{"model": "tiny", "prompt": "Hi", "max_tokens": 2, "guided_json": {}}'"""),
    _refused("InvalidField", """'{"model": "tiny", "prompt": "Hi", "max_tokens": -2}'"""),
    _refused("MalformedBody", """'{"model": "tiny", "prompt": "Hi"'"""),
    _refused("ModelNotServed", """'{"model": "gpt-9", "prompt": "Hi", "max_tokens": 2}'"""),
    _refused(
        "ContextLengthExceeded",
        """'{"model": "tiny", "prompt": "Hi", "max_tokens": 4000}'""",
        " --max-model-len 128",
    ),
    Example(
        error="RouteNotFound",
        checkpoint=True,
        before=_SERVE + "curl http://127.0.0.1:8000/v1/model",
        after=_SERVE + "curl http://127.0.0.1:8000/v1/models",
    ),
    Example(
        error="KeyRefused",
        checkpoint=True,
        before="headrace serve models/tiny --api-key secret\ncurl http://127.0.0.1:8000/v1/models",
        after="headrace serve models/tiny --api-key secret\n"
        "curl http://127.0.0.1:8000/v1/models -H 'Authorization: Bearer secret'",
    ),
    Example(
        error="RequestTooLarge",
        checkpoint=True,
        given=_WITH_FILES,
        before="headrace serve models/tiny --max-request-size 1KiB\n" + _ASK + "@long.json",
        after="headrace serve models/tiny --max-request-size 1KiB\n" + _ASK + "@body.json",
    ),
    Example(
        error="HeadersTooLarge",
        checkpoint=True,
        given=_WITH_FILES,
        before=_SERVE + "curl http://127.0.0.1:8000/v1/completions -H @long.txt -d @body.json",
        after=_SERVE + "curl http://127.0.0.1:8000/v1/completions -H @headers.txt -d @body.json",
    ),
    Example(
        error="QueueFull",
        checkpoint=True,
        before="headrace serve models/tiny --max-num-seqs 1 --max-waiting 0\n"
        + _ASK
        + """'{"model": "tiny", "prompt": ["Hi", "Ho"], "max_tokens": 2}'""",
        after="headrace serve models/tiny --max-num-seqs 1 --max-waiting 1\n"
        + _ASK
        + """'{"model": "tiny", "prompt": ["Hi", "Ho"], "max_tokens": 2}'""",
    ),
    Example(
        error="NotReady",
        checkpoint=True,
        before="headrace serve models/tiny &\ncurl http://127.0.0.1:8000/v1/models",
        after="headrace serve models/tiny &\n"
        "curl http://127.0.0.1:8000/ready --retry 60 --retry-delay 1 --retry-all-errors\n"
        "curl http://127.0.0.1:8000/v1/models",
    ),
    Example(
        error="GenerationFailed",
        checkpoint=True,
        given="""
import shutil

from safetensors.torch import load_file, save_file

shutil.copytree("models/tiny", "models/broken")
weights = load_file("models/tiny/model.safetensors")
for tensor in weights.values():
    tensor.fill_(float("nan"))
save_file(weights, "models/broken/model.safetensors", {"format": "pt"})
""",
        before="headrace serve models/broken\n" + _ASK + """'{"model": "broken", "prompt": "Hi", "max_tokens": 2}'""",
        after=_SERVE + _ASK + _GOOD,
    ),
    Example(
        error="NoRoomForRequests",
        checkpoint=True,
        before="headrace serve models/tiny --memory 4GiB --max-model-len 128 "
        "--max-num-seqs 100000 --max-num-batched-tokens 100000",
        after="headrace serve models/tiny --memory 4GiB --max-model-len 128 --max-num-seqs 16",
    ),
    Example(
        error="AddressNotUsable",
        checkpoint=True,
        before="headrace serve models/tiny --host 192.0.2.1",
        after="headrace serve models/tiny --host 127.0.0.1",
    ),
)
