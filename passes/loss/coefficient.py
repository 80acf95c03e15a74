"""Coefficients of loss terms: scalars that are known before any forward, because they depend on inputs,
random numbers and sizes alone.

A coefficient is a product: a number, a ratio of sizes of the whole global batch, and powers of *factors*. A
factor is the sum over all samples of a scalar that no block decides (`Leaf`), a scalar made from no input
(`Given`), an op of the user on coefficients (`Applied`), or a sum of coefficients (`Total`). They stay
symbolic while the loss is walked, so that a chain of weights and divisors becomes one short computation when
it is emitted as glue in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import sympy
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GlueOp, SizeOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.pending_ops import PendingOps

_UNIT_SIZE = sympy.Integer(1)
SCALAR_TYPE = TensorType.from_dims([], "f64")


@dataclass(frozen=True)
class LeafFactor:
    """The sum of `value`, a scalar that adds up over samples and that no block decides, over the whole global
    batch."""

    value: SSAValue


@dataclass(frozen=True)
class GivenFactor:
    """A scalar that depends on no input: made from Python data."""

    value: SSAValue


@dataclass(frozen=True)
class AppliedFactor:
    """The user's op on coefficients, such as `clamp(min=1)` on a count. Its value is its first result: one
    number, or a vector of `length` numbers, as which it is an operand of other ops only."""

    op: GlueOp
    operands: tuple[Coefficient, ...]
    length: int | None = None


@dataclass(frozen=True)
class TotalFactor:
    """A sum of coefficients."""

    parts: tuple[Coefficient, ...]


CoefficientFactor = LeafFactor | GivenFactor | AppliedFactor | TotalFactor


@dataclass(frozen=True)
class Coefficient:
    """`number * size * product of factor**power`; `size` is a quotient of size expressions."""

    number: float = 1.0
    size: Expr = _UNIT_SIZE
    factors: tuple[tuple[CoefficientFactor, int], ...] = ()

    def __mul__(self, other: Coefficient) -> Coefficient:
        powers = dict(self.factors)
        for factor, power in other.factors:
            powers[factor] = powers.get(factor, 0) + power
        kept = tuple((factor, power) for factor, power in powers.items() if power)
        return Coefficient(self.number * other.number, self.size * other.size, kept)

    def __truediv__(self, other: Coefficient) -> Coefficient:
        if other.number == 0:
            return self * _power_of_factor(TotalFactor((other,)), -1)
        inverse = tuple((factor, -power) for factor, power in other.factors)
        return self * Coefficient(1.0, 1 / other.size, inverse)._divide_by_number(other.number)

    def _divide_by_number(self, number: float) -> Coefficient:
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


UNIT_COEFFICIENT = Coefficient()


def _power_of_factor(factor: CoefficientFactor, power: int) -> Coefficient:
    return Coefficient(factors=((factor, power),))


def coefficient_of_factor(factor: CoefficientFactor) -> Coefficient:
    """A factor as a coefficient."""
    return _power_of_factor(factor, 1)


def coefficient_of_number(value: object) -> Coefficient | None:
    """A number in an argument list, a Python number or an expression over sizes, as a coefficient; None for
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


def sum_coefficients(parts: list[Coefficient]) -> Coefficient:
    """The sum of coefficients."""
    constants = [c for p in parts if (c := p.constant) is not None]
    rest = [p for p in parts if p.constant is None]
    if not rest:
        return Coefficient(number=sum(constants))
    if constants and sum(constants):
        rest.append(Coefficient(number=sum(constants)))
    return rest[0] if len(rest) == 1 else coefficient_of_factor(TotalFactor(tuple(rest)))


def _is_truth_value(factor: CoefficientFactor) -> bool:
    return isinstance(factor, AppliedFactor) and tensor_type(factor.op.results[0]).dtype.data == "bool"


