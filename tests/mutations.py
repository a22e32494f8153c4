"""Changes to a module's code that its tests should notice, one at a time; see tests/mutate.py.

A comparison, operator, constant, bound or condition becomes its neighbour, or a statement is dropped. Text,
annotations, decorators, assertions, logging and the arguments of errors are left alone, and so are lines that
end in ``# no mutation: <reason>``, meant for changes that no test can tell from the original.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

LEFT_ALONE = re.compile(r"# no mutation: \S")
LOGGING = re.compile(r"(warnings|_?log(ger|ging)?)\b")
NO_LOGIC = ("annotation", "returns", "decorator_list", "exc", "cause")  # fields of nodes

_PAIRS = (("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"), ("any", "all"),
          ("floor", "ceil"))  # fmt: skip
NAMES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip

# container[key] = new; the container is a list of nodes or the __dict__ of a node.
Change = tuple[Any, Any, Any]


class Mutation(NamedTuple):
    """One change of ``tree``, and the lines it shows in, before and after."""

    line: int
    before: str
    after: str
    tree: ast.Module
    change: Change

    def code(self, path: Path) -> CodeType:
        container, key, new = self.change
        old, container[key] = container[key], new
        try:
            return compile(ast.fix_missing_locations(self.tree), str(path), "exec", dont_inherit=True)
        finally:
            container[key] = old


class _Negative(ast.NodeTransformer):
    """-1 as one constant."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int(value) | float(value))):
                return ast.copy_location(ast.Constant(-value), node)
        return self.generic_visit(node)


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module, in the order of its lines."""
    tree, lines, found = _Negative().visit(ast.parse(source)), source.splitlines(), []
    for node, (container, key, new) in _below(tree):
        touched = lines[node.lineno - 1 : node.end_lineno]
        if any(map(LEFT_ALONE.search, touched)):
            continue
        old, container[key] = container[key], new
        changed = ast.unparse(new if old is node else node)
        container[key] = old
        after = touched[0][: node.col_offset] + changed + touched[-1][node.end_col_offset :]
        before = " ".join(map(str.strip, touched))
        found.append(Mutation(node.lineno, before, after.strip(), tree, (container, key, new)))
    return sorted(found, key=lambda mutation: mutation.line)


def _below(parent: ast.AST) -> Iterator[tuple[ast.AST, Change]]:
    """The changes of everything below ``parent``, each with the node that shows it."""
    for field, value in ast.iter_fields(parent):
        several = isinstance(value, list)
        container = value if several else vars(parent)
        for key, node in enumerate(value) if several else [(field, value)]:
            if field in NO_LOGIC or not isinstance(node, ast.AST) or _without_logic(node):
                continue
            if field in ("test", "ifs") and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield node, (container, key, ast.UnaryOp(ast.Not(), node))
            for change in _changes(node, container, key):
                yield node, change
            yield from _below(node)


def _without_logic(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.keyword("strict") | ast.Assign([ast.Name("__all__")]):
            return True
        case ast.If(test):
            return ast.unparse(test).startswith(("__name__ ==", "TYPE_CHECKING"))
        case ast.Expr(ast.Call(function)):
            return bool(LOGGING.match(ast.unparse(function)))
    return False


def _changes(node: ast.AST, container: Any, key: Any) -> Iterator[Change]:
    """The changes of a node itself, which is ``container[key]``."""
    inside = vars(node)
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                for new in COMPARISONS[type(operator)]:
                    yield operators, index, new()
        case ast.BinOp(left, operator, right):
            if type(operator) in OPERATORS and not (_is_sequence(left) or _is_sequence(right)):
                yield inside, "op", OPERATORS[type(operator)]()
        case ast.AugAssign(op=operator):
            yield container, key, ast.Pass()
            if type(operator) in OPERATORS:
                yield inside, "op", OPERATORS[type(operator)]()
        case ast.BoolOp(operator):
            yield inside, "op", OPERATORS[type(operator)]()
        case ast.UnaryOp(_, operand):
            yield container, key, operand
        case ast.Constant(bool(value)):
            yield container, key, ast.Constant(not value)
        case ast.Constant(int(value)):
            for new in (value - 1, value + 1) if abs(value) == 1 else (value + 1,):
                yield container, key, ast.Constant(new)
        case ast.Constant(float(value)):
            yield container, key, ast.Constant(2 * value or 1.0)
        case ast.Slice(lower, upper):
            for name, bound in (("lower", lower), ("upper", upper)):
                if bound and not isinstance(bound, ast.Constant):  # a constant has changes of its own
                    yield inside, name, None
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), keywords=keywords):
            if name in NAMES:
                yield vars(node.func), "id" if isinstance(node.func, ast.Name) else "attr", NAMES[name]
            if name in ("sort", "sorted") and "reverse" not in [keyword.arg for keyword in keywords]:
                yield inside, "keywords", [*keywords, ast.keyword("reverse", ast.Constant(True))]
        case ast.Break():
            yield container, key, ast.Continue()
        case ast.Continue():
            yield container, key, ast.Break()
        case ast.Raise() | ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield container, key, ast.Pass()


def _is_sequence(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)
