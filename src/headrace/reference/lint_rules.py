"""The rules of the message lint. Each says nothing where it is not sure. Knows no files and no database."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.reference import bounds, literals
from headrace.reference.flow import (
    FUNCTIONS,
    LOOPS,
    TRIES,
    WITHS,
    Module,
    Scope,
    assigned_names,
    own_statements,
    parameters,
)

if TYPE_CHECKING:
    from headrace.reference.spoken import Message, Spoken

Fault = tuple[int, str, str]
"""Line, rule, and what is printed or why it is one."""

_WORDS = re.compile(r"[A-Za-z]{2,}\W*\s+\W*[A-Za-z]|[A-Za-z]{2,}[.:,]? ?$")
_CONVERSION = re.compile(r"(?<![%\w])%(?:\(\w+\))?[sdrifx](?![\w%])")
_EMPTY_BRACES = re.compile(r"(?<![\{\w'\"`(\[=])\{\d?(?:![rsa])?(?::[^{}\s]*)?\}(?![\}\w'\"`])")
_SPEAKS_OF_FORMATS = re.compile(
    r"format|template|placeholder|pattern|f-string|brace|substitut|interpol|%%|\bdict|\bset\b|json|object|empty"
)
_GENERAL = frozenset(["Exception", "ImportError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError"])
"""Classes that say nothing by themselves. A KeyError with its key, say, is understood."""


def literal_text(node: ast.expr) -> str:
    """The text that an expression holds as it stands, without the values in it."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr():
            return "".join(literal_text(part) for part in node.values)
        case ast.BinOp(op=ast.Add() | ast.Mod()):
            return literal_text(node.left) + literal_text(node.right)
        case ast.Call(func=ast.Attribute(attr="format", value=text)):
            return literal_text(text)
    return ""


def _reads(node: ast.expr) -> bool:
    """Whether an expression is a text for people, at least its beginning."""
    text = literal_text(node)
    return " " in text.strip() and bool(_WORDS.search(text))


def of_words(message: Message, module: Module, source: str, *, plain: bool) -> Iterator[Fault]:
    """What is printed otherwise than it was meant; `plain` errors print their arguments as Python does."""
    wrong = list(of_arguments(message, plain=plain))
    yield from wrong
    # Whoever gives values beside a text meant them to be filled in: that is the same fault, told once.
    yield from of_texts(message, module, source, plain=plain, fillable=not wrong)


# --- several arguments ------------------------------------------------------------------------------------------------


def of_arguments(message: Message, *, plain: bool) -> Iterator[Fault]:
    """Messages that print a tuple, or a repr with escapes."""
    if message.has_more or not message.arguments:
        return
    line = message.statement.lineno
    name = message.error_class
    if isinstance(message.statement, ast.Assert):
        text = message.arguments[0]
        if isinstance(text, ast.Tuple) and any(map(_reads, text.elts)):
            yield line, "tuple-message", f"the message of the assert is a tuple of {len(text.elts)}"
        return
    if not plain:
        if name in ("OSError", "IOError") and len(message.arguments) > 1 and _reads(message.arguments[0]):
            yield line, "tuple-message", f"{name} takes its first argument for an error number: [Errno TEXT]"
        return
    if len(message.arguments) > 1 and any(map(_reads, message.arguments)):
        yield line, "tuple-message", f"{name} with {len(message.arguments)} arguments prints a tuple"
    if len(message.arguments) == 1:
        only = message.arguments[0]
        if isinstance(only, ast.Tuple) and any(map(_reads, only.elts)):
            yield line, "tuple-message", f"the only argument of {name} is a tuple of {len(only.elts)}"
        if name == "KeyError" and _reads(only) and "\n" in literal_text(only).strip():
            yield line, "key-error-escapes", "KeyError shows the line breaks of its text as \\n"


# --- what is not filled in, and seams ---------------------------------------------------------------------------------


def of_texts(message: Message, module: Module, source: str, *, plain: bool, fillable: bool) -> Iterator[Fault]:
    """Values that are not filled in, and literals that are joined badly."""
    alone = len(message.arguments) == 1 and not message.has_more
    names = _local_names(message.place.scope, module)
    padded = _padded_names(message.place.scope)
    for spoken in message.spoken:
        run = literals.run_of(spoken.node, source)
        if run is not None:
            yield from _seams(run, padded)
            if spoken.filled == "":
                yield from _lacking_f(run, names)
        if spoken.filled == "" and fillable and (plain or alone):
            yield from _unfilled(spoken, names, plain=plain)
    yield from _added(message)


