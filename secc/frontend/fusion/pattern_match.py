"""Matches patterns, which are Python expressions, against the expressions of a graph, and says how far a
match got.

Sums and products match either way round; nothing is regrouped, so a spelling is written as code writes it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from torch import fx

from secc.frontend.fusion.fusion_rules import NUMBERS, PARAMETERS, SPELLINGS
from secc.frontend.fusion.graph_algebra import COMMUTATIVE, Algebra, Atom, Expr

_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
}
_CLOSE = 1e-5  # relative: codes write constants with seven digits or more


@dataclass(frozen=True)
class Op:
    """A pattern's operation."""

    name: str
    args: tuple[Op | Name | float | str | None, ...]


@dataclass(frozen=True)
class Name:
    """A pattern's variable."""

    text: str


Pattern = Op | Name | float | str | None
Bound = dict[str, Expr | Atom]


@cache
def parse(text: str) -> Pattern:
    """A pattern from its text."""
    return _pattern(ast.parse(text, mode="eval").body)


def _pattern(node: ast.expr) -> Pattern:
    match node:
        case ast.BinOp():
            return Op(_OPERATORS[type(node.op)], (_pattern(node.left), _pattern(node.right)))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -float(value)
        case ast.UnaryOp(op=ast.USub()):
            return Op("neg", (_pattern(node.operand),))
        case ast.Call(func=ast.Name(id=name)):
            return Op(name, tuple(_pattern(a) for a in node.args))
        case ast.Name(id=name):
            return Name(name)
        case ast.Constant(value=None | str() | int() | float() as value):
            return float(value) if isinstance(value, int) else value
        case _:
            raise ValueError(f"no pattern: {ast.unparse(node)}")


@dataclass
class Attempt:
    """A try to match: `steps` operations matched before it failed because of `reason` at `node`."""

    steps: int = 0
    reason: str = ""
    node: fx.Node | None = None
    _count: int = field(default=0, repr=False)

    def restart(self) -> None:
        """Begin at another expression."""
        self._count = 0

    def matched(self) -> None:
        self._count += 1

    def failed(self, reason: str, node: fx.Node | None) -> None:
        """Keep the failure that got furthest."""
        if self._count > self.steps:
            self.steps, self.reason, self.node = self._count, reason, node


def match(pattern: Pattern, value: Expr | Atom, attempt: Attempt | None = None) -> Bound | None:
    """What the pattern's names stand for in `value`, or None."""
    return _match(pattern, value, {}, attempt or Attempt())


def _match(pattern: Pattern, value: Expr | Atom, bound: Bound, attempt: Attempt) -> Bound | None:
    match pattern:
        case Name():
            return _bind(pattern.text, value, bound, attempt)
        case Op():
            if (
                not isinstance(value, Expr)
                or value.op != pattern.name
                or len(value.args) != len(pattern.args)
            ):
                found = f"{_shown(value)} stands where {pattern.name}(…) is expected"
                attempt.failed(found, value.node if isinstance(value, Expr) else None)
                return None
            attempt.matched()
            return _match_args(pattern, value, bound, attempt)
        case _:
            return bound if _same(pattern, value) else None


def _match_args(pattern: Op, value: Expr, bound: Bound, attempt: Attempt) -> Bound | None:
    orders = [value.args, value.args[::-1]] if value.op in COMMUTATIVE else [value.args]
    for args in orders:
        found: Bound | None = bound
        for p, v in zip(pattern.args, args, strict=True):
            found = None if found is None else _match(p, v, found, attempt)
        if found is not None:
            return found
    return None


def _bind(name: str, value: Expr | Atom, bound: Bound, attempt: Attempt) -> Bound | None:
    node = value.node if isinstance(value, Expr) else None
    if name in bound:
        if bound[name] is value or (not isinstance(value, Expr) and _same(bound[name], value)):
            return bound
        attempt.failed(f"{_shown(value)} stands where {_shown(bound[name])} is expected again", node)
        return None
    if name in NUMBERS and isinstance(value, Expr):
        attempt.failed(f"{name} is {_shown(value)}, not a number", node)
        return None
    if name not in NUMBERS and not isinstance(value, Expr) and not (name in PARAMETERS and value is None):
        return None
    if name in PARAMETERS and isinstance(value, Expr) and any(e.op == "node" for e in value.walk()):
        attempt.failed(f"{name} is {_shown(value)}, which is no parameter", node)
        return None
    return bound | {name: value}


def _same(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) <= _CLOSE * abs(a)
    return type(a) is type(b) and a == b


def _shown(value: object) -> str:
    if not isinstance(value, Expr):
        return repr(value)
    return (
        f"`{value.node.name}`"
        if value.op == "node"
        else f"{value.op}(…)"
        if value.op != "parameter"
        else str(value.args[0])
    )


def build(algebra: Algebra, pattern: Pattern, bound: Bound, node: fx.Node) -> Expr | Atom:
    """The expression that a spelling's right side stands for."""
    match pattern:
        case Op():
            return algebra.make(
                pattern.name, tuple(build(algebra, a, bound, node) for a in pattern.args), node
            )
        case Name():
            return bound[pattern.text]
        case _:
            return pattern


def canonical(algebra: Algebra, value: Expr) -> Expr:
    """The expression that stands for `value` by the spellings."""
    for left, right in SPELLINGS:
        pattern = parse(left)
        if (
            isinstance(pattern, Op)
            and pattern.name == value.op
            and (bound := match(pattern, value)) is not None
        ):
            found = build(algebra, parse(right), bound, value.node)
            assert isinstance(found, Expr)
            return found
    return value
