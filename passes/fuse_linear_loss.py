"""`fuse-linear-loss`: losses on the logits of linear heads become operators that never hold the logits.

The loss's terms, sums over rows since `normalize-loss`, are read as formulas over heads' logits
(`secc.passes.fusion.formula_reader`), and rules say which operators compute them
(`secc.passes.fusion.operator_rules`). A head's call goes away only if all uses of its logits do, so a loss is
fused where nothing else needs the logits. Cross entropies of rows that something without a formula takes
(weights that are trained, sums by sample as for preferences) are computed row by row. The operators read the
user's own parameters. What was fused, and why other losses on heads were not, is noted in the graph
(`secc.ir.analysis.fusion_report`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from secc.ir.analysis import fusion_report
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    GraphOp,
    GuardOp,
    OutputOp,
    ParamOp,
    ReturnOp,
    TermOp,
    graph_of,
)
from secc.ir.text_io.verifier import source_line
from secc.passes.dce import DeadCodeElimination
from secc.passes.fusion import logit_heads, term_groups
from secc.passes.fusion.formula import BlockParameter, LinearHead
from secc.passes.fusion.formula_reader import FormulaReader
from secc.passes.fusion.fuse_when import reason_not_to_fuse
from secc.passes.fusion.operator_emitter import OperatorEmitter
from secc.passes.fusion.operator_rules import (
    CROSS_ENTROPY_RULE,
    KL_CE_RULE,
    KL_RULE,
    LossPiece,
    can_be_joint,
    find_objection,
)
from secc.passes.fusion.term_groups import RowLosses, TermGroup
from secc.runtime.plan.schema import FusionRecord

_NO_RULE_MATCHES = "no fused operator computes its loss"


@dataclass(frozen=True)
class FuseLinearLoss(ModulePass):
    """Options. without: rules that are off. when: auto (where `cluster`, as `secc.cluster.parse_cluster`
    reads it, runs Triton), always or never."""

    name = "fuse-linear-loss"
    without: tuple[str, ...] = ()
    when: str = "always"
    cluster: str = "local"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        fusion_report.check_rule_names(self.without)
        graph = graph_of(op)
        if why := reason_not_to_fuse(self.when, self.cluster):
            fusion_report.record_fusions(graph, [FusionRecord(self.name, "all losses", "", why)])
            return
        for case in graph.cases:
            fusion_report.record_fusions(graph, _CaseFuser(graph, case, frozenset(self.without)).fuse_case())
        DeadCodeElimination().apply(ctx, op)
        _mark_fused_heads(graph)


def _mark_fused_heads(graph: GraphOp) -> None:
    """Mark the heads that are gone: their parameters belong to the section of the operator that reads
    them."""
    ops = [op for case in graph.cases for op in case.ops]
    called = {op.target.data for op in ops if isinstance(op, CallOp)}
    read = {op.path.data.rpartition(".")[0] for op in ops if isinstance(op, ParamOp)}
    for path, block in graph.blocks.items():
        if path in read and path not in called and logit_heads.WEIGHT_ATTRIBUTE in block.attributes:
            block.attributes[fusion_report.FUSED_ATTRIBUTE] = UnitAttr()


class _CaseFuser:
    """Fuses the losses of one case."""

    def __init__(self, graph: GraphOp, case: CaseOp, without: frozenset[str]) -> None:
        self.graph, self.case, self.without = graph, case, without
        self.reader = FormulaReader(graph, case)
        self.refused: dict[LinearHead, tuple[str, str]] = {}  # why, where

    def fuse_case(self) -> list[FusionRecord]:
        found = self._select_groups(
            [
                *term_groups.group_terms(self.case, self.reader),
                *term_groups.find_row_losses(self.reader),
            ]
        )
        groups = [g for g in found if isinstance(g, TermGroup)]
        rows = self._used_rows(groups, [g for g in found if isinstance(g, RowLosses)])
        notes = [self._replace_rows(each) for each in rows]
        if groups:
            notes = _LossRewriter(self.graph, self.case, groups, self.without).rewrite_groups() + notes
        fused = {head for group in [*groups, *rows] for head in _heads_of_pieces(group)}
        return notes + [self._describe_refusal(head) for head in self.reader.compared if head not in fused]

    def _select_groups(self, found: Sequence[TermGroup | RowLosses]) -> list[TermGroup | RowLosses]:
        """Returns the groups that operators compute, without groups that share a head with something
        that needs its logits."""
        kept = [g for g in found if self._is_computable(g)]
        while True:
            live = _needed_ops(self.case, kept)
            needed = {head for g in kept for head in _heads_of_pieces(g) if _head_op(head) in live}
            if not needed:
                return kept
            self.refused |= {head: self._describe_other_use(head, live) for head in needed}
            kept = [g for g in kept if not needed & _heads_of_pieces(g)]

    def _is_computable(self, group: TermGroup | RowLosses) -> bool:
        place = source_line(group.terms[0] if isinstance(group, TermGroup) else _defining_op(group.value))
        for piece in group.pieces:
            why = f"the rule {piece.rule} is off" if piece.rule in self.without else find_objection(piece)
            if why:
                self.refused |= {head: (why, place) for head in _heads_of_pieces(group)}
                return False
        return True

    def _used_rows(self, groups: Sequence[TermGroup], rows: Sequence[RowLosses]) -> list[RowLosses]:
        """The rows that the case still reads once groups of terms and rows are replaced."""
        live = _needed_ops(self.case, [*groups, *rows])
        return [each for each in rows if any(use.operation in live for use in each.value.uses)]

    def _replace_rows(self, rows: RowLosses) -> FusionRecord:
        """Put the operator before the op that computes rows from logits, and its rows in their place."""
        op = _defining_op(rows.value)
        emitter = OperatorEmitter(self.graph, self.case, op)
        emitter.set_source_line(source_line(op))
        rows.value.replace_all_uses_with(emitter.emit_rows(rows.pieces, rows.value))
        what = " and ".join(head_title(h) for h in dict.fromkeys(p.student.head for p in rows.pieces))
        return FusionRecord(CROSS_ENTROPY_RULE, f"{what} (row by row)", source_line(op))

    def _describe_refusal(self, head: LinearHead) -> FusionRecord:
        """Why a head's loss stays as it is."""
        rule = (
            KL_RULE
            if any(
                len(hs) > 1 and head in hs
                for f in self.reader.formulas.values()
                if (hs := _heads_of(f.all_logits()))
            )
            else CROSS_ENTROPY_RULE
        )
        why, place = (
            self.refused.get(head)
            or self._first_unread_op(head, _needed_ops(self.case, []))
            or (_NO_RULE_MATCHES, "")
        )
        return FusionRecord(rule, head_title(head), place or source_line(head.logits.owner), why)  # pyright: ignore[reportArgumentType]

    def _first_unread_op(self, head: LinearHead, live: set[Operation]) -> tuple[str, str] | None:
        """The first op on the way to the loss that could not be read."""
        for op, why in self.reader.unread.items():
            formulas = [f for o in op.operands if (f := self.reader.formula_of(o)) is not None]
            if op in live and any(head in _heads_of(f.all_logits()) for f in formulas):
                return why, source_line(op)
        return None

    def _describe_other_use(self, head: LinearHead, live: set[Operation]) -> tuple[str, str]:
        """Why logits are needed although a loss on them could be fused, and where."""
        unread = self._first_unread_op(head, live)
        if unread is not None:
            return f"its logits are also used elsewhere: {unread[0]}", unread[1]
        user = next(u.operation for u in head.logits.uses if u.operation in live)
        return "its logits are also used by a loss that is not fused", source_line(user)