def _local_names(scope: Scope, module: Module) -> set[str]:
    """What a function binds itself, and the functions around it."""
    names: set[str] = set()
    while isinstance(scope, FUNCTIONS):
        names |= {argument.arg for argument in parameters(scope)}
        for statement in own_statements(scope.body, loops=True):
            names |= set(assigned_names(statement))
        scope = module.owners[scope]
    return names


def _padded_names(scope: Scope) -> set[str]:
    """The local names that are set to a text with a space at an end: parts of a message that bring their own."""
    if not isinstance(scope, FUNCTIONS):
        return set()
    return {
        target.id
        for statement in own_statements(scope.body, loops=True)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant | ast.JoinedStr)
        if (text := literal_text(statement.value)) != text.strip()
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _root(braced: str) -> str:
    return re.split(r"[.\[!:}]", braced[1:])[0]


def _is_quoted(text: str, start: int, end: int) -> bool:
    return start > 0 and end < len(text) and text[start - 1] == text[end] and text[end] in "'\"`"


def _lacking_f(run: literals.Run, names: set[str]) -> Iterator[Fault]:
    for literal, missing in run.lacking_f():
        if _root(missing) in names:
            yield literal.line, "missing-f", f"{missing} is printed as it stands; other parts have an f in front"


def _unfilled(spoken: Spoken, names: set[str], *, plain: bool) -> Iterator[Fault]:
    node = spoken.node
    if not isinstance(node, ast.Constant) or not _reads(node):
        return
    text = literal_text(node)
    about_formats = bool(_SPEAKS_OF_FORMATS.search(text.lower()))
    for named in literals.BRACED.finditer(text):
        quoted = about_formats and _is_quoted(text, named.start(), named.end())
        if _root(named[0]) in names and ": " not in named[0] and not quoted:
            yield node.lineno, "missing-f", f"{named[0]} is printed as it stands"
            break
    if not plain or about_formats:
        return
    conversion, empty = _CONVERSION.search(text), _EMPTY_BRACES.search(text)
    if conversion is not None:
        if not _is_quoted(text, conversion.start(), conversion.end()):
            yield node.lineno, "unfilled-percent", f"{conversion[0]} is printed as it stands"
    elif empty is not None:
        yield node.lineno, "unfilled-braces", f"{empty[0]} is printed as it stands"


# Words that never end, or begin, what has no space around it: they speak for a sentence.
_SMALL = (
    "a|about|above|according|after|all|although|an|and|any|are|as|at|be|because|been|before|being|below|both|but|by|"
    "can|cannot|consider|could|did|do|does|either|else|ensure|exactly|expected|find|for|found|from|given|got|had|has|"
    "have|he|how|however|if|in|instead|into|is|it|its|make|may|might|more|must|need|needs|neither|no|nor|not|of|on|once|"
    "only|or|other|otherwise|our|please|rather|received|requires|set|should|since|so|specify|such|supported|than|that|"
    "the|their|them|then|there|these|they|this|those|though|to|too|try|unless|until|use|used|using|via|was|we|were|what|"
    "when|where|whether|which|while|who|will|with|within|without|would|you|your"
)
_ENDS_SMALL = re.compile(rf"(?:^|[\s(,;])(?:{_SMALL})$", re.IGNORECASE)
_BEGINS_SMALL = re.compile(rf"(?:{_SMALL})(?=[\s,;.:]|$)", re.IGNORECASE)
_ENDS_WORD = re.compile(r"(?:^|[\s(])[\"'`]?[A-Za-z]+$")
_BEGINS_WORD = re.compile(r"[A-Za-z]+(?=[\s,;.:)]|$)")


def _seams(run: literals.Run, padded: set[str]) -> Iterator[Fault]:
    if not all(literal.is_plain_text for literal in run.literals):
        return
    if not any(re.search(r"[A-Za-z] +[A-Za-z]", literal.body) for literal in run.literals):
        return
    for left, right in run.seams():
        if not padded.intersection(_values_at(left, right)) and (rule := _seam(left, right)) is not None:
            yield right.line, rule, f"it reads {left.body[-24:] + right.body[:24]!r}"


