"""Reads the glue of a case forward: which values are formulas over a head's logits, and why a value that
comes from logits is none.

A table says which function reads an op, by the op's base name. A spelling of a loss that is not understood is
a new entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.ir.dialect.argument_template import Ref
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, ConstOp, GlueOp, GraphOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.fusion import logit_heads, loss_ops, row_views
from secc.passes.fusion.formula import (
    ENTRIES,
    SAME,
    SHAPES,
    TOTAL,
    Formula,
    Head,
    LogMix,
    LogProb,
    Plain,
    Prob,
    Source,
    View,
    source,
)
from secc.passes.fusion.not_a_formula import Unread
from secc.passes.loss.pending_ops import argument

FLOATS = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


class Reader:
    """The formulas of one case's values. `unread` says for ops on formulas that are none themselves why
    not."""

    def __init__(self, graph: GraphOp, case: CaseOp) -> None:
        self.graph, self.case = graph, case
        self.formulas: dict[SSAValue, Formula] = {}
        self.unread: dict[Operation, str] = {}
        self.compared: dict[
            Head, None
        ] = {}  # heads whose logits are normalised over the tokens: losses, not layers
        for op in case.ops:
            if isinstance(op, Computation):
                self._read(op)

    def _read(self, op: Computation) -> None:
        head = logit_heads.head(self.graph, op)
        if head is not None:
            fixed = not tensor(head.logits).requires_grad
            self.formulas[head.logits] = Formula.of(
                ENTRIES, Plain(logit_heads.logits(head, fixed)), 1.0, len(tensor(head.logits).dims) - 1
            )
        if head is not None or isinstance(op, CallOp) or not any(o in self.formulas for o in op.operands):
            return
        rule = RULES.get(op.base)
        try:
            if rule is None:
                raise Unread(f"{op.callee} is not part of a loss that an operator computes")
            self.formulas[op.results[0]] = rule(self, op)
        except Unread as reason:
            self.unread[op] = str(reason)

    def formula(self, value: Any) -> Formula | None:
        return self.formulas.get(value) if isinstance(value, SSAValue) else None

    def of(self, op: Computation, index: int = 0) -> Formula:
        """The formula of an operand. Raises Unread if it has none."""
        found = self.formula(op.operands[index])
        if found is None:
            raise Unread(f"{op.callee} takes something else in the place of logits or probabilities")
        return found

    def number(self, op: Computation, value: Any) -> float | None:
        """An argument as a number: written down, or a constant that the model makes of one."""
        if isinstance(value, Ref):
            owner = op.operands[value.index].owner
            text = owner.attributes.get("value") if isinstance(owner, ConstOp) else None
            return float(text.data) if isinstance(text, StringAttr) else None
        if isinstance(value, Expr):
            return float(value) if value.is_number else None
        return float(value) if isinstance(value, int | float) else None

    def mask(self, value: SSAValue, like: TensorType, axis: int | None) -> Source:
        """A factor of rows as a mask. Raises Unread unless it is 0 or 1 everywhere and has no gradient."""
        kind = tensor(value)
        if kind.requires_grad:
            raise Unread("rows are weighted by something that is trained")
        found = boolean(value)
        if found is None:
            raise Unread(
                "rows are weighted by numbers that need not be 0 or 1; a comparison (mask != 0) would show that they are"
            )
        wanted = row_views.rows_of(like.shape, axis)
        shape = (*(like.shape[0] * 0 + 1 for _ in range(len(like.shape) - len(kind.dims))), *kind.shape)
        if axis is not None and shape[axis] != 1:
            raise Unread("a mask differs from token to token of the vocabulary")
        rows = row_views.rows_of(shape, axis)
        seen = found.seen(View("reshape", rows))
        return seen if rows == wanted else seen.seen(View("expand", wanted))


def boolean(value: SSAValue) -> Source | None:
    """A value as booleans: one, or the same as numbers 0 and 1."""
    shape = tensor(value).shape
    while tensor(value).dtype.data != "bool":
        owner = value.owner
        if not isinstance(owner, GlueOp) or owner.base not in {"_to_copy", "to", *SHAPES, *SAME}:
            return None
        value = owner.operands[0]
    return source(value).seen(View("reshape", shape))


def _move(r: Reader, op: Computation) -> Formula:
    """An op on the shape of entries or rows."""
    formula = r.of(op)
    if formula.kind == TOTAL:
        return formula
    entries = formula.kind == ENTRIES
    if (cut := _tokens(op, formula)) is not None:
        return cut
    found = row_views.moved(op, formula.axis if entries else None)
    if found is None:
        raise Unread(f"{op.callee} takes the tokens of the vocabulary apart or mixes them with rows")
    view, axis = found
    return formula.mapped(lambda s: s if view is None else s.seen(view), axis)


def _tokens(op: Computation, formula: Formula) -> Formula | None:
    """`logits[..., :n]`: the first tokens of plain logits."""
    plain = formula.single()
    rank = len(tensor(op.operands[0]).dims)
    at_tokens = (
        op.base == "slice"
        and formula.kind == ENTRIES
        and int(argument(op, 1, "dim", 0)) % rank == formula.axis
    )
    if (
        not at_tokens
        or not isinstance(plain, Plain)
        or argument(op, 2, "start") not in {0, None}
        or argument(op, 4, "step", 1) != 1
    ):
        return None
    tokens = int(tensor(op.results[0]).shape[formula.axis])
    return formula.mapped(lambda s: s if isinstance(s, Source) else replace(s, tokens=tokens))


def _same(r: Reader, op: Computation) -> Formula:
    return r.of(op)


def _cast(r: Reader, op: Computation) -> Formula:
    before, after = (tensor(v).dtype.data for v in (op.operands[0], op.results[0]))
    if FLOATS.get(after, 0) < FLOATS.get(before, 9):
        raise Unread(f"the loss is computed in {after}, less than the {before} before")
    return r.of(op)


def _detach(r: Reader, op: Computation) -> Formula:
    return r.of(op).mapped(lambda s: s if isinstance(s, Source) else replace(s, fixed=True))


def _scaled(formula: Formula, number: float) -> Formula:
    """Logits stay logits when they are scaled."""
    plain = formula.single()
    if isinstance(plain, Plain) and formula.kind == ENTRIES and not plain.of.softcap:
        return formula.mapped(lambda s: s if isinstance(s, Source) else replace(s, scale=s.scale * number))
    return formula.scaled(number)


def _multiply(r: Reader, op: Computation) -> Formula:
    left, right = (op.arguments.args[:2]) if len(op.arguments.args) > 1 else (None, None)
    for one, other in ((left, right), (right, left)):
        formula = r.formula(op.operands[one.index]) if isinstance(one, Ref) else None
        number = r.number(op, other)
        if formula is not None and number is not None:
            return loss_ops.uncapped(formula, number) or _scaled(formula, number)
    return _product(r, op)


def _product(r: Reader, op: Computation) -> Formula:
    """Entries times entries, or a formula times a mask."""
    found = [r.formula(o) for o in op.operands]
    if len(op.operands) == 1 and found[0] is not None:
        found = [found[0], found[0]]
    known = [f for f in found if f is not None]
    result = tensor(op.results[0])
    if len(known) == 2:
        loss_ops.alike(op, known, [tensor(o) for o in op.operands])
        return known[0].times(known[1])
    place = 0 if found[0] is not None else 1
    formula, mask = known[0], op.operands[1 - place]
    if formula.kind == TOTAL or tensor(op.operands[place]).shape != result.shape:
        raise Unread("a sum over rows is multiplied by something that is no number")
    return formula.masked(r.mask(mask, result, formula.axis if formula.kind == ENTRIES else None))


def _divide(r: Reader, op: Computation) -> Formula:
    formula, number = r.of(op), r.number(op, argument(op, 1, "other"))
    if number is None or number == 0 or argument(op, 2, "rounding_mode") is not None:
        raise Unread(f"{op.callee} divides by something that is no number")
    return _scaled(formula, 1 / number)


def _add(r: Reader, op: Computation) -> Formula:
    """`a + alpha * b`, `a - alpha * b`."""
    if logit_heads.adds_bias(op, r.formula(op.operands[0])):
        return logit_heads.with_bias(op, r.of(op))
    args = op.arguments.args
    alpha = r.number(op, argument(op, 2, "alpha", 1))
    if len(args) < 2 or alpha is None:
        raise Unread(f"{op.callee} adds a varying multiple")
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[op.base]
    total: Formula | None = None
    formulas = [r.formula(o) for o in op.operands]
    loss_ops.alike(op, [f for f in formulas if f is not None], [tensor(o) for o in op.operands])
    for value, sign in zip(args[:2], signs, strict=True):
        part = loss_ops.addend(
            r.formula(op.operands[value.index]) if isinstance(value, Ref) else None,
            r.number(op, value),
            formulas,
        )
        total = part.scaled(sign) if total is None else total.plus(part.scaled(sign))
    assert total is not None
    return total


def _negate(r: Reader, op: Computation) -> Formula:
    return _scaled(r.of(op), -1.0)


def _softmax(r: Reader, op: Computation) -> Formula:
    """Softmax and log-softmax over the tokens."""
    formula = r.of(op)
    plain = formula.single()
    if formula.kind != ENTRIES or not isinstance(plain, Plain) or plain.of.softcap == loss_ops.TANH:
        raise Unread(f"{op.callee} is not taken of plain logits")
    if int(argument(op, 1, "dim")) % len(tensor(op.operands[0]).dims) != formula.axis:
        raise Unread(f"{op.callee} is not taken over the tokens of the vocabulary")
    r.compared[plain.of.head] = None
    return Formula.of(ENTRIES, LogProb(plain.of) if "log" in op.base else Prob(plain.of), 1.0, formula.axis)


def _exp(r: Reader, op: Computation) -> Formula:
    formula = r.of(op)
    logarithm = formula.single()
    if not isinstance(logarithm, LogProb):
        raise Unread("exp is not taken of log-probabilities")
    return Formula.of(ENTRIES, Prob(logarithm.of), 1.0, formula.axis)


def _log(r: Reader, op: Computation) -> Formula:
    formula = r.of(op)
    single = formula.single()
    if isinstance(single, Prob):
        return Formula.of(ENTRIES, LogProb(single.of), 1.0, formula.axis)
    parts = [
        (factors[0], number)
        for (masks, factors), number in formula.terms.items()
        if len(factors) == 1 and not masks
    ]
    if (
        len(formula.terms) == len(parts) == 2
        and all(isinstance(f, Prob) for f, _ in parts)
        and abs(sum(n for _, n in parts) - 1) < 1e-12
    ):
        (one, share), (other, _) = parts
        return Formula.of(ENTRIES, LogMix(share, one.of, other.of), 1.0, formula.axis)  # pyright: ignore[reportAttributeAccessIssue]
    raise Unread("log is not taken of probabilities or a mixture of two")


def _xlogy(r: Reader, op: Computation) -> Formula:
    """`x * log(y)`, of one tensor as a rule."""
    refs = [a.index for a in op.arguments.args if isinstance(a, Ref)]
    if len(refs) != 2 or refs[0] != refs[1]:
        raise Unread("xlogy is not taken of one tensor")
    formula = r.of(op)
    single = formula.single()
    if not isinstance(single, Prob):
        raise Unread("xlogy is not taken of probabilities")
    return formula.times(Formula.of(ENTRIES, LogProb(single.of)))


RULES: dict[str, Callable[[Reader, Computation], Formula]] = (
    dict.fromkeys(row_views.MOVES, _move)
    | dict.fromkeys(SAME, _same)
    | dict.fromkeys(["_to_copy", "to"], _cast)
    | dict.fromkeys(["_softmax", "_log_softmax", "softmax", "log_softmax"], _softmax)
    | dict.fromkeys(["add", "sub", "rsub"], _add)
    | {
        "detach": _detach,
        "mul": _multiply,
        "div": _divide,
        "neg": _negate,
        "exp": _exp,
        "log": _log,
        "xlogy": _xlogy,
    }
    | cast("dict[str, Callable[[Reader, Computation], Formula]]", loss_ops.RULES)
)
