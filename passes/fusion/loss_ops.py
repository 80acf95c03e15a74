"""Reads ops that compute rows and totals from entries: sums, means, picked labels, masks, torch's own losses;
and softcaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xdsl.ir import SSAValue

from secc.ir.dialect.argument_template import OperandRef
from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.fusion import row_views
from secc.passes.fusion.formula import (
    KIND_ENTRIES,
    KIND_ROWS,
    KIND_TOTAL,
    Formula,
    LogProbability,
    LogSumExp,
    PickedEntry,
    PlainLogit,
    RowSource,
    RowView,
    TokenSum,
    VocabEntry,
    read_source,
)
from secc.passes.fusion.not_a_formula import NotAFormula
from secc.passes.loss.op_tables import REDUCTION_NONE, REDUCTION_SUM
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.reductions import normalize_dims

if TYPE_CHECKING:
    from secc.passes.fusion.formula_reader import FormulaReader


def require_same_shape(op: Computation, formulas: Sequence[Formula], types: Sequence[TensorType]) -> None:
    """Raises NotAFormula unless formulas that an op combines stand for the same entries or rows."""
    if len({(f.kind, f.axis if f.kind == KIND_ENTRIES else -1) for f in formulas}) > 1 or (
        len(formulas) > 1 and len({t.shape for t in types}) > 1
    ):
        raise NotAFormula(f"{op.callee} combines values of different shapes")


def read_addend(formula: Formula | None, number: float | None, others: Sequence[Formula | None]) -> Formula:
    """An addend: a formula, or a number as one. Raises NotAFormula for anything else."""
    if formula is not None:
        return formula
    like = next((f for f in others if f is not None), None)
    if number is None or like is None:
        raise NotAFormula("something that does not come from logits is added")
    return replace(like, terms={(frozenset[RowSource](), ()): number})


def read_softcap(formula: Formula, number: float) -> Formula | None:
    """`number * tanh(x / number)`: capped logits; None for anything else."""
    plain = formula.single_factor()
    if not isinstance(plain, PlainLogit) or plain.of.softcap != PENDING_TANH or number <= 0:
        return None
    return formula.map_sources(
        lambda s: s if isinstance(s, RowSource) else replace(s, scale=s.scale * number, softcap=number)
    )


PENDING_TANH = -1.0  # the softcap of logits after tanh and before the multiplication


def _read_tanh(r: FormulaReader, op: Computation) -> Formula:
    formula = r.operand_formula(op)
    plain = formula.single_factor()
    if not isinstance(plain, PlainLogit) or plain.of.softcap:
        raise NotAFormula("tanh is not taken of plain logits")
    return formula.map_sources(lambda s: s if isinstance(s, RowSource) else replace(s, softcap=PENDING_TANH))


def _read_reduction(r: FormulaReader, op: Computation) -> Formula:
    """`sum` and `mean` over the tokens, or over everything."""
    formula, kind = r.operand_formula(op), tensor_type(op.operands[0])
    if formula.kind == KIND_TOTAL:
        return formula
    dims = sorted(
        normalize_dims(None if op.callee.endswith(".default") else get_argument(op, 1, "dim"), len(kind.dims))
    )
    if formula.kind == KIND_ENTRIES and formula.axis in dims:
        dims.remove(formula.axis)
        formula = _reduce_tokens(op, formula, kind)
        if not dims:
            return _keep_shape(op, formula)
    if formula.kind == KIND_ENTRIES:
        raise NotAFormula("rows are summed before tokens")
    if len(dims) != len(kind.dims) - (r.operand_formula(op).kind == KIND_ENTRIES):
        raise NotAFormula("rows of a sample are summed before they are weighted")
    if op.base_name == "mean":
        raise NotAFormula("a mean over rows is taken in the micro-batch")
    return formula.sum_rows()


def _reduce_tokens(op: Computation, formula: Formula, kind: TensorType) -> Formula:
    found = formula.reduce_entries(KIND_ROWS, TokenSum)
    return found.scale_by(1 / int(kind.shape[formula.axis])) if op.base_name == "mean" else found


def _keep_shape(op: Computation, formula: Formula) -> Formula:
    """Rows in the shape of the result, which may keep the tokens' dim with one entry."""
    return (
        formula.map_sources(lambda s: s.with_view(RowView("reshape", tensor_type(op.results[0]).shape)))
        if _keeps_dims(op)
        else formula
    )


def _keeps_dims(op: Computation) -> bool:
    return len(tensor_type(op.operands[0]).dims) == len(tensor_type(op.results[0]).dims)


