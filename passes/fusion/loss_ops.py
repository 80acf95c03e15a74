"""Reads what makes rows and totals of entries: sums, means, picked labels, masks, torch's own losses; and
softcaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xdsl.ir import SSAValue

from secc.ir.dialect.argument_template import Ref
from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.fusion import row_views
from secc.passes.fusion.formula import (
    ENTRIES,
    ROWS,
    TOTAL,
    Entry,
    Formula,
    LogProb,
    LogSum,
    Picked,
    Plain,
    Source,
    Summed,
    View,
    source,
)
from secc.passes.fusion.not_a_formula import Unread
from secc.passes.loss.pending_ops import argument
from secc.passes.loss.reductions import NONE, SUM, reduced_dims

if TYPE_CHECKING:
    from secc.passes.fusion.formula_reader import Reader


def alike(op: Computation, formulas: Sequence[Formula], types: Sequence[TensorType]) -> None:
    """Raise Unread unless formulas that an op combines stand for the same entries or rows."""
    if len({(f.kind, f.axis if f.kind == ENTRIES else -1) for f in formulas}) > 1 or (
        len(formulas) > 1 and len({t.shape for t in types}) > 1
    ):
        raise Unread(f"{op.callee} combines values of different shapes")


def addend(formula: Formula | None, number: float | None, others: Sequence[Formula | None]) -> Formula:
    """What is added: a formula, or a number in the place of one. Raises Unread for anything else."""
    if formula is not None:
        return formula
    like = next((f for f in others if f is not None), None)
    if number is None or like is None:
        raise Unread("something that does not come from logits is added")
    return replace(like, terms={(frozenset[Source](), ()): number})


def uncapped(formula: Formula, number: float) -> Formula | None:
    """`number * tanh(x / number)`: capped logits."""
    plain = formula.single()
    if not isinstance(plain, Plain) or plain.of.softcap != TANH or number <= 0:
        return None
    return formula.mapped(
        lambda s: s if isinstance(s, Source) else replace(s, scale=s.scale * number, softcap=number)
    )


TANH = -1.0  # the softcap of logits whose tanh was taken and that are not yet multiplied


def _tanh(r: Reader, op: Computation) -> Formula:
    formula = r.of(op)
    plain = formula.single()
    if not isinstance(plain, Plain) or plain.of.softcap:
        raise Unread("tanh is not taken of plain logits")
    return formula.mapped(lambda s: s if isinstance(s, Source) else replace(s, softcap=TANH))


def _reduce(r: Reader, op: Computation) -> Formula:
    """`sum` and `mean` over the tokens, or over everything."""
    formula, kind = r.of(op), tensor(op.operands[0])
    if formula.kind == TOTAL:
        return formula
    dims = sorted(
        reduced_dims(None if op.callee.endswith(".default") else argument(op, 1, "dim"), len(kind.dims))
    )
    if formula.kind == ENTRIES and formula.axis in dims:
        dims.remove(formula.axis)
        formula = _over_tokens(op, formula, kind)
        if not dims:
            return _kept(op, formula)
    if formula.kind == ENTRIES:
        raise Unread("rows are summed before tokens")
    if len(dims) != len(kind.dims) - (r.of(op).kind == ENTRIES):
        raise Unread("rows of a sample are summed before they are weighted")
    if op.base == "mean":
        raise Unread("a mean over rows is taken in the micro-batch")
    return formula.summed()


def _over_tokens(op: Computation, formula: Formula, kind: TensorType) -> Formula:
    found = formula.reduced(ROWS, Summed)
    return found.scaled(1 / int(kind.shape[formula.axis])) if op.base == "mean" else found


def _kept(op: Computation, formula: Formula) -> Formula:
    """Rows in the shape of the result, which may keep the tokens' dim with one entry."""
    return (
        formula.mapped(lambda s: s.seen(View("reshape", tensor(op.results[0]).shape)))
        if _keeps(op)
        else formula
    )


def _keeps(op: Computation) -> bool:
    return len(tensor(op.operands[0]).dims) == len(tensor(op.results[0]).dims)


