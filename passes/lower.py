"""`lower`: turns the flat cases into the bodies that code is generated from.

Each section gets a `sec.body` for each distinct path through it (`secc.passes.lowering.case_predicates`):
receives, its ops with the input-only glue they need, sends, the numerators of its terms, and the guards under
which the path holds. The bodies in @terms compute the loss's leaves from inputs and its coefficients from
leaves. Edges are declared once; the graph's attribute `constant` has the part of the loss that is in no term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.analysis import recorded_glue
from secc.ir.dialect.ops import (
    CaseOp,
    EdgeOp,
    GraphOp,
    GuardOp,
    LeafOp,
    PlacedRowsOp,
    ReturnOp,
    TransferOp,
    graph_of,
    strings_attr,
    strings_of,
)
from secc.ir.dialect.readable_names import make_unique, to_identifier
from secc.passes.loss.term_names import StructureDigests
from secc.passes.lowering.case_predicates import CasePath, CasePredicate, InputPattern, merge_paths
from secc.passes.lowering.section_bodies import (
    canonical_text,
    extract_coefficient_ops,
    extract_guard_ops,
    extract_leaf_ops,
    extract_placed_rows_ops,
    extract_section_ops,
    guards_before_section,
    make_body,
)
from secc.runtime.plan.sample_predicates import is_active

TERMS_SECTION = "terms"


@dataclass(frozen=True)
class Lower(ModulePass):
    name = "lower"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        _note_constant(graph)
        _declare_edges(graph)
        for section in graph.sections:
            _lower_section(
                graph,
                section.sym.data,
                [c for c in graph.cases if is_active(strings_of(section.when), strings_of(c.when))],
            )
        for leaf in dict.fromkeys(
            op.sym.data for case in graph.cases for op in case.ops if isinstance(op, LeafOp)
        ):
            _lower_leaf(graph, leaf)
        _lower_coefficients(graph)
        _lower_placed_rows(graph)
        for case in graph.cases:
            case.detach()
            case.erase()


def _lower_section(graph: GraphOp, section: str, cases: Sequence[CaseOp]) -> None:
    names: list[str] = []
    ways = _drop_unneeded_fallbacks([_section_path(case, section) for case in cases])
    for found in merge_paths(ways):
        case = found.path.case
        guards = [g for g in _distinct_guards(case, section) if _guard_reading(case, g) in found.path.guards]
        names.append(
            make_unique(
                _method_name(found)
                + ("_rerecorded" if recorded_glue.RERECORD_ATTRIBUTE in case.attributes else ""),
                names,
            )
        )
        _append_body(graph, names[-1], section, found, extract_section_ops(case, section, guards))
        _note_rerecorded_cases(graph, [way.case for way in ways if way.identity == found.path.identity])


def _note_rerecorded_cases(graph: GraphOp, cases: Sequence[CaseOp]) -> None:
    """Names the cases of the last body that have re-recorded glue; the runtime compares each micro-batch with
    them."""
    rerecorded, body = (
        [c.sym.data for c in cases if recorded_glue.RERECORD_ATTRIBUTE in c.attributes],
        graph.body.block.last_op,
    )
    if rerecorded and body is not None:
        body.attributes[recorded_glue.RERECORD_ATTRIBUTE] = strings_attr(rerecorded)


def _drop_unneeded_fallbacks(ways: Sequence[CasePath]) -> list[CasePath]:
    """The ways without those of spare cases where another holds for every micro-batch of the pattern."""
    always = {
        way.pattern
        for way in ways
        if recorded_glue.FALLBACK_ATTRIBUTE not in way.case.attributes and not way.guards
    }
    return [
        way
        for way in ways
        if recorded_glue.FALLBACK_ATTRIBUTE not in way.case.attributes or way.pattern not in always
    ]


def _section_path(case: CaseOp, section: str) -> CasePath:
    guards = frozenset(_guard_reading(case, g) for g in _distinct_guards(case, section))
    text = canonical_text(extract_section_ops(case, section, ()))
    return CasePath(
        _case_pattern(case),
        f"{recorded_glue.RERECORD_ATTRIBUTE} {text}"
        if recorded_glue.RERECORD_ATTRIBUTE in case.attributes
        else text,
        guards,
        case,
    )


def _distinct_guards(case: CaseOp, section: str) -> list[GuardOp]:
    """The guards of a section, one for each value that is read."""
    return list(
        {_guard_reading(case, g): g for g in reversed(guards_before_section(case, section))}.values()
    )[::-1]


def _guard_reading(case: CaseOp, guard: GuardOp) -> tuple[str, str]:
    return canonical_text(extract_guard_ops(case, guard)), guard.equals.data


def _lower_leaf(graph: GraphOp, leaf: str) -> None:
    """One body computes a leaf, for samples of the patterns that have it. Raises UserError if cases compute
    it with different ops.

    Shapes may differ: a mask that picks every row of one case's captures gives rows that sizes explain.
    """
    ways = merge_paths(
        CasePath(_case_pattern(case), _leaf_structure(case, leaf), frozenset(), case) for case in graph.cases
    )
    found, *others = (f for f in ways if extract_leaf_ops(f.path.case, leaf))
    if others:
        raise UserError(
            f"{leaf!r}, a sum over the global batch that the loss is divided by, is computed in "
            f"{1 + len(others)} ways from the inputs",
            remedy="let the loss count its labels or weights in the same way for all samples, whatever "
            "optional inputs they have",
        )
    _append_body(
        graph, to_identifier(f"leaves_{leaf}"), TERMS_SECTION, found, extract_leaf_ops(found.path.case, leaf)
    )


def _leaf_structure(case: CaseOp, leaf: str) -> str:
    """A text that is equal for cases that compute a leaf with equal ops; "" without the leaf."""
    digests = StructureDigests()
    found = [op for op in case.ops if isinstance(op, LeafOp) and op.sym.data == leaf]
    return " ".join(digests.digest_value(op.operands[0]) for op in found)


def _lower_coefficients(graph: GraphOp) -> None:
    """One body for each pattern computes the coefficients of all terms that its cases have: a micro-batch may
    take a case without some of them, where the global batch has them."""
    by_pattern: dict[InputPattern, list[CaseOp]] = {}
    for case in graph.cases:
        by_pattern.setdefault(_case_pattern(case), []).append(case)
    ways = merge_paths(
        CasePath(pattern, canonical_text(extract_coefficient_ops(cases)), frozenset(), cases[0])
        for pattern, cases in by_pattern.items()
    )
    names: list[str] = []
    for found in ways:
        names.append(
            make_unique(f"coefficients_{_method_name(found)}" if len(ways) > 1 else "coefficients", names)
        )
        ops = extract_coefficient_ops(by_pattern[_case_pattern(found.path.case)])
        _append_body(graph, names[-1], TERMS_SECTION, found, ops)


def _lower_placed_rows(graph: GraphOp) -> None:
    """One body for each condition on a sample's numbers of rows; cases that have the same share it."""
    known = set[str]()
    for case in graph.cases:
        for op in (o for o in case.ops if isinstance(o, PlacedRowsOp)):
            text = canonical_text(extract_placed_rows_ops(case, op))
            if text not in known:
                name = f"placed_rows_{len(known)}"
                known.add(text)
                body = make_body(
                    name, TERMS_SECTION, strings_of(case.when), extract_placed_rows_ops(case, op)
                )
                graph.body.block.add_op(body)


