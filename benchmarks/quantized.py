"""What fewer bits cost a real model, and what they save: perplexity, divergence, bytes, and the time it takes.

    python benchmarks/quantized.py [MODEL] [--tokens 4096] [--group-size 64]

SmolLM2-135M-Instruct unless another model is named, quantized as `headrace quantize` does it: to 8 bits, to 4, and to 4
without calibration. Both texts that the original is compared on ship with the project: the one that `headrace quantize`
uses, and one of another kind (`docs/how-it-works.md`). The last line of output is one JSON document.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from headrace import sources
from headrace.quantize import damage, job

OTHER_TEXT = Path(__file__).parents[1] / "docs" / "how-it-works.md"
WAYS = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "4 bits, --no-calibrate": {"bits": 4, "calibrate": False},
}


def quiet(*progress: object) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--group-size", type=int)
    arguments = parser.parse_args()
    original = sources.resolve(arguments.model or sources.demo_gguf())
    texts = {"": damage.shipped_text(), "other_": OTHER_TEXT.read_text(encoding="utf-8")}

    def score(directory: Path, text: str, before: damage.Scored | None) -> damage.Scored:
        return damage.score(directory, before, quiet, memory=None, tokens=arguments.tokens, text=text)

    before = {kind: score(original, text, None) for kind, text in texts.items()}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, asked) in enumerate(WAYS.items()):
            target = Path(scratch) / str(number)
            if arguments.group_size and asked["bits"] == 4:
                asked = asked | {"group_size": arguments.group_size}
            start = time.perf_counter()
            written = job.quantize(str(original), target, quiet, **asked)
            row = {"way": name, "seconds": round(time.perf_counter() - start, 1)}
            row |= {
                "bytes": written.bytes_after,
                "part_of_before": round(written.bytes_after / written.bytes_before, 4),
            }
            for kind, text in texts.items():
                lost = damage.compare(before[kind], score(target, text, before[kind]))
                row |= {
                    f"{kind}tokens": lost.tokens,
                    f"{kind}perplexity_before": round(lost.perplexity_before, 3),
                    f"{kind}perplexity_change": round(lost.change, 5),
                    f"{kind}divergence": round(lost.divergence, 5),
                }
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    print(json.dumps({"model": Path(original).name, "ways": rows}))


if __name__ == "__main__":
    main()
