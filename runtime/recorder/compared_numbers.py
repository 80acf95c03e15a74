"""Counts that Python reads only to see whether there is anything: `n = int(mask.sum())`, then `if n == 0`.

Recorded as numbers, they would hold for one micro-batch, or have to be explained by sizes. The code looks at
the outcome of the comparison, so that is recorded. The source text tells how a number is used. Other numbers
than none and one are left to blocks: what a whole batch reaches, a micro-batch seldom does.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

import torch

_OPS: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_MIRRORED_OPS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
Comparison = tuple[str, int]  # the name of an op on a tensor and a number, and the number
_TESTS_FOR_NONE = {("eq", 0), ("ne", 0), ("gt", 0), ("le", 0), ("lt", 1), ("ge", 1)}


def find_comparisons(tensor: torch.Tensor, frame: FrameType | None) -> tuple[Comparison, ...]:
    """Returns the comparisons that tell a count from none, if a function does nothing else with a tensor's
    number. It reads it in the call that its frame is in, `int(tensor)` or `tensor.item()`. Returns nothing if
    the function does more, or if its source is not known."""
    if frame is None or tensor.is_floating_point():
        return ()
    found = _comparisons_of_call(frame.f_code, frame.f_lasti)
    return found if _TESTS_FOR_NONE.issuperset(found) else ()


@lru_cache(maxsize=1024)
def _comparisons_of_call(code: CodeType, offset: int) -> tuple[Comparison, ...]:
    """Returns how the number that the call at an offset of bytecode reads is compared; nothing where it is
    used otherwise, too."""
    tree = parse_file(code.co_filename)
    if tree is None:
        return ()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    line, last_line, column, last_column = list(code.co_positions())[offset // 2]
    call = next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and (node.lineno, node.end_lineno) == (line, last_line)
            and (node.col_offset, node.end_col_offset) == (column, last_column)
        ),
        None,
    )
    reader = call.func if call is not None else None
    name = (
        reader.id
        if isinstance(reader, ast.Name)
        else reader.attr
        if isinstance(reader, ast.Attribute)
        else ""
    )
    if call is None or name not in ("int", "item"):  # which does more than to read
        return ()
    found = set[Comparison]()
    for use in _iter_uses(call, parents):
        if (comparison := _read_comparison(use, parents)) is None:
            return ()
        found.add(comparison)
    return tuple(sorted(found))


@lru_cache(maxsize=64)
def parse_file(name: str) -> ast.Module | None:
    """Returns the syntax tree of a source file; None if it has none."""
    try:
        return ast.parse("".join(linecache.getlines(name)))
    except SyntaxError:
        return None


def _iter_uses(call: ast.expr, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.expr]:
    """Yields the expressions that stand for the value of a call: itself, or all that read the variable that
    it is assigned to. A variable that gets other values, too, is not followed."""
    parent = parents[call]
    if isinstance(parent, ast.NamedExpr):
        yield parent
    elif not (isinstance(parent, ast.Assign) and len(parent.targets) == 1):
        yield call
        return
    target = parent.target if isinstance(parent, ast.NamedExpr) else parent.targets[0]
    scope: ast.AST = parent
    while not isinstance(scope, ast.FunctionDef | ast.Lambda | ast.Module):
        scope = parents[scope]
    if not isinstance(target, ast.Name) or not isinstance(scope, ast.FunctionDef):
        yield call
        return
    for node in ast.walk(scope):
        if isinstance(node, ast.Global | ast.Nonlocal) and target.id in node.names:
            yield call  # which is no comparison
        if not isinstance(node, ast.Name) or node.id != target.id or node is target:
            continue
        yield node if isinstance(node.ctx, ast.Load) else call


def _read_comparison(use: ast.expr, parents: dict[ast.AST, ast.AST]) -> Comparison | None:
    """Returns the comparison with a constant in which an expression stands; None for other places."""
    match parents[use]:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            name, number = _OPS.get(type(op)), _read_constant(right if use is left else left)
            if name is None or number is None:
                return None
            return (name if use is left else _MIRRORED_OPS.get(name, name)), number
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if test is use:
            return "ne", 0
        case ast.UnaryOp(op=ast.Not()):
            return "ne", 0
        case _:
            return None


def _read_constant(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
