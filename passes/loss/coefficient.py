"""Coefficients of loss terms: scalars that are known before any forward, because they depend on inputs and
sizes alone.

A coefficient is a product: a number, a ratio of sizes of the whole global batch, and powers of *factors*. A
factor is the sum of an input-only scalar over all samples (`Leaf`), a scalar made from no input (`Given`), an
op of the user on coefficients (`Applied`), or a sum of coefficients (`Total`). They stay symbolic while the
loss is walked, so that a chain of weights and divisors becomes one short computation when it is emitted as
glue in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GlueOp, SizeOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType
from secc.passes.loss.pending_ops import Workshop

_ONE = sympy.Integer(1)
SCALAR = TensorType.of([], "f64")


@dataclass(frozen=True)
class Leaf:
    """The sum over the whole global batch of `value`, an input-only scalar that adds up over samples."""

    value: SSAValue


@dataclass(frozen=True)
class Given:
    """A scalar that depends on no input: made from Python data."""

    value: SSAValue


@dataclass(frozen=True)
class Applied:
    """The user's op on coefficients, such as `clamp(min=1)` on a count."""

    op: GlueOp
    operands: tuple[Coefficient, ...]


@dataclass(frozen=True)
class Total:
    """A sum of coefficients."""

    parts: tuple[Coefficient, ...]


Factor = Leaf | Given | Applied | Total


@dataclass(frozen=True)
class Coefficient:
    """`number * size * product of factor**power`; `size` is a quotient of size expressions."""

    number: float = 1.0
    size: Expr = _ONE
    factors: tuple[tuple[Factor, int], ...] = ()

    def __mul__(self, other: Coefficient) -> Coefficient:
        powers = dict(self.factors)
        for factor, power in other.factors:
            powers[factor] = powers.get(factor, 0) + power
        kept = tuple((factor, power) for factor, power in powers.items() if power)
        return Coefficient(self.number * other.number, self.size * other.size, kept)

    def __truediv__(self, other: Coefficient) -> Coefficient:
        if other.number == 0:
            return self * _raised(Total((other,)), -1)
        inverse = tuple((factor, -power) for factor, power in other.factors)
        return self * Coefficient(1.0, 1 / other.size, inverse)._over(other.number)

    def _over(self, number: float) -> Coefficient:
        # 1/3 * 0.3 is not 0.3/3 in floating point, so a divisor that is a whole number stays with the sizes.
        if number.is_integer():
            return replace(self, size=self.size / int(number))
        return replace(self, number=self.number / number)

    def __neg__(self) -> Coefficient:
        return replace(self, number=-self.number)

    @property
    def constant(self) -> float | None:
        """The number, if it depends on neither factors nor symbols."""
        return self.number * float(self.size) if not self.factors and not self.size.free_symbols else None


ONE = Coefficient()


def _raised(factor: Factor, power: int) -> Coefficient:
    return Coefficient(factors=((factor, power),))


def of_factor(factor: Factor) -> Coefficient:
    """The coefficient that is one factor."""
    return _raised(factor, 1)


def of_number(value: object) -> Coefficient | None:
    """The coefficient of a number in an argument list: a Python number or an expression over sizes; None for
    anything else."""
    match value:
        case bool():
            return None
        case int():
            return Coefficient(size=sympy.Integer(value)) if value else Coefficient(number=0.0)
        case float():
            return Coefficient(number=value)
        case sympy.Expr():
            floats = [f for f in sympy.Mul.make_args(value) if f.is_Float]
            exact = sympy.Mul(*(f for f in sympy.Mul.make_args(value) if not f.is_Float))
            number = 1.0
            for f in floats:
                number *= float(f)
            return Coefficient(number, exact)
        case _:
            return None


def total(parts: list[Coefficient]) -> Coefficient:
    """The sum of coefficients."""
    constants = [c for p in parts if (c := p.constant) is not None]
    rest = [p for p in parts if p.constant is None]
    if not rest:
        return Coefficient(number=sum(constants))
    if constants and sum(constants):
        rest.append(Coefficient(number=sum(constants)))
    return rest[0] if len(rest) == 1 else of_factor(Total(tuple(rest)))


class Emitter:
    """Emits coefficients as glue on float64 scalars; `leaf` gives the value that stands for the sum of a
    leaf."""

    def __init__(self, shop: Workshop, leaf: Callable[[SSAValue], SSAValue]) -> None:
        self.shop, self.leaf = shop, leaf
        self.known: dict[Coefficient | Factor, SSAValue] = {}

    def emit(self, coefficient: Coefficient) -> SSAValue:
        """The value of a coefficient."""
        if coefficient not in self.known:
            self.known[coefficient] = self._product(coefficient)
        return self.known[coefficient]

    def _product(self, coefficient: Coefficient) -> SSAValue:
        above, below = sympy.fraction(sympy.together(coefficient.size))
        number = coefficient.number
        if above.is_Integer:  # a number, not a size
            number, above = number * int(above), sympy.Integer(1)
        if below.is_Integer and (below == 1 or not coefficient.factors):
            number, below = number / int(below), sympy.Integer(1)
        tops = [self._size(above)] if above != 1 else []
        bottoms = [self._size(below)] if below != 1 else []
        for factor, power in coefficient.factors:
            (tops if power > 0 else bottoms).extend([self._factor(factor)] * abs(power))
        value = self._chain("aten.mul.Tensor", tops)
        divisor = self._chain("aten.mul.Tensor", bottoms)
        if value is None and divisor is None:
            return self._glue("aten.full.default", [], f"[], {number!r}, dtype=torch.float64")
        if value is None:
            assert divisor is not None
            value = self._glue("aten.reciprocal.default", [divisor], "$0")
        elif divisor is not None:
            value = self._glue("aten.div.Tensor", [value, divisor], "$0, $1")
        return value if number == 1 else self._glue("aten.mul.Tensor", [value], f"$0, {number!r}")

    def _chain(self, target: str, values: list[SSAValue]) -> SSAValue | None:
        if not values:
            return None
        result = values[0]
        for value in values[1:]:
            result = self._glue(target, [result, value], "$0, $1")
        return result

    def _factor(self, factor: Factor) -> SSAValue:
        if factor not in self.known:
            self.known[factor] = self._new_factor(factor)
        return self.known[factor]

    def _new_factor(self, factor: Factor) -> SSAValue:
        match factor:
            case Leaf(value):
                return self.leaf(value)
            case Given(value):
                return value
            case Applied(op, operands):
                return self._glue(op.target.data, [self.emit(o) for o in operands], op.args.data)
            case Total(parts):
                value = self._chain("aten.add.Tensor", [self.emit(p) for p in parts])
                assert value is not None
                return value

    def _size(self, size: Expr) -> SSAValue:
        text = size_expr.text(size)
        return self.shop.add(
            SizeOp.create(result_types=[SCALAR], properties={"value": StringAttr(text)})
        ).results[0]

    def _glue(self, target: str, operands: list[SSAValue], args: str) -> SSAValue:
        return self.shop.add(GlueOp.of(target, operands, args, [SCALAR])).results[0]
