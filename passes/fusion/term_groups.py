"""Groups the terms of a loss that rules see as one: a single term, or several with coefficients that differ
by a number only.

Label smoothing and the Jensen-Shannon divergence come out of `normalize-loss` as two sums each, with a
coefficient each; the rules see them as one formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import CaseOp, GlueOp, LeafOp, TermOp
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.fusion.formula import (
    KIND_ROWS,
    KIND_TOTAL,
    BlockParameter,
    Formula,
    HeadLogits,
    drop_last_reshape,
    read_source,
)
from secc.passes.fusion.formula_reader import FormulaReader
from secc.passes.fusion.operator_rules import CROSS_ENTROPY_RULE, LossPiece, split_into_pieces
from secc.passes.loss.term_names import StructureDigests


@dataclass(frozen=True, eq=False)
class TermGroup:
    """Loss terms that are computed together: their numerators, times numbers relative to the first
    coefficient, add up to `pieces`."""

    terms: tuple[TermOp, ...]
    pieces: tuple[LossPiece, ...]


@dataclass(frozen=True, eq=False)
class RowLosses:
    """A number for each row that is computed from cross entropies: `value` is the sum of `pieces`. What the
    loss does with it is no formula, such as a sum by sample."""

    value: SSAValue
    pieces: tuple[LossPiece, ...]


def iter_operands(pieces: Iterable[LossPiece]) -> Iterator[SSAValue]:
    """The values of the case that operators for pieces read."""
    for piece in pieces:
        for logits in piece.logits:
            yield from _logits_operands(logits)
        for rows in (*piece.masks, *([piece.label] if piece.label is not None else [])):
            yield rows.value
            yield from (o for view in rows.views for o in view.operands)


def _logits_operands(logits: HeadLogits) -> Iterator[SSAValue]:
    yield logits.head.hidden
    yield from (
        p
        for p in (logits.head.weight, logits.head.bias)
        if p is not None and not isinstance(p, BlockParameter)
    )
    yield from (o for view in logits.views for o in view.operands)


def group_terms(case: CaseOp, reader: FormulaReader) -> list[TermGroup]:
    """The terms of a case that rules match, in groups."""
    formulas = {
        op: f
        for op in case.ops
        if isinstance(op, TermOp)
        and (f := reader.formula_of(op.numerator)) is not None
        and f.kind == KIND_TOTAL
    }
    alone = {op: found for op, f in formulas.items() if (found := split_into_pieces(f.terms)) is not None}
    joined: list[TermGroup] = []
    for terms in _group_by_coefficient(list(formulas)):
        if len(terms) > 1 and any(op not in alone for op, _ in terms):
            found = split_into_pieces(
                _sum_formulas([(formulas[op], number / terms[0][1]) for op, number in terms]).terms
            )
            if found is not None:
                joined.append(TermGroup(tuple(op for op, _ in terms), tuple(found)))
    taken = {op for group in joined for op in group.terms}
    return joined + [TermGroup((op,), tuple(found)) for op, found in alone.items() if op not in taken]


def find_row_losses(reader: FormulaReader) -> list[RowLosses]:
    """The rows that ops without a formula take, where they are cross entropies, weighted or not."""
    values = dict.fromkeys(o for op in reader.unread for o in op.operands)
    found: list[RowLosses] = []
    for value in values:
        formula = reader.formula_of(value)
        pieces = split_into_pieces(formula.terms) if formula and formula.kind == KIND_ROWS else None
        if pieces and all(p.rule == CROSS_ENTROPY_RULE for p in pieces):
            found.append(RowLosses(value, tuple(pieces)))
    return found


def _sum_formulas(parts: Sequence[tuple[Formula, float]]) -> Formula:
    total, *others = (formula.scale_by(number) for formula, number in parts)
    for other in others:
        total = total.plus(other)
    return total


def _group_by_coefficient(terms: Sequence[TermOp]) -> list[list[tuple[TermOp, float]]]:
    """Terms by what their coefficients have in common, each with the number by which its own differs."""
    structure = StructureDigests()
    found: dict[object, list[tuple[TermOp, float]]] = {}
    for op in terms:
        base, number = _split_number(op.coefficient)
        found.setdefault(None if base is None else _coefficient_identity(structure, base), []).append(
            (op, number)
        )
    return list(found.values())


def _coefficient_identity(structure: StructureDigests, value: SSAValue) -> object:
    """Returns a value that is equal for coefficients that are computed in the same way. A reshape of the
    labels does not change how many of them count, so it is ignored."""
    op = value.owner
    if isinstance(op, LeafOp):
        return _coefficient_identity(structure, op.value)
    if isinstance(op, GlueOp) and op.base_name in {"reciprocal", "sum", "ne", "eq"} and len(op.operands) == 1:
        return op.callee, op.args.data, _coefficient_identity(structure, op.operands[0])
    return drop_last_reshape(read_source(value)) if tensor_type(value).dims else structure.digest_value(value)


def _split_number(value: SSAValue | None) -> tuple[SSAValue | None, float]:
    """A coefficient as a value times a number."""
    number = 1.0
    while value is not None and isinstance(op := value.owner, GlueOp) and len(op.operands) == 1:
        args = op.arguments.args
        if op.base_name not in {"mul", "div"} or len(args) != 2 or not isinstance(args[1], int | float):
            break
        number = number * args[1] if op.base_name == "mul" else number / args[1]
        value = op.operands[0]
    return value, number
