"""Evaluates size and cost expressions on a rank: integer arithmetic over the symbols of the inputs, without
sympy.

The grammar is Python's for integers, names, `+ - * // %`, parentheses, `min` and `max`; everything else is
rejected, so a plan file cannot run code. `secc.ir.dialect.size_expr` parses the same grammar into sympy. Each
text is compiled once into a Python function, because a step evaluates the same few expressions for thousands
of samples, one at a time or as columns. Long columns are evaluated as tensors, several times faster, where no
intermediate result can exceed int64.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, TypeAlias

import torch

from secc.runtime.plan.int_columns import int_tensor

SymbolValues = Mapping[str, int]
SizeColumns = Mapping[str, Sequence[int]]

_BINARY_OPS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_SHOWN_CHARACTERS = 200
_ALLOWED_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}
MIN_TENSOR_ROWS = 64  # shorter columns are evaluated row by row
_MAX_INT64 = (1 << 63) - 1

_Value: TypeAlias = "int | torch.Tensor"  # of a constant, or of all rows
_Step: TypeAlias = tuple[str, int, int]  # an operation and its operands' numbers, or a constant's value twice


def evaluate_expr(text: str | int, sizes: SymbolValues) -> int:
    """Returns the value of expression `text` for the given symbol values.

    Raises ValueError for text outside the grammar and for symbols that `sizes` lacks.
    """
    try:
        return _compile_expr(str(text))(sizes)
    except KeyError as unknown:
        raise ValueError(
            f"unknown symbol {unknown.args[0]!r} in {text}; expected one of {sorted(sizes)}"
        ) from None


def evaluate_expr_columns(text: str | int, columns: SizeColumns, count: int) -> list[int]:
    """Evaluates expression `text` for `count` rows at once: `columns[symbol][i]` is the symbol's value in row
    i.

    Raises ValueError like `evaluate_expr`.
    """
    try:
        if count >= MIN_TENSOR_ROWS:
            values = _split_into_steps(str(text)).evaluate_columns(columns)
            if values is not None:
                return values
        value = _compile_column_expr(str(text))(columns)
    except KeyError as unknown:
        raise ValueError(
            f"unknown symbol {unknown.args[0]!r} in {text}; expected one of {sorted(columns)}"
        ) from None
    return [value] * count if isinstance(value, int) else value


def evaluate_expr_tensor(
    text: str, columns: Mapping[str, torch.Tensor], count: int, most: int
) -> torch.Tensor:
    """Returns `evaluate_expr_columns` as an int64 tensor [count], with `most` in place of larger values;
    `columns` are int64 tensors [count]. Raises ValueError like `evaluate_expr`.
    """
    steps = _split_into_steps(text)
    try:
        value = steps.evaluate_tensors(columns)
    except KeyError as unknown:
        raise ValueError(
            f"unknown symbol {unknown.args[0]!r} in {text}; expected one of {sorted(columns)}"
        ) from None
    if value is None:  # it takes Python's integers
        exact = _compile_column_expr(text)({name: columns[name].tolist() for name in steps.symbols})
        value = exact if isinstance(exact, int) else int_tensor([v if v < most else most for v in exact])
    if isinstance(value, int):
        return torch.full((count,), min(value, most))
    return value.clamp(max=most)


@cache
def expression_symbols(text: str) -> frozenset[str]:
    """Returns the symbols of expression `text`. Raises ValueError for text outside the grammar."""
    return frozenset(_parse_expr(text)[1])


def divides_exactly(text: str, sizes: SymbolValues) -> bool:
    """Returns whether every floor division in expression `text` is exact for these symbol values."""

    def is_exact(node: ast.expr) -> bool:
        inner = all(is_exact(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
            return inner
        return (
            inner
            and evaluate_expr(ast.unparse(node.left), sizes) % evaluate_expr(ast.unparse(node.right), sizes)
            == 0
        )

    return "//" not in text or is_exact(ast.parse(text, mode="eval").body)


@cache
def _compile_expr(text: str) -> Callable[[SymbolValues], int]:
    """Compiles expression `text` into a function of the symbol values. Raises ValueError outside the grammar;
    the function raises KeyError for an unknown symbol.
    """
    body, names = _parse_expr(text)
    function = _parse_lambda(
        f"lambda sizes: (lambda {', '.join(names.values())}: 0)({_lookup_code('sizes', names)})"
    )
    function.body.body.func.body = body
    return _eval_tree(function)


@cache
def _compile_column_expr(text: str) -> Callable[[SizeColumns], int | list[int]]:
    """Compiles expression `text` into a function of columns of symbol values, which returns a list, or one
    number if the expression has no symbols.
    """
    body, names = _parse_expr(text)
    if not names:
        function = _parse_lambda("lambda columns: 0")
        function.body.body = body
    else:
        function = _parse_lambda(
            f"lambda columns: [0 for {', '.join(names.values())}, in zip({_lookup_code('columns', names)})]"
        )
        function.body.body.elt = body
    return _eval_tree(function)


class _ColumnSteps:
    """An expression as a list of operations on numbered values. The first values are the columns of
    `symbols`, and each step adds one; value `result` is that of the expression. Equal subexpressions share a
    step.
    """

    def __init__(self, text: str) -> None:
        node, names = _parse_expr(text)
        self.symbols = tuple(names)
        self._numbers: dict[object, int] = {variable: i for i, variable in enumerate(names.values())}
        self.steps: list[_Step] = []
        self.result = self._add_steps(node)

    def _add_steps(self, node: ast.expr) -> int:
        """Adds the steps of a checked expression and returns the number of its value."""
        match node:
            case ast.Name(id=name):
                return self._numbers[name]
            case ast.Constant(value=int(value)):
                return self._number_step(("constant", value, value))
            case ast.UnaryOp(operand=operand):
                return self._number_step(("Sub", self._add_steps(ast.Constant(0)), self._add_steps(operand)))
            case ast.BinOp(left=left, op=op, right=right):
                return self._number_step((type(op).__name__, self._add_steps(left), self._add_steps(right)))
            case ast.Call(func=ast.Name(id=name), args=args):
                return reduce(lambda a, b: self._number_step((name, a, b)), map(self._add_steps, args))
        raise AssertionError(ast.dump(node))

    def _number_step(self, step: _Step) -> int:
        if step not in self._numbers:
            self._numbers[step] = len(self._numbers)
            self.steps.append(step)
        return self._numbers[step]

    def evaluate_columns(self, columns: SizeColumns) -> list[int] | None:
        """Returns the values of all rows; None where that takes Python's integers: an intermediate result
        may exceed int64, or a divisor is 0. Raises KeyError for an unknown symbol.
        """
        try:
            value = self.evaluate_tensors({name: int_tensor(columns[name]) for name in self.symbols})
        except OverflowError:
            return None
        return value.tolist() if isinstance(value, torch.Tensor) else None

    def evaluate_tensors(self, columns: Mapping[str, torch.Tensor]) -> _Value | None:
        """Returns `evaluate_columns` of int64 tensors as one, or a constant."""
        values: list[_Value | _LargeProduct] = [columns[name] for name in self.symbols]
        limits = [_largest_magnitude(columns[name]) for name in self.symbols]  # no value is larger
        for operation, i, j in self.steps:
            if operation == "constant":
                if abs(i) > _MAX_INT64:
                    return None
                values.append(i)
                limits.append(abs(i))
                continue
            a, b = values[i], values[j]
            if isinstance(a, _LargeProduct) and operation == "FloorDiv" and isinstance(b, int):
                value, limit = a.divide(b)
            elif isinstance(a, _LargeProduct) or isinstance(b, _LargeProduct):
                return None
            else:
                value, limit = _compute_column(operation, a, b, limits[i], limits[j])
            if value is None:
                return None
            values.append(value)
            limits.append(limit)
        result = values[self.result]
        return None if isinstance(result, _LargeProduct) else result


_split_into_steps = cache(_ColumnSteps)


@dataclass(frozen=True)
class _LargeProduct:
    """A product beyond int64 of a column and a positive constant: its quotient may be within it."""

    column: torch.Tensor
    factor: int

    def divide(self, divisor: int) -> tuple[_Value | None, int]:
        """Returns (the floor of the quotient, how large it is at most); None if that takes larger numbers or
        the divisor is 0 or negative."""
        if divisor <= 0 or divisor * self.factor > _MAX_INT64:
            return None, 0
        whole = torch.floor_divide(self.column, divisor)
        limit = (_largest_magnitude(whole) + 1) * self.factor
        if limit > _MAX_INT64:
            return None, 0
        rest = self.column - whole * divisor
        return whole * self.factor + torch.floor_divide(rest * self.factor, divisor), limit


def _compute_column(
    operation: str, a: _Value, b: _Value, limit_a: int, limit_b: int
) -> tuple[_Value | _LargeProduct | None, int]:
    """Returns (the result of an operation, how large it is at most), given limits of its operands; None where
    that takes Python's integers."""
    if operation in ("FloorDiv", "Mod") and not _is_nonzero(b):
        return None, 0
    compute, limit_of = _COLUMN_OPERATIONS[operation]
    limit = limit_of(limit_a, limit_b)
    if limit > _MAX_INT64:
        limit = limit_of(_largest_magnitude(a), _largest_magnitude(b))
        if limit > _MAX_INT64:
            return _large_product(a, b) if operation == "Mult" else None, limit
    elif operation == "FloorDiv" and isinstance(b, int):
        limit = limit // abs(b) + 1
    return compute(a, b), limit