def _read_logsumexp(r: FormulaReader, op: Computation) -> Formula:
    formula = r.operand_formula(op)
    plain, dims = (
        formula.single_factor(),
        normalize_dims(get_argument(op, 1, "dim"), len(tensor_type(op.operands[0]).dims)),
    )
    if (
        formula.kind != KIND_ENTRIES
        or not isinstance(plain, PlainLogit)
        or plain.of.softcap == PENDING_TANH
        or dims != [formula.axis]
    ):
        raise NotAFormula("logsumexp is not taken of plain logits over the tokens")
    r.compared[plain.of.head] = None
    return _keep_shape(op, Formula.from_factor(KIND_ROWS, LogSumExp(plain.of)))


def _read_gather(r: FormulaReader, op: Computation) -> Formula:
    """The entries of labels: `gather(entries, dim, labels)`."""
    formula, labels = r.operand_formula(op), op.operands[-1]
    shape = tensor_type(labels).shape
    at_tokens = formula.kind == KIND_ENTRIES and int(get_argument(op, 1, "dim")) % len(shape) == formula.axis
    if not at_tokens or row_views.row_dims(shape, formula.axis) != row_views.row_dims(
        tensor_type(op.operands[0]).shape, formula.axis
    ):
        raise NotAFormula("gather picks other entries than one label's for each row")
    if shape[formula.axis] != 1:
        raise NotAFormula("gather picks several tokens for each row")
    seen = formula.map_sources(lambda s: s.with_view(RowView("reshape", shape)))
    return _pick_labels(seen, read_source(labels), None)


def _pick_labels(formula: Formula, labels: RowSource, ignore: int | None) -> Formula:
    def pick(entries: tuple[VocabEntry, ...]) -> PickedEntry:
        if len(entries) != 1 or not isinstance(entries[0], PlainLogit | LogProbability):
            raise NotAFormula("labels pick something else than logits or log-probabilities")
        return PickedEntry(entries[0], labels, ignore)

    return formula.reduce_entries(KIND_ROWS, pick)


def _read_nll_loss(r: FormulaReader, op: Computation) -> Formula:
    """`nll_loss`: minus the log-probabilities of labels, each row's or their sum."""
    formula = r.operand_formula(op)
    if get_argument(op, 2, "weight") is not None:
        raise NotAFormula("the classes are weighted")
    reduction = get_argument(op, 3, "reduction", 1)
    if reduction not in {REDUCTION_NONE, REDUCTION_SUM}:
        raise NotAFormula("a mean over labels is taken in the micro-batch")
    labels = op.operands[1]
    if (
        formula.kind != KIND_ENTRIES
        or row_views.row_dims(tensor_type(op.operands[0]).shape, formula.axis) != tensor_type(labels).shape
    ):
        raise NotAFormula("there is not one label for each row")
    found = _pick_labels(
        formula, read_source(labels), int(get_argument(op, 4, "ignore_index", -100))
    ).scale_by(-1.0)
    return found if reduction == REDUCTION_NONE else found.sum_rows()


def _read_where(r: FormulaReader, op: Computation) -> Formula:
    """`where(mask, rows, 0)` and `where(mask, 0, rows)`."""
    mask, *choices = op.arguments.args
    for place, (one, other) in enumerate((choices, choices[::-1])):
        formula = r.formula_of(op.operands[one.index]) if isinstance(one, OperandRef) else None
        if formula is not None and _is_zero(r, op, other) and isinstance(mask, OperandRef):
            return _mask_formula(r, op, formula, op.operands[mask.index], negated=place == 1)
    raise NotAFormula("where puts something else than 0 in the place of rows")


def _read_masked_fill(r: FormulaReader, op: Computation) -> Formula:
    if not _is_zero(r, op, get_argument(op, 2, "value")):
        raise NotAFormula("masked_fill puts something else than 0 in the place of rows")
    return _mask_formula(r, op, r.operand_formula(op), op.operands[1], negated=True)


def _mask_formula(
    r: FormulaReader, op: Computation, formula: Formula, mask: SSAValue, negated: bool
) -> Formula:
    kept = r.read_mask(
        mask, tensor_type(op.results[0]), formula.axis if formula.kind == KIND_ENTRIES else None
    )
    return formula.mask_rows(replace(kept, negated=kept.negated != negated))


def _is_zero(r: FormulaReader, op: Computation, value: Any) -> bool:
    owner = op.operands[value.index].owner if isinstance(value, OperandRef) else None
    made = isinstance(owner, GlueOp) and (
        owner.base_name in {"zeros", "zeros_like", "new_zeros"}
        or (owner.base_name in {"full", "scalar_tensor"} and owner.arguments.args[-1] == 0)
    )
    return made or r.read_number(op, value) == 0


LOSS_RULES: dict[str, Callable[[FormulaReader, Computation], Formula]] = (
    dict.fromkeys(["sum", "mean"], _read_reduction)
    | dict.fromkeys(
        ["nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd"], _read_nll_loss
    )
    | {
        "logsumexp": _read_logsumexp,
        "gather": _read_gather,
        "tanh": _read_tanh,
        "where": _read_where,
        "masked_fill": _read_masked_fill,
    }
)