def _values_at(left: literals.Literal, right: literals.Literal) -> Iterator[str]:
    """The names of the values that stand right at a seam."""
    for found in (re.search(r"\{(\w+)\}$", left.body), re.match(r"\{(\w+)\}", right.body)):
        if found is not None:
            yield found[1]


def _seam(left: literals.Literal, right: literals.Literal) -> str | None:
    """What is wrong where two literals meet."""
    before, after = left.body, right.body
    if not before or not after or before.endswith(("\\n", "\\t", "\\")):
        return None
    if re.search(r"[^\s] $", before) and re.match(r" [^\s]", after):
        return "double-space"
    value_before, value_after = left.is_f and before.endswith("}"), right.is_f and after.startswith("{")
    if value_before or value_after:
        ends_small = bool(_ENDS_SMALL.search(before))
        begins_small = bool(_BEGINS_SMALL.match(after))
        return "missing-space" if (value_after and ends_small) or (value_before and begins_small) else None
    if _ENDS_WORD.search(before) and _BEGINS_WORD.match(after):
        sure = _ENDS_SMALL.search(before) or _BEGINS_SMALL.match(after)
        return "missing-space" if sure and not _makes_one_word(before, after) else None
    if re.search(r"[a-z)\]'\"`}]\.$", before) and re.match(r"[A-Z][a-z]*[\s,']", after):
        return "missing-space"
    if re.search(r"[A-Za-z)\]'\"`}][,;]$", before) and _BEGINS_WORD.match(after):
        return "missing-space" if " " in before else None
    return None


def _makes_one_word(before: str, after: str) -> bool:
    """`can` and `not`, `in` and `to`: words that are written as one."""
    left = re.search(r"[A-Za-z]+$", before)
    right = re.match(r"[A-Za-z]+", after)
    assert left is not None
    assert right is not None
    return (left[0] + right[0]).lower() in _ONE_WORD.split()


_ONE_WORD = (
    "cannot into onto within without whereas therefore however whenever wherever whatever upon another anyone anything "
    "setup inside outside instead already also alone itself themselves myself yourself nobody somebody somewhere "
    "otherwise before below beside because become"
)


def _added(message: Message) -> Iterator[Fault]:
    """Seams of literals that are put together with a plus."""
    for argument in message.arguments:
        for node in ast.walk(argument):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                left, right = _edge(node.left, -1), _edge(node.right, 0)
                if left is not None and right is not None and (rule := _seam(left, right)) is not None:
                    yield right.line, rule, f"it reads {left.body[-24:] + right.body[:24]!r}"


def _edge(node: ast.expr, side: int) -> literals.Literal | None:
    """The literal at the end (-1) or the beginning (0) of an expression that is added."""
    match node:
        case ast.BinOp(op=ast.Add()):
            return _edge(node.right if side else node.left, side)
        case ast.Constant(value=str() as text):
            return literals.Literal(node.lineno, "", text.replace("\n", "\\n"))
        case ast.JoinedStr() if node.values:
            part = node.values[side]
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                return literals.Literal(node.lineno, "", part.value.replace("\n", "\\n"))
            return literals.Literal(node.lineno, "f", "{}")
    return None


# --- messages without words -------------------------------------------------------------------------------------------


def of_substance(message: Message, module: Module) -> Iterator[Fault]:
    """Errors that say nothing, or only a value."""
    if message.error_class not in _GENERAL or isinstance(message.statement, ast.Assert) or message.has_more:
        return
    line = message.statement.lineno
    if not message.arguments:
        passes_on = isinstance(message.statement, ast.Raise) and not _is_none(message.statement.cause)
        if message.error_class != "NotImplementedError" and not passes_on and not _is_caught_near(message, module):
            yield line, "empty-message", f"{message.error_class} without a text"
    elif len(message.arguments) == 1:
        only = message.arguments[0]
        if isinstance(only, ast.Constant) and only.value == "":
            yield line, "empty-message", f"{message.error_class} with an empty text"
        elif _is_only_a_value(only, message, module) and not _names_who_lacks_it(only, message):
            yield line, "no-words", f"the text is nothing but {ast.unparse(only)}"