def _large_product(a: _Value, b: _Value) -> _LargeProduct | None:
    column, factor = (b, a) if isinstance(a, int) else (a, b)
    if isinstance(column, torch.Tensor) and isinstance(factor, int) and factor > 0:
        return _LargeProduct(column, factor)
    return None


def _largest_magnitude(value: _Value) -> int:
    if isinstance(value, int):
        return abs(value)
    least, most = value.aminmax()
    return max(-int(least), int(most))


def _is_nonzero(divisor: _Value) -> bool:
    """Whether no row divides by 0."""
    return bool(divisor) if isinstance(divisor, int) else bool(divisor.all())


def _divide(a: _Value, b: _Value) -> _Value:
    """`a // b`; of a tensor without the wrapper of its operator, which takes as long as the division."""
    return torch.floor_divide(a, b) if isinstance(a, torch.Tensor) else a // b


def _smaller(a: _Value, b: _Value) -> _Value:
    if isinstance(a, int):
        return min(a, b) if isinstance(b, int) else b.clamp(max=a)
    return a.clamp(max=b)


def _greater(a: _Value, b: _Value) -> _Value:
    if isinstance(a, int):
        return max(a, b) if isinstance(b, int) else b.clamp(min=a)
    return a.clamp(min=b)


# By operation: how values are computed, and how large the result of operands of some magnitudes can be.
_COLUMN_OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int, int], int]]] = {
    "Add": (operator.add, operator.add),
    "Sub": (operator.sub, operator.add),
    "Mult": (operator.mul, operator.mul),
    "FloorDiv": (_divide, lambda a, _: a),
    "Mod": (operator.mod, lambda _, b: b),
    "min": (_smaller, max),
    "max": (_greater, max),
}


