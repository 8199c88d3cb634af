"""Which sentences name only what is in a piece of source. Knows no model and no page.

A model that describes source invents names: flags that do not exist, values that nobody wrote, other software. So each
thing in a sentence that could be a name or a value has to stand in the source, or the whole sentence goes. What looks
like a plain English word cannot be told from one; that is what this lets through.
"""

from __future__ import annotations

import re
import unicodedata

SHORTEST, LONGEST = 20, 320
"""Characters of a sentence that is kept."""

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_BULLET = re.compile(r"^\s*(?:[-*+\u2022]|\d{1,2}[.)])\s+|^\s*#+\s.*$|^\s*>\s?", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[`]?[A-Z`])|\n+")
_TYPOGRAPHIC = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " ", "\u00a0": " "}
)
_QUOTED = re.compile(r"`+([^`]+)`+|\"([^\"]+)\"|(?<![A-Za-z0-9])'([^']+)'(?![A-Za-z0-9])")
_PLAIN = re.compile(r"[a-z]+(?:-[a-z]+)?")
_EDGES = ".,;:!?()[]{}\"'`"

_FIRST_WORDS = (
    "a after all although an another any as at because before both by common commonly during each either errors even "
    "every for from here if in instead it its like many most no not often on one only other otherwise passing setting "
    "since so some sometimes such that the their then there these they this those though to trying typically under "
    "unless until users using usually when whenever where whether while with without you your calling giving leaving "
    "loading running starting configuring asking mixing combining requesting choosing forgetting"
)
"""What may stand with a capital at the beginning: any other word there could be a name."""
_COUNTED = "zero . two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_NUMBERS = {word: str(number) for number, word in enumerate(_COUNTED.split())} | {
    "seventeen": "17",
    "eighteen": "18",
    "nineteen": "19",
    "twenty": "20",
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "sixty": "60",
    "seventy": "70",
    "eighty": "80",
    "ninety": "90",
    "hundred": "100",
    "thousand": "1000",
    "million": "1000000",
    "billion": "1000000000",
    "dozen": "12",
    "half": "0.5",
    "twice": "2",
    "thrice": "3",
    "double": "2",
    "triple": "3",
    "percent": "%",
}
_SOFTWARE = (
    "apt aws azure bash bitsandbytes brew chrome colab conda containerd cuda cudnn curl docker fastapi flask gcc git "
    "github gradle huggingface jax jupyter kubectl kubernetes langchain linux llama llamacpp macos mistral mypy nccl "
    "nginx npm numpy nvidia ollama onnx openai pandas pip pipx podman poetry pydantic pytest python pytorch qwen ray "
    "redis rocm safetensors sglang slurm systemd tensorflow tensorrt torch torchrun transformers triton ubuntu uv "
    "uvicorn virtualenv vllm windows xformers"
)
"""Software that is written in small letters; the list is not complete, and need not be."""


def sentences(text: str) -> list[str]:
    """The sentences of an answer, without lists, headings and code."""
    text = unicodedata.normalize("NFKC", text).translate(_TYPOGRAPHIC)
    text = _BULLET.sub("", _FENCE.sub("\n", text))
    return [" ".join(part.split()) for part in _END.split(text) if part.strip()]


def kept(text: str, source: str) -> list[str]:
    """The sentences of an answer that are whole and name nothing which is not in the source."""
    source = unicodedata.normalize("NFKC", source)
    return list(dict.fromkeys(each for each in sentences(text) if is_sentence(each) and not foreign(each, source)))


def is_sentence(text: str) -> bool:
    """Whether it has the length, the beginning and the end of a sentence, and does not speak of its writer."""
    if not SHORTEST <= len(text) <= LONGEST or not text.endswith("."):
        return False
    return text[0].isupper() or text[0] in "`\"'("


def foreign(sentence: str, source: str) -> list[str]:
    """What a sentence names and the source does not."""
    found = []
    for match in _QUOTED.finditer(sentence):
        inner = next(group for group in match.groups() if group is not None).strip(" .,;:")
        if not inner or not _stands_in(inner, source):
            found.append(inner)
    plain = _QUOTED.sub(" x ", sentence)
    for position, written in enumerate(plain.split()):
        for token in _tokens(written):
            if _could_be_a_name(token, first=position == 0) and not _is_in(token, source):
                found.append(token)
    return found


def _tokens(written: str) -> list[str]:
    """A word without the punctuation around it; `and/or` and `size=3` are more than a word and stay as they are."""
    token = written.strip(_EDGES)
    token = token.removesuffix("'s").removesuffix("n't")
    return [token] if token else ([written] if written.strip(".,;:!?()[]\"'") else [])


def _could_be_a_name(token: str, *, first: bool) -> bool:
    lower = token.lower()
    if lower in _NUMBERS or any(part in _SOFTWARE.split() for part in lower.split("-")):
        return True
    if first and token[:1].isupper() and lower in _FIRST_WORDS.split():
        return False
    return _PLAIN.fullmatch(token) is None


def _is_in(token: str, source: str) -> bool:
    number = _NUMBERS.get(token.lower())
    if number is not None and _stands_in(number, source):
        return True
    return _stands_in(token, source)


def _stands_in(words: str, source: str) -> bool:
    """Whether words stand in the source, not as a part of longer ones. A number is no part of a longer number."""
    pattern = r"\s+".join(re.escape(word) for word in words.split())
    before = r"(?<![\w.-])" if words[0].isdigit() else r"(?<![\w-])" if words[0] == "-" else r"(?<!\w)"
    after = r"(?!\w)(?!-\w)(?!\.\d)"
    return re.search(before + pattern + after, source) is not None
