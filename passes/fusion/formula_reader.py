"""Reads a case forward: which values are formulas over a head's logits, and why others that come from logits
are not.

A table says which function reads an op, by the op's base name. A new spelling of a loss is a new entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.ir.dialect.argument_template import OperandRef
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, ConstOp, GlueOp, GraphOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.fusion import logit_heads, loss_ops, row_views
from secc.passes.fusion.formula import (
    IDENTITY_OPS,
    KIND_ENTRIES,
    KIND_TOTAL,
    SHAPE_OPS,
    Formula,
    LinearHead,
    LogMixture,
    LogProbability,
    PlainLogit,
    Probability,
    RowSource,
    RowView,
    read_source,
)
from secc.passes.fusion.not_a_formula import NotAFormula
from secc.passes.loss.pending_ops import get_argument

FLOAT_SIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


class FormulaReader:
    """The formulas of one case's values. `unread` says for ops on formulas without one themselves why they
    have none."""

    def __init__(self, graph: GraphOp, case: CaseOp) -> None:
        self.graph, self.case = graph, case
        self.formulas: dict[SSAValue, Formula] = {}
        self.unread: dict[Operation, str] = {}
        self.compared: dict[
            LinearHead, None
        ] = {}  # heads with logits normalised over the tokens: losses, not layers
        for op in case.ops:
            if isinstance(op, Computation):
                self._read_op(op)

    def _read_op(self, op: Computation) -> None:
        head = logit_heads.find_head(self.graph, op)
        if head is not None:
            fixed = not tensor_type(head.logits).requires_grad
            self.formulas[head.logits] = Formula.from_factor(
                KIND_ENTRIES,
                PlainLogit(logit_heads.head_logits(head, fixed)),
                1.0,
                len(tensor_type(head.logits).dims) - 1,
            )
        if head is not None or isinstance(op, CallOp) or not any(o in self.formulas for o in op.operands):
            return
        rule = FORMULA_RULES.get(op.base_name)
        try:
            if rule is None:
                raise NotAFormula(f"{op.callee} is not part of a loss that an operator computes")
            self.formulas[op.results[0]] = rule(self, op)
        except NotAFormula as reason:
            self.unread[op] = str(reason)

    def formula_of(self, value: Any) -> Formula | None:
        """The formula of a value, None if it has none."""
        return self.formulas.get(value) if isinstance(value, SSAValue) else None

    def operand_formula(self, op: Computation, index: int = 0) -> Formula:
        """The formula of an operand. Raises NotAFormula if it has none."""
        found = self.formula_of(op.operands[index])
        if found is None:
            raise NotAFormula(f"{op.callee} takes something else in the place of logits or probabilities")
        return found

    def read_number(self, op: Computation, value: Any) -> float | None:
        """An argument as a number: a literal, or a constant that holds one; None for anything else."""
        if isinstance(value, OperandRef):
            owner = op.operands[value.index].owner
            text = owner.attributes.get("value") if isinstance(owner, ConstOp) else None
            return float(text.data) if isinstance(text, StringAttr) else None
        if isinstance(value, Expr):
            return float(value) if value.is_number else None
        return float(value) if isinstance(value, int | float) else None

    def read_mask(self, value: SSAValue, like: TensorType, axis: int | None) -> RowSource:
        """A factor of rows as a mask, or as a weight unless it is 0 or 1 everywhere. Raises NotAFormula for
        one that needs a gradient, and for one that rounds less than the rows."""
        kind = tensor_type(value)
        if kind.requires_grad:
            raise NotAFormula("rows are weighted by something that is trained")
        found = read_boolean(value)
        if found is None:
            if FLOAT_SIZES.get(kind.dtype.data, 0) > FLOAT_SIZES.get(like.dtype.data, 8):
                raise NotAFormula(f"rows are weighted in {kind.dtype.data}, more than the loss has")
            found = replace(read_source(value), is_weight=True)
        wanted = row_views.row_dims(like.shape, axis)
        shape = (*(like.shape[0] * 0 + 1 for _ in range(len(like.shape) - len(kind.dims))), *kind.shape)
        if axis is not None and shape[axis] != 1:
            raise NotAFormula("a mask differs from token to token of the vocabulary")
        rows = row_views.row_dims(shape, axis)
        seen = found.with_view(RowView("reshape", rows))
        return seen if rows == wanted else seen.with_view(RowView("expand", wanted))


def read_boolean(value: SSAValue) -> RowSource | None:
    """A value as booleans, or as numbers cast from booleans; None for any other."""
    shape = tensor_type(value).shape
    while tensor_type(value).dtype.data != "bool":
        owner = value.owner
        if not isinstance(owner, GlueOp) or owner.base_name not in {
            "_to_copy",
            "to",
            *SHAPE_OPS,
            *IDENTITY_OPS,
        }:
            return None
        value = owner.operands[0]
    return read_source(value).with_view(RowView("reshape", shape))


def _read_move(r: FormulaReader, op: Computation) -> Formula:
    """An op on the shape of entries or rows."""
    formula = r.operand_formula(op)
    if formula.kind == KIND_TOTAL:
        return formula
    entries = formula.kind == KIND_ENTRIES
    if (cut := _read_token_slice(op, formula)) is not None:
        return cut
    found = row_views.read_move(op, formula.axis if entries else None)
    if found is None:
        raise NotAFormula(f"{op.callee} takes the tokens of the vocabulary apart or mixes them with rows")
    view, axis = found
    return formula.map_sources(lambda s: s if view is None else s.with_view(view), axis)


def _read_token_slice(op: Computation, formula: Formula) -> Formula | None:
    """`logits[..., :n]`: the first tokens of plain logits."""
    plain = formula.single_factor()
    rank = len(tensor_type(op.operands[0]).dims)
    at_tokens = (
        op.base_name == "slice"
        and formula.kind == KIND_ENTRIES
        and int(get_argument(op, 1, "dim", 0)) % rank == formula.axis
    )
    if (
        not at_tokens
        or not isinstance(plain, PlainLogit)
        or get_argument(op, 2, "start") not in {0, None}
        or get_argument(op, 4, "step", 1) != 1
    ):
        return None
    tokens = int(tensor_type(op.results[0]).shape[formula.axis])
    return formula.map_sources(lambda s: s if isinstance(s, RowSource) else replace(s, tokens=tokens))


def _read_identity(r: FormulaReader, op: Computation) -> Formula:
    return r.operand_formula(op)


def _read_cast(r: FormulaReader, op: Computation) -> Formula:
    before, after = (tensor_type(v).dtype.data for v in (op.operands[0], op.results[0]))
    if FLOAT_SIZES.get(after, 0) < FLOAT_SIZES.get(before, 9):
        raise NotAFormula(f"the loss is computed in {after}, less than the {before} before")
    return r.operand_formula(op)


def _read_detach(r: FormulaReader, op: Computation) -> Formula:
    return r.operand_formula(op).map_sources(
        lambda s: s if isinstance(s, RowSource) else replace(s, fixed=True)
    )


def _scale_formula(formula: Formula, number: float) -> Formula:
    """Logits stay logits when they are scaled; capped ones are capped elsewhere then."""
    plain = formula.single_factor()
    if not isinstance(plain, PlainLogit) or formula.kind != KIND_ENTRIES:
        return formula.scale_by(number)
    if plain.of.softcap and (number <= 0 or plain.of.softcap == loss_ops.PENDING_TANH):
        return formula.scale_by(number)
    return formula.map_sources(
        lambda s: (
            s if isinstance(s, RowSource) else replace(s, scale=s.scale * number, softcap=s.softcap * number)
        )
    )


def _read_multiply(r: FormulaReader, op: Computation) -> Formula:
    left, right = (op.arguments.args[:2]) if len(op.arguments.args) > 1 else (None, None)
    for one, other in ((left, right), (right, left)):
        formula = r.formula_of(op.operands[one.index]) if isinstance(one, OperandRef) else None
        number = r.read_number(op, other)
        if formula is not None and number is not None:
            return loss_ops.read_softcap(formula, number) or _scale_formula(formula, number)
    return _read_product(r, op)


def _read_product(r: FormulaReader, op: Computation) -> Formula:
    """Entries times entries, or a formula times a mask."""
    found = [r.formula_of(o) for o in op.operands]
    if len(op.operands) == 1 and found[0] is not None:
        found = [found[0], found[0]]
    known = [f for f in found if f is not None]
    result = tensor_type(op.results[0])
    if len(known) == 2:
        loss_ops.require_same_shape(op, known, [tensor_type(o) for o in op.operands])
        return known[0].times(known[1])
    place = 0 if found[0] is not None else 1
    formula, mask = known[0], op.operands[1 - place]
    if formula.kind == KIND_TOTAL or tensor_type(op.operands[place]).shape != result.shape:
        raise NotAFormula("a sum over rows is multiplied by something that is no number")
    return formula.mask_rows(
        r.read_mask(mask, result, formula.axis if formula.kind == KIND_ENTRIES else None)
    )


def _read_divide(r: FormulaReader, op: Computation) -> Formula:
    formula, number = r.operand_formula(op), r.read_number(op, get_argument(op, 1, "other"))
    if number is None or number == 0 or get_argument(op, 2, "rounding_mode") is not None:
        raise NotAFormula(f"{op.callee} divides by something that is no number")
    return _scale_formula(formula, 1 / number)


def _read_add(r: FormulaReader, op: Computation) -> Formula:
    """`a + alpha * b`, `a - alpha * b`."""
    if logit_heads.adds_bias(op, r.formula_of(op.operands[0])):
        return logit_heads.add_bias(op, r.operand_formula(op))
    args = op.arguments.args
    alpha = r.read_number(op, get_argument(op, 2, "alpha", 1))
    if len(args) < 2 or alpha is None:
        raise NotAFormula(f"{op.callee} adds a varying multiple")
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[op.base_name]
    total: Formula | None = None
    formulas = [r.formula_of(o) for o in op.operands]
    loss_ops.require_same_shape(
        op, [f for f in formulas if f is not None], [tensor_type(o) for o in op.operands]
    )
    for value, sign in zip(args[:2], signs, strict=True):
        part = loss_ops.read_addend(
            r.formula_of(op.operands[value.index]) if isinstance(value, OperandRef) else None,
            r.read_number(op, value),
            formulas,
        )
        total = part.scale_by(sign) if total is None else total.plus(part.scale_by(sign))
    assert total is not None
    return total


def _read_negate(r: FormulaReader, op: Computation) -> Formula:
    return _scale_formula(r.operand_formula(op), -1.0)


def _read_softmax(r: FormulaReader, op: Computation) -> Formula:
    """Softmax and log-softmax over the tokens."""
    formula = r.operand_formula(op)
    plain = formula.single_factor()
    if (
        formula.kind != KIND_ENTRIES
        or not isinstance(plain, PlainLogit)
        or plain.of.softcap == loss_ops.PENDING_TANH
    ):
        raise NotAFormula(f"{op.callee} is not taken of plain logits")
    if int(get_argument(op, 1, "dim")) % len(tensor_type(op.operands[0]).dims) != formula.axis:
        raise NotAFormula(f"{op.callee} is not taken over the tokens of the vocabulary")
    r.compared[plain.of.head] = None
    return Formula.from_factor(
        KIND_ENTRIES,
        LogProbability(plain.of) if "log" in op.base_name else Probability(plain.of),
        1.0,
        formula.axis,
    )


def _read_exp(r: FormulaReader, op: Computation) -> Formula:
    formula = r.operand_formula(op)
    logarithm = formula.single_factor()
    if not isinstance(logarithm, LogProbability):
        raise NotAFormula("exp is not taken of log-probabilities")
    return Formula.from_factor(KIND_ENTRIES, Probability(logarithm.of), 1.0, formula.axis)


def _read_log(r: FormulaReader, op: Computation) -> Formula:
    formula = r.operand_formula(op)
    single = formula.single_factor()
    if isinstance(single, Probability):
        return Formula.from_factor(KIND_ENTRIES, LogProbability(single.of), 1.0, formula.axis)
    parts = [
        (factors[0], number)
        for (masks, factors), number in formula.terms.items()
        if len(factors) == 1 and not masks
    ]
    if (
        len(formula.terms) == len(parts) == 2
        and all(isinstance(f, Probability) for f, _ in parts)
        and abs(sum(n for _, n in parts) - 1) < 1e-12
    ):
        (one, share), (other, _) = parts
        return Formula.from_factor(KIND_ENTRIES, LogMixture(share, one.of, other.of), 1.0, formula.axis)  # pyright: ignore[reportAttributeAccessIssue]
    raise NotAFormula("log is not taken of probabilities or a mixture of two")


def _read_xlogy(r: FormulaReader, op: Computation) -> Formula:
    """`x * log(y)`, of one tensor as a rule."""
    refs = [a.index for a in op.arguments.args if isinstance(a, OperandRef)]
    if len(refs) != 2 or refs[0] != refs[1]:
        raise NotAFormula("xlogy is not taken of one tensor")
    formula = r.operand_formula(op)
    single = formula.single_factor()
    if not isinstance(single, Probability):
        raise NotAFormula("xlogy is not taken of probabilities")
    return formula.times(Formula.from_factor(KIND_ENTRIES, LogProbability(single.of)))


FORMULA_RULES: dict[str, Callable[[FormulaReader, Computation], Formula]] = (
    dict.fromkeys(row_views.MOVE_OPS, _read_move)
    | dict.fromkeys(IDENTITY_OPS, _read_identity)
    | dict.fromkeys(["_to_copy", "to"], _read_cast)
    | dict.fromkeys(["_softmax", "_log_softmax", "softmax", "log_softmax"], _read_softmax)
    | dict.fromkeys(["add", "sub", "rsub"], _read_add)
    | {
        "detach": _read_detach,
        "mul": _read_multiply,
        "div": _read_divide,
        "neg": _read_negate,
        "exp": _read_exp,
        "log": _read_log,
        "xlogy": _read_xlogy,
    }
    | cast("dict[str, Callable[[FormulaReader, Computation], Formula]]", loss_ops.LOSS_RULES)
)