def _parse_expr(text: str) -> tuple[ast.expr, dict[str, str]]:
    """Returns the tree of expression `text` with its symbols replaced by safe variable names, and {symbol:
    variable}. Raises ValueError for text outside the grammar."""
    names: dict[str, str] = {}
    try:
        node = ast.parse(text, mode="eval").body
        _rename_symbols(node, names)
    except (SyntaxError, RecursionError, MemoryError):  # the latter two: nested too deeply
        raise ValueError(f"not a size expression: {text[:_SHOWN_CHARACTERS]!r}") from None
    return node, names


def _rename_symbols(node: ast.expr, names: dict[str, str]) -> None:
    """Replaces the symbols of an expression by variables, which are added to `names`. Raises ValueError
    outside the grammar.
    """
    match node:
        case ast.Name():
            node.id = names.setdefault(node.id, f"_{len(names)}")
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            pass
        case ast.BinOp(op=op) if isinstance(op, _BINARY_OPS) and not _divides_by_zero(node):
            _rename_symbols(node.left, names)
            _rename_symbols(node.right, names)
        case ast.Call(func=ast.Name(id=name), args=[_, *_], keywords=[]) if name in _ALLOWED_CALLS:
            for a in node.args:
                _rename_symbols(a, names)
        case ast.UnaryOp(op=ast.USub()):
            _rename_symbols(node.operand, names)
        case _:
            raise ValueError(f"not a size expression: {ast.unparse(node)}")


def _divides_by_zero(node: ast.BinOp) -> bool:
    is_division = isinstance(node.op, (ast.FloorDiv, ast.Mod))
    return is_division and isinstance(node.right, ast.Constant) and node.right.value == 0


def _lookup_code(table: str, names: Mapping[str, str]) -> str:
    return ", ".join(f"{table}[{name!r}]" for name in names)


def _parse_lambda(code: str) -> Any:
    """Returns the tree of a lambda that is to get the body of a checked expression."""
    return ast.parse(code, mode="eval")


def _eval_tree(function: Any) -> Callable[[Any], Any]:
    """Evaluates the tree of a lambda."""
    code = compile(function, "<expression>", "eval")
    return eval(code, {"__builtins__": {}, "zip": zip, **_ALLOWED_CALLS})