def _append_body(
    graph: GraphOp, name: str, section: str, found: CasePredicate, ops: Sequence[Operation]
) -> None:
    """Append a body, with its first pattern as `when` and the others as `also`."""
    first, *others = ([*sorted(p)] for p in found.patterns)
    op = make_body(name, section, first, ops)
    if others:
        op.also = strings_attr(" ".join(keys) for keys in others)
    graph.body.block.add_op(op)


def _method_name(found: CasePredicate) -> str:
    """A method name that says for which samples the way is: it never meets the name of a module or a key."""
    if found.distinguishing_keys and not found.patterns[0]:
        return "without_optional"
    return to_identifier("with_" + "_and_".join(sorted(found.patterns[0]))) if found.patterns[0] else "always"


def _case_pattern(case: CaseOp) -> InputPattern:
    return frozenset(strings_of(case.when))


def _declare_edges(graph: GraphOp) -> None:
    """One `sec.edge` before the cases for each name that transfers have."""
    first = graph.cases[0] if graph.cases else None
    for transfer in {
        op.sym.data: op for case in graph.cases for op in case.ops if isinstance(op, TransferOp)
    }.values():
        edge = EdgeOp.create(result_types=[transfer.result.type], properties=dict(transfer.properties))
        edge.result.name_hint = transfer.sym.data
        assert first is not None
        graph.body.block.insert_op_before(edge, first)


def _note_constant(graph: GraphOp) -> None:
    """Keep what the terms leave over. Raises UserError if it depends on the case."""
    constants = {
        op.constant.data if op.constant else "0.0"
        for case in graph.cases
        for op in case.ops
        if isinstance(op, ReturnOp)
    }
    if len(constants) > 1:
        raise UserError(
            "a constant is added to the loss that depends on the optional inputs or on values "
            f"read: {', '.join(sorted(constants))}",
            remedy="add constants to the loss for all samples or for none",
        )
    graph.attributes["constant"] = StringAttr(*(constants or {"0.0"}))