_OWN_CLASS = {f"{cls}{name}" for cls in ("type(self)", "self.__class__", "cls") for name in ("", ".__name__")}


def _names_who_lacks_it(only: ast.expr, message: Message) -> bool:
    """`NotImplementedError(type(self))` is a sentence: this class does not implement the method."""
    return message.error_class == "NotImplementedError" and ast.unparse(only) in _OWN_CLASS


def _is_none(cause: ast.expr | None) -> bool:
    """Whether an error is raised without one that it comes from, which would be printed with it."""
    return cause is None or (isinstance(cause, ast.Constant) and cause.value is None)


_MAY_BE_TEXT = re.compile(
    r"msg|messag|text|reason|err|exc|detail|desc|expla|why|what|problem|hint|warn|fmt|format|templ|doc|help|compl|note|"
    r"str|info|fail|issue|output|stderr|stdout|log|report|summary|line|body|repl|response|content|title|label|^e$|tb|trace",
    re.IGNORECASE,
)


def _is_only_a_value(node: ast.expr, message: Message, module: Module) -> bool:
    """Whether a message is sure to be a value without words: a parameter, an item of a loop, a type."""
    if isinstance(node, ast.JoinedStr):
        words = literal_text(node)
        if re.search(r"[A-Za-z]", words) or not node.values:
            return False
        values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return bool(values) and all(_is_value(value, message, module) for value in values)
    return _is_value(node, message, module)


def _is_value(node: ast.expr, message: Message, module: Module) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="type" | "len"), args=[_]):
            return True
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[inner]):
            return _is_value(inner, message, module)
        case ast.Attribute(attr=name):
            return name in ("shape", "dtype", "device", "__name__", "__class__") or name.endswith("_type")
        case ast.Name(id=name):
            return not _MAY_BE_TEXT.search(name) and _is_given(name, message, module)
    return False


def _is_given(name: str, message: Message, module: Module) -> bool:
    """Whether a name is a parameter or an item of a loop, and nothing else."""
    scope = message.place.scope
    if not isinstance(scope, FUNCTIONS):
        return False
    given = {argument.arg for argument in parameters(scope)}
    for statement in own_statements(scope.body, loops=True):
        if name in set(assigned_names(statement)):
            if not isinstance(statement, LOOPS):
                return False
            given.add(name)
    # A function whose only work is to raise what it is given is told what to say.
    return name in given and len(scope.body) > 1


def _is_caught_near(message: Message, module: Module) -> bool:
    """Whether the module itself catches what this function raises: then nobody is meant to read it."""
    place, statement = message.place, message.statement
    for _, around in module.ancestors(statement):
        if isinstance(around.parent, TRIES) and around.field == "body":
            return True
        if isinstance(around.parent, WITHS) and any(
            "suppress" in ast.unparse(item.context_expr) for item in around.parent.items
        ):
            return True
    name = getattr(place.scope, "name", None)
    attempts = (other for other in module.places if isinstance(other, TRIES))
    return name is not None and any(
        _catches(attempt, message.error_class) and _mentions(attempt.body, name) for attempt in attempts
    )


def _catches(attempt: ast.Try | ast.TryStar, error_class: str) -> bool:
    caught = " ".join(ast.unparse(part.type) if part.type else "Exception" for part in attempt.handlers)
    return re.search(rf"\b(?:{error_class}|Exception)\b", caught) is not None


def _mentions(block: list[ast.stmt], name: str) -> bool:
    for statement in block:
        for node in ast.walk(statement):
            match node:
                case ast.Name(id=called) | ast.Attribute(attr=called) if called == name:
                    return True
    return False


# --- the text against the test ----------------------------------------------------------------------------------------


def of_test(message: Message, module: Module) -> Iterator[Fault]:
    """A text that asks for another bound than the only test before the raise."""
    tests = bounds.only_test(message.statement, module)
    if tests is None or not message.arguments:
        return
    wrong = bounds.contradiction(tests, literal_text(message.arguments[0]))
    if wrong is not None:
        yield message.statement.lineno, "text-against-test", wrong
