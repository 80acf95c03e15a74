"""`lower`: the flat cases become what a plan is printed from.

Each section gets a `sec.body` for each distinct way through it (`secc.passes.lowering.case_predicates`):
receives, its ops with the input-only glue they need, sends, the numerators of its terms, and the guards under
which the way holds. The bodies in @terms compute the loss's leaves from inputs and its coefficients from
leaves. Edges are declared once; the graph keeps what the terms leave over as its attribute `constant`.
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
from secc.ir.analysis.dataflow import active
from secc.ir.dialect.ops import (
    CaseOp,
    EdgeOp,
    GraphOp,
    GuardOp,
    LeafOp,
    ReturnOp,
    TransferOp,
    graph_of,
    strings,
    texts,
)
from secc.ir.dialect.readable_names import identifier, unique
from secc.passes.lowering.case_predicates import Found, Pattern, Way, merge
from secc.passes.lowering.section_bodies import (
    body,
    canonical,
    coefficients_part,
    guards_before,
    leaf_part,
    read_part,
    section_part,
)

TERMS = "terms"


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
                [c for c in graph.cases if active(strings(section.when), strings(c.when))],
            )
        for leaf in dict.fromkeys(
            op.sym.data for case in graph.cases for op in case.ops if isinstance(op, LeafOp)
        ):
            _lower_leaf(graph, leaf)
        _lower_coefficients(graph)
        for case in graph.cases:
            case.detach()
            case.erase()


def _lower_section(graph: GraphOp, section: str, cases: Sequence[CaseOp]) -> None:
    names: list[str] = []
    ways = _wanted([_section_way(case, section) for case in cases])
    for found in merge(ways):
        case = found.way.case
        guards = [g for g in _distinct_guards(case, section) if _reading(case, g) in found.way.guards]
        names.append(unique(_name(found) + ("_anew" if recorded_glue.ANEW in case.attributes else ""), names))
        _add(graph, names[-1], section, found, section_part(case, section, guards))
        _note_anew(graph, [way.case for way in ways if way.code == found.way.code])


def _note_anew(graph: GraphOp, cases: Sequence[CaseOp]) -> None:
    """Name those cases of the body made last whose glue is recorded anew: each micro-batch is compared with
    them."""
    anew, made = [c.sym.data for c in cases if recorded_glue.ANEW in c.attributes], graph.body.block.last_op
    if anew and made is not None:
        made.attributes[recorded_glue.ANEW] = texts(anew)


def _wanted(ways: Sequence[Way]) -> list[Way]:
    """The ways without those of spare cases where another holds for every micro-batch of the pattern."""
    always = {
        way.pattern for way in ways if recorded_glue.SPARE not in way.case.attributes and not way.guards
    }
    return [
        way for way in ways if recorded_glue.SPARE not in way.case.attributes or way.pattern not in always
    ]


def _section_way(case: CaseOp, section: str) -> Way:
    guards = frozenset(_reading(case, g) for g in _distinct_guards(case, section))
    text = canonical(section_part(case, section, ()))
    return Way(
        _pattern(case),
        f"{recorded_glue.ANEW} {text}" if recorded_glue.ANEW in case.attributes else text,
        guards,
        case,
    )


def _distinct_guards(case: CaseOp, section: str) -> list[GuardOp]:
    """The guards of a section, one for each value that is read."""
    return list({_reading(case, g): g for g in reversed(guards_before(case, section))}.values())[::-1]


def _reading(case: CaseOp, guard: GuardOp) -> tuple[str, str]:
    return canonical(read_part(case, guard)), guard.equals.data


def _lower_leaf(graph: GraphOp, leaf: str) -> None:
    """One body computes a leaf, for samples of the patterns that have it. Raises UserError if cases compute
    it differently."""
    ways = merge(
        Way(_pattern(case), canonical(leaf_part(case, leaf)), frozenset(), case) for case in graph.cases
    )
    found, *others = (f for f in ways if leaf_part(f.way.case, leaf))
    if others:
        raise UserError(
            f"{leaf!r}, a sum over the global batch that the loss is divided by, is computed in {1 + len(others)} ways from the inputs",
            remedy="let the loss count its labels or weights in the same way for all samples, whatever optional inputs they have",
        )
    _add(graph, identifier(f"leaves_{leaf}"), TERMS, found, leaf_part(found.way.case, leaf))


def _lower_coefficients(graph: GraphOp) -> None:
    ways = merge(
        Way(_pattern(case), canonical(coefficients_part(case)), frozenset(), case) for case in graph.cases
    )
    patterns = [p for found in ways for p in found.patterns]
    if len(patterns) != len(set(patterns)):
        raise UserError(
            "the loss is weighted differently from micro-batch to micro-batch with the same optional inputs",
            remedy="let the weights of the loss depend on sizes and sums over the batch, not on values that Python reads from tensors",
        )
    names: list[str] = []
    for found in ways:
        names.append(unique(f"coefficients_{_name(found)}" if len(ways) > 1 else "coefficients", names))
        _add(graph, names[-1], TERMS, found, coefficients_part(found.way.case))


def _add(graph: GraphOp, name: str, section: str, found: Found, ops: Sequence[Operation]) -> None:
    """Append a body, with its first pattern as `when` and the others as `also`."""
    first, *others = ([*sorted(p)] for p in found.patterns)
    op = body(name, section, first, ops)
    if others:
        op.also = texts(" ".join(keys) for keys in others)
    graph.body.block.add_op(op)


def _name(found: Found) -> str:
    """A method name that says for which samples the way is: it never meets the name of a module or a key."""
    if found.telling and not found.patterns[0]:
        return "without_optional"
    return identifier("with_" + "_and_".join(sorted(found.patterns[0]))) if found.patterns[0] else "always"


def _pattern(case: CaseOp) -> Pattern:
    return frozenset(strings(case.when))


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
            f"a constant is added to the loss that depends on the optional inputs or on values read: {', '.join(sorted(constants))}",
            remedy="add constants to the loss for all samples or for none",
        )
    graph.attributes["constant"] = StringAttr(*(constants or {"0.0"}))
