"""Whose error a message is when it is not the examined package's: by its class, its frames or its words. Pure data.

Only kinds are listed: what the interpreter itself says about its own objects, and the best known sentences of the
libraries below. A message that nobody here knows has no owner.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.reference.tracebacks import Frame


@dataclass(frozen=True, slots=True)
class Owner:
    """Who wrote a message, and what would help to find the reason."""

    name: str
    """`Python`, `argparse`, `torch` ..."""
    because: str
    """How one can tell."""
    ask: str
    """What to look at, or to paste next."""
    certain: bool = True
    """It cannot be anybody else's: by the frames, or by words that only the interpreter or a parser writes. A class
    or a well known sentence of a library may be used by others."""


_ASK = {
    "argparse": "The option or its value is not one that this version's parser knows: run the command with --help.",
    "pydantic": "The value has the wrong type or is outside of its bounds: the field and the rule are in the message.",
    "Python": "Paste the whole traceback: the line above the message tells which code hit it.",
    "torch": "Paste the whole traceback and the lines logged before it: they tell which part asked for that.",
}
_ASK_OTHERS = "Paste the whole traceback: if one of its other errors is the package's own, that one is explained."

# Classes that are not builtins and are printed without their module. What follows the module needs no list.
_CLASSES = {
    "ArgumentError": "argparse",
    "OutOfMemoryError": "torch",
    "AcceleratorError": "torch",
    "DistBackendError": "torch",
    "BackendCompilerFailed": "torch",
    "InductorError": "torch",
    "JSONDecodeError": "Python",
    "PydanticUserError": "pydantic",
    "PydanticSchemaGenerationError": "pydantic",
    "GatedRepoError": "huggingface_hub",
    "RepositoryNotFoundError": "huggingface_hub",
    "LocalEntryNotFoundError": "huggingface_hub",
    "HfHubHTTPError": "huggingface_hub",
    "HFValidationError": "huggingface_hub",
    "SafetensorError": "safetensors",
    "CompilationError": "triton",
    "OutOfResources": "triton",
    "PTXASError": "triton",
}
_PACKAGES = {
    "pydantic_core": "pydantic",
    "_pydantic_core": "pydantic",
    "safetensors_rust": "safetensors",
    "pydantic_settings": "pydantic",
    "zmq": "pyzmq",
    "yaml": "PyYAML",
}
_STDLIB = frozenset(sys.stdlib_module_names)
_MAIN = {"__main__", "builtins"}

# The interpreter's own sentences, each anchored at both ends of what is fixed in it.
_PYTHON = re.compile(
    r"""
    (?:(?:'[\w.]++'\ ){1,2}object|module\ '?[\w.]++'?|type\ object\ '\w++'|'?[\w.]++'?)\ has\ no\ attribute\ '?
    | object\ of\ type\ '\w++'\ has\ no\ len\(\) | (?:max|min)\(\)\ (?:iterable\ argument|arg)\ is\ (?:an\ )?empty
    | \w[\w. ]*+\ object\ is\ not\ (?:callable|iterable|subscriptable|an\ iterator|reversible)
    | '[\w.]++'\ object\ (?:is\ not|cannot\ be|does\ not\ support|doesn't\ support|has\ no\ len|is\ no)
    | (?:can't|cannot)\ (?:set|delete)\ attribute | cannot\ unpack\ non-iterable
    | (?:[\w.<>]++)\(\)\ (?:got\ (?:an\ unexpected|multiple\ values|some\ positional)|missing\ \d
        |takes\ (?:no|exactly|from|\d|at)|argument\ |keywords\ must|arg\ \d|expected\ (?:at\ (?:least|most)\ )?\d)
    | unsupported\ operand\ type\(s\)\ for | bad\ operand\ type\ for
    | '[^']{1,3}'\ not\ supported\ between\ instances\ of
    | can\ only\ concatenate | must\ be\ (?:str|int|real\ number|a\ string),\ not | can't\ multiply\ sequence
    | sequence\ item\ \d++:\ expected
    | unhashable\ type | cannot\ use\ '.+'\ as\ a\ (?:dict|set)
    | (?:list|tuple|string|bytearray|range\ object|array|pop|deque)\ (?:assignment\ )?index\ out\ of\ range
    | pop\ from\ (?:an\ )?empty | list\.remove\(x\) | .*\ is\ not\ in\ (?:list|deque|tuple)$ | substring\ not\ found
    | (?:list|string|slice)\ indices\ must\ be\ integers | string\ index\ out\ of\ range
    | invalid\ literal\ for\ (?:int|float)\(\) | could\ not\ convert\ string\ to\ float
    | (?:not\ enough|too\ many)\ values\ to\ unpack | cannot\ convert\ float | math\ domain\ error
    | (?:integer\ |float\ )?(?:division|modulo)\ (?:or\ modulo\ )?by\ zero | .*division\ by\ zero$
    | No\ module\ named\ ' | cannot\ import\ name\ ' | attempted\ relative\ import
    | name\ '\w++'\ is\ not\ defined | .*local\ variable\ '\w++'.*(?:referenced|not\ associated)
    | \[Errno\ -?\d++\] | \[WinError\ \d | I/O\ operation\ on\ closed\ file | embedded\ null\ (?:byte|character)
    | '[\w\-]++'\ codec\ can't\ (?:en|de)code | invalid\ start\ byte
    | (?:dictionary|Set|OrderedDict|deque)\ (?:changed\ size|mutated|keys\ changed)
    | maximum\ recursion\ depth\ exceeded | generator\ (?:already\ executing|raised\ StopIteration|ignored)
    | Can't\ instantiate\ abstract\ class | can't\ pickle | cannot\ pickle | Can't\ get\ attribute\ ' | Can't\ pickle
    | invalid\ syntax | unexpected\ (?:indent|EOF) | expected\ an\ indented\ block | unterminated\ string
    | Expecting\ (?:value|property\ name|',' |':')\b.*\bchar | Extra\ data:\ line | Unterminated\ string\ starting
    | unknown\ (?:locale|encoding): | '[\w]++'\ is\ not\ a\ valid\ \w++$ | .*\ is\ not\ a\ valid\ [A-Z]\w++$
    | (?:An\ attempt\ has\ been\ made\ to\ start\ a\ new\ process) | daemonic\ processes\ are\ not\ allowed
    | This\ event\ loop\ is\ already\ running | no\ running\ event\ loop | Event\ loop\ is\ closed
    | There\ is\ no\ current\ event\ loop | cannot\ schedule\ new\ futures | can't\ start\ new\ thread
    | (?:int|Python\ int|Result)\ too\ large | Exceeds\ the\ limit\ \(\d | byte\ must\ be\ in\ range
    | Command\ '.*'\ (?:returned\ non-zero|timed\ out|died) | time\ data\ '.*'\ does\ not\ match
    | bad\ magic\ number | Compressed\ file\ ended | Incorrect\ padding | File\ is\ not\ a\ zip\ file
    """,
    re.VERBOSE,
)
_ARGPARSE = re.compile(
    r"invalid choice: |invalid \w++ value: |unrecognized arguments: |the following arguments are required: |"
    r"expected (?:one|at least one|at most one|\d++) arguments?$|ambiguous option: |not allowed with argument |"
    r"conflicting option string|one of the arguments .* is required"
)
_PYDANTIC = re.compile(
    r"\d++ validation errors? for |Input should be |Field required$|Extra inputs are not permitted|"
    r"(?:String|List|Tuple|Set|Dictionary|Bytes|Value) should (?:have|match|be)|Unable to (?:parse|extract)|"
    r"Unexpected keyword argument$|Missing required (?:argument|keyword)|Object has no attribute '|Instance is frozen|"
    r"A non-annotated attribute was detected|Unable to generate pydantic-core schema"
)
_TORCH = re.compile(
    r"CUDA (?:out of memory|error|driver|kernel errors)|HIP (?:out of memory|error)|MPS backend out of memory|"
    r"NCCL (?:error|WARN)|cuDNN error|CUBLAS_STATUS|CUFFT_|Triton Error|Torch not compiled with|"
    r"mat1 and mat2|Expected all tensors to be on the same device|Error\(s\) in loading state_dict for|"
    r"size mismatch for |"
    r"The size of tensor a|shape '\[.*\]' is invalid for input|expected scalar type|Expected .* but got .*|"
    r"expected m1 and m2|self must be a matrix|Sizes of tensors must match|Tensors must have same|"
    r"Dimension (?:out of range|specified)|index \d++ is out of bounds for dimension|Cannot copy out of meta tensor|"
    r"Found no NVIDIA driver|No CUDA GPUs are available|DefaultCPUAllocator|Default process group has not been|"
    r"element \d++ of tensors does not require grad|Trying to backward through|"
    r"one of the variables needed for gradient|"
    r"The expanded size of the tensor|a view of a leaf Variable|a leaf Variable that requires grad|"
    r"stack expects |Boolean value of Tensor|only one element tensors can be converted|"
    r"\"\w++\" not implemented for '|Could not run '|Invalid device|linear\(\): |einsum\(\)"
)
_TRANSFORMERS = re.compile(
    r".*Transformers does not recognize this architecture|.* is not a local folder and is not a valid model identifier|"
    r"Can't load (?:tokenizer|the configuration|the model|image processor|feature extractor|processor) for|"
    r"Unrecognized (?:configuration class|model in|processing class|image processor|feature extractor)|"
    r"We couldn't connect to 'https?://|.* does not appear to have a file named|"
    r"Couldn't instantiate the backend tokenizer|Tokenizer class \w++ does not exist|Asking to pad but the tokenizer|"
    r"Cannot use chat template functions|.*requires the following packages that were not found in your environment|"
    r"(?:loading|The repository) .* (?:contains|requires you to execute) custom code|No package metadata was found for|"
    r"Unable to (?:create|convert|load weights)|Incorrect path_or_model_id"
)
_BY_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("argparse", _ARGPARSE),
    ("pydantic", _PYDANTIC),
    ("Python", _PYTHON),
    ("torch", _TORCH),
    ("transformers", _TRANSFORMERS),
)


def owner(error_class: str, message: str, frames: Sequence[Frame], package: str) -> Owner | None:
    """Who else than `package` says this, or None if nothing tells."""
    return (
        _by_frames(frames, package)
        or _by_module(error_class, package)
        or _by_words(message)
        or _by_class(error_class, message)
    )


def named(name: str) -> Owner:
    """An owner that a wrapper has told."""
    return _owned(name, f"these are the words of {name} itself")


def _owned(name: str, because: str, *, certain: bool = True) -> Owner:
    return Owner(name, because, _ASK.get(name, _ASK_OTHERS), certain)


_INSTALLED = re.compile(r"(?:site-packages|dist-packages)[/\\](?P<package>\w++)")
_OF_PYTHON = re.compile(r"(?:[/\\]lib(?:64)?[/\\]python\d\.\d++[/\\]|^<frozen )")


def file_package(path: str) -> str:
    """The installed package that a file of a traceback belongs to; "Python" for its library, "" if it is not told."""
    if installed := _INSTALLED.search(path):
        return _PACKAGES.get(installed["package"], installed["package"])
    return "Python" if _OF_PYTHON.search(path) else ""


def _by_frames(frames: Sequence[Frame], package: str) -> Owner | None:
    name = file_package(frames[-1].file) if frames else ""
    if not name or name == package:
        return None
    return _owned(name, f"it was raised in {frames[-1].file}, line {frames[-1].line}")


def _by_module(error_class: str, package: str) -> Owner | None:
    root, dot, _ = error_class.partition(".")
    if not dot or root == package or root in _MAIN:
        return None
    name = "Python" if root in _STDLIB else _PACKAGES.get(root, root)
    return _owned("argparse" if root == "argparse" else name, f"{error_class} is a class of {name}", certain=False)


def _by_words(message: str) -> Owner | None:
    words = " ".join(message[:1000].split())
    for name, pattern in _BY_WORDS:
        if pattern.match(words):
            return _owned(
                name, f"these are the words of {name} itself", certain=name in ("argparse", "pydantic", "Python")
            )
    return None


def _by_class(error_class: str, message: str) -> Owner | None:
    if error_class == "KeyError" and " " not in message.strip("'\""):
        return _owned("Python", "a KeyError that names nothing but the key comes from a dictionary")
    if not message and error_class:
        return _owned("Python" if error_class in _BARE else error_class, "it carries no message", certain=False)
    name = _CLASSES.get(error_class)
    return _owned(name, f"{error_class} is a class of {name}", certain=False) if name else None


_BARE = {"AssertionError", "KeyboardInterrupt", "StopIteration", "NotImplementedError", "EOFError", "MemoryError"}