class CoefficientEmitter:
    """Emits coefficients as ops on float64 scalars; `leaf` gives the value of the sum of a leaf."""

    def __init__(self, shop: PendingOps, leaf: Callable[[SSAValue], SSAValue]) -> None:
        self.shop, self.leaf = shop, leaf
        self.known: dict[Coefficient | CoefficientFactor, SSAValue] = {}

    def emit_coefficient(self, coefficient: Coefficient) -> SSAValue:
        """The value of a coefficient; equal coefficients are emitted once."""
        if coefficient not in self.known:
            self.known[coefficient] = self._emit_product(coefficient)
        return self.known[coefficient]

    def _emit_product(self, coefficient: Coefficient) -> SSAValue:
        above, below = sympy.fraction(sympy.together(coefficient.size))
        number = coefficient.number
        if above.is_Integer:  # a number, not a size
            number, above = number * int(above), sympy.Integer(1)
        if below.is_Integer and (below == 1 or not coefficient.factors):
            number, below = number / int(below), sympy.Integer(1)
        tops = [self._emit_size(above)] if above != 1 else []
        bottoms = [self._emit_size(below)] if below != 1 else []
        for factor, power in coefficient.factors:
            (tops if power > 0 else bottoms).extend([self._emit_number(factor)] * abs(power))
        value = self._emit_chain("aten.mul.Tensor", tops)
        divisor = self._emit_chain("aten.mul.Tensor", bottoms)
        if value is None and divisor is None:
            return self._emit_glue("aten.full.default", [], f"[], {number!r}, dtype=torch.float64")
        if value is None:
            assert divisor is not None
            value = self._emit_glue("aten.reciprocal.default", [divisor], "$0")
        elif divisor is not None:
            value = self._emit_glue("aten.div.Tensor", [value, divisor], "$0, $1")
        return value if number == 1 else self._emit_glue("aten.mul.Tensor", [value], f"$0, {number!r}")

    def _emit_chain(self, target: str, values: list[SSAValue]) -> SSAValue | None:
        if not values:
            return None
        result = values[0]
        for value in values[1:]:
            result = self._emit_glue(target, [result, value], "$0, $1")
        return result

    def _emit_number(self, factor: CoefficientFactor) -> SSAValue:
        """The value of a factor in float64: torch adds truth values to a truth value."""
        value = self._emit_factor(factor)
        if not _is_truth_value(factor):
            return value
        return self._emit_glue("aten._to_copy.default", [value], "$0, dtype=torch.float64")

    def _emit_operand(self, coefficient: Coefficient) -> SSAValue:
        """The value of an operand of the user's op, which may want a truth value."""
        match coefficient:
            case Coefficient(number=1.0, size=size, factors=((factor, 1),)) if size == 1:
                return self._emit_factor(factor)
            case _:
                return self.emit_coefficient(coefficient)

    def _emit_factor(self, factor: CoefficientFactor) -> SSAValue:
        if factor not in self.known:
            self.known[factor] = self._emit_new_factor(factor)
        return self.known[factor]

    def _emit_new_factor(self, factor: CoefficientFactor) -> SSAValue:
        match factor:
            case LeafFactor(value):
                return self.leaf(value)
            case GivenFactor(value):
                return value
            case AppliedFactor(op, operands, length):
                values = [self._emit_operand(o) for o in operands]
                type = SCALAR_TYPE if length is None else TensorType.from_dims([length], "f64")
                return self._emit_glue(op.target.data, values, op.args.data, [type] * len(op.results))
            case TotalFactor(parts):
                value = self._emit_chain("aten.add.Tensor", [self.emit_coefficient(p) for p in parts])
                assert value is not None
                return value

    def _emit_size(self, size: Expr) -> SSAValue:
        text = size_expr.format_expr(size)
        return self.shop.add_op(
            SizeOp.create(result_types=[SCALAR_TYPE], properties={"value": StringAttr(text)})
        ).results[0]

    def _emit_glue(
        self, target: str, operands: list[SSAValue], args: str, types: Sequence[TensorType] = (SCALAR_TYPE,)
    ) -> SSAValue:
        return self.shop.add_op(GlueOp.create_call(target, operands, args, types)).results[0]