class _LossRewriter:
    """Puts operators in the place of groups of terms."""

    def __init__(self, graph: GraphOp, case: CaseOp, found: list[TermGroup], without: frozenset[str]) -> None:
        self.case, self.groups = case, found
        self.emitter = OperatorEmitter(graph, case, _move_terms_to_end(case))
        self.partner = {} if KL_CE_RULE in without else _pair_pieces([p for g in found for p in g.pieces])
        self.sums: dict[int, SSAValue] = {}  # of pieces, by identity: two may be equal
        self.notes: list[FusionRecord] = []

    def rewrite_groups(self) -> list[FusionRecord]:
        for group in self.groups:
            self.emitter.set_source_line(source_line(group.terms[0]))
            numerator = self.emitter.emit_total(
                [(piece.number, self._piece_sum(piece, group)) for piece in group.pieces]
            )
            first, *others = group.terms
            first.operands[0] = numerator
            for term in others:
                term.detach()
                term.erase()
        return self.notes

    def _piece_sum(self, piece: LossPiece, group: TermGroup) -> SSAValue:
        if id(piece) not in self.sums:
            partner = self.partner.get(id(piece))
            if partner is not None:
                cross_entropy, divergence = (
                    (piece, partner) if piece.rule == CROSS_ENTROPY_RULE else (partner, piece)
                )
                self.sums[id(cross_entropy)], self.sums[id(divergence)] = self.emitter.emit_joint(
                    cross_entropy, divergence
                )
            else:
                made = (
                    self.emitter.emit_cross_entropy
                    if piece.rule == CROSS_ENTROPY_RULE
                    else self.emitter.emit_divergence
                )
                self.sums[id(piece)] = made(piece)
            self._record_fusion(piece, partner, source_line(group.terms[0]))
        return self.sums[id(piece)]

    def _record_fusion(self, piece: LossPiece, partner: LossPiece | None, place: str) -> None:
        logits = [*piece.logits, *(partner.logits if partner is not None else [])]
        rule = KL_CE_RULE if partner is not None else piece.rule
        kind = next((p.kind for p in (piece, partner) if p is not None and p.kind), "")
        what = " and ".join(head_title(h) for h in dict.fromkeys(each.head for each in logits))
        self.notes.append(FusionRecord(rule, f"{what}{f' ({kind})' if kind else ''}", place))


