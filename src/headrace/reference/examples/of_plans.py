"""Examples of plans that cannot be made."""

from headrace.reference.examples import Example

_CONFIG = """
import json
from pathlib import Path

fields = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
Path("llama-70b.json").write_text(json.dumps(fields))
del fields["hidden_size"]
Path("cut-off.json").write_text(json.dumps(fields))
"""

EXAMPLES = (
    Example(
        error="ConfigLacksFields",
        given=_CONFIG,
        before="headrace plan cut-off.json --memory 8GiB",
        after="headrace plan llama-70b.json --memory 8GiB",
    ),
    Example(
        error="UnusableMachineFile",
        given=_CONFIG
        + """
from headrace import machinefile
from headrace.core import Link, Machine, Tier

Path("old.json").write_text('{"version": 0}')
here = Machine(2**36, 8, Link(Tier.DISK, Tier.DEVICE, 2e9), 2e10)
machinefile.write(here, Path("this.json"))
""",
        before="headrace plan llama-70b.json --memory 8GiB --machine old.json",
        after="headrace plan llama-70b.json --memory 8GiB --machine this.json",
    ),
    Example(
        error="GpuTooSmall",
        given=_CONFIG,
        before="headrace plan llama-70b.json --for vllm --device l40s --context 131072",
        after="headrace plan llama-70b.json --for vllm --device l40s --gpus 8 --context 8192",
    ),
    Example(
        error="HostTooSmall",
        given=_CONFIG,
        before="headrace plan llama-70b.json --for vllm --device l40s --context 2048 --host-memory 16GiB",
        after="headrace plan llama-70b.json --for vllm --device l40s --context 2048 --host-memory 512GiB",
    ),
)