def _logsumexp(r: Reader, op: Computation) -> Formula:
    formula = r.of(op)
    plain, dims = formula.single(), reduced_dims(argument(op, 1, "dim"), len(tensor(op.operands[0]).dims))
    if (
        formula.kind != ENTRIES
        or not isinstance(plain, Plain)
        or plain.of.softcap == TANH
        or dims != [formula.axis]
    ):
        raise Unread("logsumexp is not taken of plain logits over the tokens")
    r.compared[plain.of.head] = None
    return _kept(op, Formula.of(ROWS, LogSum(plain.of)))


def _gather(r: Reader, op: Computation) -> Formula:
    """The entries of labels: `gather(entries, dim, labels)`."""
    formula, labels = r.of(op), op.operands[-1]
    shape = tensor(labels).shape
    at_tokens = formula.kind == ENTRIES and int(argument(op, 1, "dim")) % len(shape) == formula.axis
    if not at_tokens or row_views.rows_of(shape, formula.axis) != row_views.rows_of(
        tensor(op.operands[0]).shape, formula.axis
    ):
        raise Unread("gather picks other entries than one label's for each row")
    if shape[formula.axis] != 1:
        raise Unread("gather picks several tokens for each row")
    seen = formula.mapped(lambda s: s.seen(View("reshape", shape)))
    return _picked(seen, source(labels), None)


def _picked(formula: Formula, labels: Source, ignore: int | None) -> Formula:
    def pick(entries: tuple[Entry, ...]) -> Picked:
        if len(entries) != 1 or not isinstance(entries[0], Plain | LogProb):
            raise Unread("labels pick something else than logits or log-probabilities")
        return Picked(entries[0], labels, ignore)

    return formula.reduced(ROWS, pick)


def _nll(r: Reader, op: Computation) -> Formula:
    """`nll_loss`: minus the log-probabilities of labels, each row's or their sum."""
    formula = r.of(op)
    if argument(op, 2, "weight") is not None:
        raise Unread("the classes are weighted")
    reduction = argument(op, 3, "reduction", 1)
    if reduction not in {NONE, SUM}:
        raise Unread("a mean over labels is taken in the micro-batch")
    labels = op.operands[1]
    if (
        formula.kind != ENTRIES
        or row_views.rows_of(tensor(op.operands[0]).shape, formula.axis) != tensor(labels).shape
    ):
        raise Unread("there is not one label for each row")
    found = _picked(formula, source(labels), int(argument(op, 4, "ignore_index", -100))).scaled(-1.0)
    return found if reduction == NONE else found.summed()


def _where(r: Reader, op: Computation) -> Formula:
    """`where(mask, rows, 0)` and `where(mask, 0, rows)`."""
    mask, *choices = op.arguments.args
    for place, (one, other) in enumerate((choices, choices[::-1])):
        formula = r.formula(op.operands[one.index]) if isinstance(one, Ref) else None
        if formula is not None and _zero(r, op, other) and isinstance(mask, Ref):
            return _masked(r, op, formula, op.operands[mask.index], negated=place == 1)
    raise Unread("where puts something else than 0 in the place of rows")


def _masked_fill(r: Reader, op: Computation) -> Formula:
    if not _zero(r, op, argument(op, 2, "value")):
        raise Unread("masked_fill puts something else than 0 in the place of rows")
    return _masked(r, op, r.of(op), op.operands[1], negated=True)


def _masked(r: Reader, op: Computation, formula: Formula, mask: SSAValue, negated: bool) -> Formula:
    kept = r.mask(mask, tensor(op.results[0]), formula.axis if formula.kind == ENTRIES else None)
    return formula.masked(replace(kept, negated=kept.negated != negated))


def _zero(r: Reader, op: Computation, value: Any) -> bool:
    owner = op.operands[value.index].owner if isinstance(value, Ref) else None
    made = isinstance(owner, GlueOp) and (
        owner.base in {"zeros", "zeros_like", "new_zeros"}
        or (owner.base in {"full", "scalar_tensor"} and owner.arguments.args[-1] == 0)
    )
    return made or r.number(op, value) == 0


RULES: dict[str, Callable[[Reader, Computation], Formula]] = (
    dict.fromkeys(["sum", "mean"], _reduce)
    | dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd"], _nll)
    | {
        "logsumexp": _logsumexp,
        "gather": _gather,
        "tanh": _tanh,
        "where": _where,
        "masked_fill": _masked_fill,
    }
)