def _pair_pieces(pieces: list[LossPiece]) -> dict[int, LossPiece]:
    """Cross entropies and divergences of one student that one operator gives, each piece in one pair at
    most."""
    found: dict[int, LossPiece] = {}
    for piece in pieces:
        other = next(
            (o for o in pieces if id(piece) not in found and id(o) not in found and can_be_joint(piece, o)),
            None,
        )
        if other is not None:
            found |= {id(piece): other, id(other): piece}
    return found


def _move_terms_to_end(case: CaseOp) -> Operation:
    """Put the terms at the end of the case, behind all that operators may read; the first of them."""
    terms = [op for op in case.ops if isinstance(op, TermOp)]
    end = case.body.block.last_op
    assert end is not None
    for term in terms:
        term.detach()
        case.body.block.insert_op_before(term, end)
    return terms[0]


def _needed_ops(case: CaseOp, replaced: Iterable[TermGroup | RowLosses]) -> set[Operation]:
    """The ops that a case needs once groups of terms, and rows, are replaced: what other terms, guards and
    the operators themselves read."""
    chosen = list(replaced)
    gone = {term for group in chosen if isinstance(group, TermGroup) for term in group.terms}
    rows = {group.value: group.pieces for group in chosen if isinstance(group, RowLosses)}
    stack: list[SSAValue] = []
    for op in case.ops:
        if isinstance(op, TermOp):
            stack += op.operands if op not in gone else op.operands[1:]
        elif isinstance(op, GuardOp | OutputOp | ReturnOp):
            stack += op.operands
    for group in chosen:
        if isinstance(group, TermGroup):
            stack += term_groups.iter_operands(group.pieces)
    found, seen = set[Operation](), set[SSAValue]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in rows:
            stack += term_groups.iter_operands(rows[value])
        elif (op := _defining_op(value)) not in found:
            found.add(op)
            stack += op.operands
    return found


def _defining_op(value: SSAValue) -> Operation:
    assert isinstance(value.owner, Operation)
    return value.owner


def _heads_of_pieces(group: TermGroup | RowLosses) -> set[LinearHead]:
    return {logits.head for piece in group.pieces for logits in piece.logits}


def _head_op(head: LinearHead) -> Operation:
    return _defining_op(head.logits)


def _heads_of(logits: Iterable[object]) -> set[LinearHead]:
    return {each.head for each in logits}  # pyright: ignore[reportAttributeAccessIssue]


def head_title(head: LinearHead) -> str:
    """A head's name for people: the module that owns its weight."""
    path = head.weight.path if isinstance(head.weight, BlockParameter) else _parameter_path(head.weight)
    return path.removesuffix(".weight") or "a linear head"


def _parameter_path(value: SSAValue) -> str:
    owner = value.owner
    return owner.path.data if isinstance(owner, ParamOp) else ""
