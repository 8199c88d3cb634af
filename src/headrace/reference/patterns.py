"""The patterns of `match` as tests. Knows nothing but patterns."""

from __future__ import annotations

import ast


def pattern_tests(subject: ast.expr, pattern: ast.pattern) -> list[ast.expr] | None:
    """Tests that hold exactly if the subject matches; empty if it always does, None if no plain tests say it."""
    match pattern:
        case ast.MatchAs(pattern=None):
            return []
        case ast.MatchAs(pattern=ast.pattern() as inner):
            return pattern_tests(subject, inner)
        case ast.MatchValue(value=value):
            return [ast.Compare(subject, [ast.Eq()], [value])]
        case ast.MatchSingleton(value=value):
            return [ast.Compare(subject, [ast.Is()], [ast.Constant(value)])]
        case ast.MatchClass(cls=cls, patterns=[], kwd_patterns=[]):
            return [ast.Call(ast.Name("isinstance", ast.Load()), [subject, cls], [])]
        case ast.MatchOr(patterns=options):
            return _one_of(subject, options)
    return None


def _one_of(subject: ast.expr, options: list[ast.pattern]) -> list[ast.expr] | None:
    if all(isinstance(option, ast.MatchValue) for option in options):
        values = [option.value for option in options if isinstance(option, ast.MatchValue)]
        return [ast.Compare(subject, [ast.In()], [ast.Tuple(values, ast.Load())])]
    tests = [pattern_tests(subject, option) for option in options]
    if any(test is None or len(test) != 1 for test in tests):
        return None
    return [ast.BoolOp(ast.Or(), [test[0] for test in tests if test])]
