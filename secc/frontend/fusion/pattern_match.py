"""Matches patterns, which are Python expressions, against the expressions of a graph, and reports how far
a match got.

Sums and products match either way round; nothing is regrouped, so a pattern is written as code writes it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from torch import fx

from secc.frontend.fusion.fusion_rules import NUMBER_NAMES, PARAMETER_NAMES, SPELLINGS
from secc.frontend.fusion.graph_algebra import COMMUTATIVE_OPS, Atom, GraphAlgebra, GraphExpr

_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
}
_CONSTANT_TOLERANCE = 1e-5  # relative: codes write constants with seven digits or more


@dataclass(frozen=True)
class PatternCall:
    """A pattern's operation."""

    name: str
    args: tuple[PatternCall | PatternVariable | float | str | None, ...]


@dataclass(frozen=True)
class PatternVariable:
    """A pattern's variable."""

    text: str


PatternExpr = PatternCall | PatternVariable | float | str | None
Bindings = dict[str, GraphExpr | Atom]


@cache
def parse_pattern(text: str) -> PatternExpr:
    """Parses a pattern."""
    return _parse_node(ast.parse(text, mode="eval").body)


def _parse_node(node: ast.expr) -> PatternExpr:
    match node:
        case ast.BinOp():
            return PatternCall(_OPERATORS[type(node.op)], (_parse_node(node.left), _parse_node(node.right)))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -float(value)
        case ast.UnaryOp(op=ast.USub()):
            return PatternCall("neg", (_parse_node(node.operand),))
        case ast.Call(func=ast.Name(id=name)):
            return PatternCall(name, tuple(_parse_node(a) for a in node.args))
        case ast.Name(id=name):
            return PatternVariable(name)
        case ast.Constant(value=None | str() | int() | float() as value):
            return float(value) if isinstance(value, int) else value
        case _:
            raise ValueError(f"no pattern: {ast.unparse(node)}")


@dataclass
class MatchAttempt:
    """The furthest failure of a match: `matched_steps` operations matched before it failed at `node` for
    `reason`."""

    matched_steps: int = 0
    reason: str = ""
    node: fx.Node | None = None
    _count: int = field(default=0, repr=False)

    def restart(self) -> None:
        """Starts at another expression."""
        self._count = 0

    def count_step(self) -> None:
        self._count += 1

    def record_failure(self, reason: str, node: fx.Node | None) -> None:
        """Keeps the failure that got furthest."""
        if self._count > self.matched_steps:
            self.matched_steps, self.reason, self.node = self._count, reason, node


def match_pattern(
    pattern: PatternExpr, value: GraphExpr | Atom, attempt: MatchAttempt | None = None
) -> Bindings | None:
    """Returns what the pattern's variables stand for in `value`; None if it does not match."""
    return _match_node(pattern, value, {}, attempt or MatchAttempt())


def _match_node(
    pattern: PatternExpr, value: GraphExpr | Atom, bound: Bindings, attempt: MatchAttempt
) -> Bindings | None:
    match pattern:
        case PatternVariable():
            return _bind_variable(pattern.text, value, bound, attempt)
        case PatternCall():
            if (
                not isinstance(value, GraphExpr)
                or value.op != pattern.name
                or len(value.args) != len(pattern.args)
            ):
                found = f"{_format_value(value)} stands where {pattern.name}(…) is expected"
                attempt.record_failure(found, value.node if isinstance(value, GraphExpr) else None)
                return None
            attempt.count_step()
            return _match_args(pattern, value, bound, attempt)
        case _:
            return bound if _is_same_constant(pattern, value) else None


def _match_args(
    pattern: PatternCall, value: GraphExpr, bound: Bindings, attempt: MatchAttempt
) -> Bindings | None:
    orders = [value.args, value.args[::-1]] if value.op in COMMUTATIVE_OPS else [value.args]
    for args in orders:
        found: Bindings | None = bound
        for p, v in zip(pattern.args, args, strict=True):
            found = None if found is None else _match_node(p, v, found, attempt)
        if found is not None:
            return found
    return None


def _bind_variable(
    name: str, value: GraphExpr | Atom, bound: Bindings, attempt: MatchAttempt
) -> Bindings | None:
    node = value.node if isinstance(value, GraphExpr) else None
    if name in bound:
        if bound[name] is value or (
            not isinstance(value, GraphExpr) and _is_same_constant(bound[name], value)
        ):
            return bound
        attempt.record_failure(
            f"{_format_value(value)} stands where {_format_value(bound[name])} is expected again", node
        )
        return None
    if name in NUMBER_NAMES and isinstance(value, GraphExpr):
        attempt.record_failure(f"{name} is {_format_value(value)}, not a number", node)
        return None
    if (
        name not in NUMBER_NAMES
        and not isinstance(value, GraphExpr)
        and not (name in PARAMETER_NAMES and value is None)
    ):
        return None
    if (
        name in PARAMETER_NAMES
        and isinstance(value, GraphExpr)
        and any(e.op == "node" for e in value.walk_expressions())
    ):
        attempt.record_failure(f"{name} is {_format_value(value)}, which is no parameter", node)
        return None
    return bound | {name: value}


def _is_same_constant(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) <= _CONSTANT_TOLERANCE * abs(a)
    return type(a) is type(b) and a == b


def _format_value(value: object) -> str:
    if not isinstance(value, GraphExpr):
        return repr(value)
    return (
        f"`{value.node.name}`"
        if value.op == "node"
        else f"{value.op}(…)"
        if value.op != "parameter"
        else str(value.args[0])
    )


def build_expression(
    algebra: GraphAlgebra, pattern: PatternExpr, bound: Bindings, node: fx.Node
) -> GraphExpr | Atom:
    """Returns the expression that a spelling's right side stands for."""
    match pattern:
        case PatternCall():
            return algebra.make_expression(
                pattern.name, tuple(build_expression(algebra, a, bound, node) for a in pattern.args), node
            )
        case PatternVariable():
            return bound[pattern.text]
        case _:
            return pattern


def canonicalize_spelling(algebra: GraphAlgebra, value: GraphExpr) -> GraphExpr:
    """Returns the canonical expression of `value` by `SPELLINGS`."""
    for left, right in SPELLINGS:
        pattern = parse_pattern(left)
        if (
            isinstance(pattern, PatternCall)
            and pattern.name == value.op
            and (bound := match_pattern(pattern, value)) is not None
        ):
            canonical = build_expression(algebra, parse_pattern(right), bound, value.node)
            assert isinstance(canonical, GraphExpr)
            return canonical
    return value
