"""A check to run before a call: the condition as a function of its inputs. Only if it needs nothing else."""

from __future__ import annotations

import ast
import builtins
import keyword

from headrace.reference.evaluate import parsed
from headrace.reference.records import Site, Template

_BUILTINS = {
    *("len", "isinstance", "abs", "min", "max", "sum", "int", "float", "str", "bool"),
    *("type", "list", "tuple", "dict", "set"),
}


class _NotClosed(Exception):
    """The condition asks for something that a caller does not hold. Never leaves this room."""


def check_before_calling(site: Site) -> str | None:
    """Source of a function that raises when the site would, or None if the condition is not known or not closed."""
    condition = site.condition
    atoms = [atom for atom in condition.atoms if not atom.early_exit]
    if not condition.complete or not atoms or condition.reassigned:
        return None
    if any(atom.kind in ("handler", "always", "exists") for atom in atoms):
        return None
    names = _Names()
    try:
        tests = [names.renamed(atom.substituted or atom.code) for atom in atoms]
    except _NotClosed:
        return None
    test = " and ".join(f"({each})" if len(tests) > 1 and _binds_weaker(each) else each for each in tests)
    error = site.error_class if hasattr(builtins, site.error_class) else "ValueError"
    message = _message(site.templates[0] if site.templates else (), names)
    lines = [f"def check({', '.join(names.parameters)}):", f"    if {test}:", f"        raise {error}({message})"]
    return "\n".join(lines)


def _message(template: Template, names: _Names) -> str:
    """The message as an f-string over the parameters; the name of a value stands for one that they do not give."""
    text = ""
    values = False
    known = list(names.parameters)
    for piece in template:
        if isinstance(piece, str):
            text += " ".join(piece.split("\n")).replace("{", "{{").replace("}", "}}")
            continue
        try:
            renamed = names.renamed(piece.expr)
        except _NotClosed:
            renamed = ""
        if renamed and names.parameters == known and not set(renamed) & set("'\"{}"):
            text, values = f"{text}{{{renamed}}}", True
        else:
            names.keep(known)
            text += piece.expr.replace("{", "{{").replace("}", "}}")
    return f"f{text!r}" if values else repr(text.replace("{{", "{").replace("}}", "}"))


def _binds_weaker(test: str) -> bool:
    return isinstance(parsed(test), ast.BoolOp | ast.IfExp | ast.Lambda)


class _Names(ast.NodeTransformer):
    """Inputs by their last name: `self.prefetch.offload_group_size` becomes the parameter `offload_group_size`."""

    def __init__(self) -> None:
        self._by_source: dict[str, str] = {}

    def keep(self, parameters: list[str]) -> None:
        """Forget all other parameters."""
        self._by_source = {source: name for source, name in self._by_source.items() if name in parameters}

    @property
    def parameters(self) -> list[str]:
        return list(self._by_source.values())

    def renamed(self, code: str) -> str:
        tree = parsed(code)
        if tree is None:
            raise _NotClosed
        return ast.unparse(self.visit(ast.parse(code.strip(), mode="eval").body))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._parameter(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            raise _NotClosed
        return self._parameter(node, node.attr, root.id)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name) or node.func.id not in _BUILTINS or node.keywords:
            raise _NotClosed
        if node.func.id == "isinstance":
            return self._of_type(node)
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def _of_type(self, node: ast.Call) -> ast.AST:
        subject, kind = node.args
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        if not all(isinstance(each, ast.Name) and each.id in _BUILTINS for each in kinds):
            raise _NotClosed
        node.args = [self.visit(subject), kind]
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.comprehension | ast.Lambda | ast.Await | ast.Yield | ast.NamedExpr):
            raise _NotClosed
        return super().generic_visit(node)

    def _parameter(self, node: ast.expr, name: str, root: str = "") -> ast.AST:
        source = ast.unparse(node)
        # Capitals are constants or classes of the package, which a caller does not pass.
        if (root or name)[:1].isupper() or name.isupper() or root in ("torch", "os", "sys", "envs", "np"):
            raise _NotClosed
        if source not in self._by_source:
            taken = set(self._by_source.values())
            while name in taken or keyword.iskeyword(name) or name == "self":
                name += "_"
            self._by_source[source] = name.lstrip("_") or name
        return ast.Name(self._by_source[source], ast.Load())
