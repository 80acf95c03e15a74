"""`sections/*.py`: one readable module for each section, and `terms.py` for the loss's leaves and
coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, OpResult, SSAValue

from secc.codegen.body_printer import BodyPrinter
from secc.codegen.python_names import NameScope, block_attribute_names, section_class_name
from secc.codegen.render import render_template
from secc.ir.analysis import recorded_glue
from secc.ir.analysis.dataflow import get_strings, is_random_op
from secc.ir.dialect.ops import (
    BodyOp,
    CallOp,
    ConstOp,
    GlueOp,
    GraphOp,
    GuardOp,
    LeafOp,
    OutputOp,
    PlacedRowsOp,
    ReceiveOp,
    SectionOp,
    SendOp,
    TermOp,
    section_of,
    strings_of,
)
from secc.ir.dialect.readable_names import BUFFER_CONSTANT_PREFIX
from secc.ir.text_io.verifier import source_line
from secc.runtime.plan.sample_predicates import describe_predicate
from secc.runtime.plan.schema import OUTPUT_PREFIX
from secc.runtime.sections.base import SectionModule

TERMS_SECTION = "terms"
# Attributes of every section: a block or a case of that name has another one.
_SECTION_ATTRIBUTES = frozenset(dir(SectionModule(nn.Module())))


@dataclass(frozen=True)
class SectionMethod:
    """A method of a section: its name, its lines, and what it returns by name."""

    name: str
    lines: list[str]
    sends: dict[str, str]
    terms: dict[str, str]
    receives: tuple[str, ...]


@dataclass(frozen=True)
class GuardMethod:
    """A method that reads a value again, what it must equal (a Python literal), and where the user's forward
    reads it."""

    name: str
    lines: list[str]
    value: str
    equals: str
    place: str


@dataclass(frozen=True)
class PlacedRowsMethod:
    """A function that counts the places of a mask in a sample and the rows for them: its name, its lines,
    what it returns as Python expressions, and the op that puts the rows there with its source line."""

    name: str
    lines: list[str]
    places: str
    rows: str
    what: str
    where: str


@dataclass(frozen=True)
class CaseText:
    """One case of a section: the optional keys present, its guards, the cases that recorded glue is taken
    from, the labels of that glue, and whether the rest of the forward matters as well."""

    when: tuple[str, ...]
    method: SectionMethod
    guards: tuple[GuardMethod, ...]
    recorded_cases: tuple[str, ...]
    recorded_labels: tuple[str, ...]
    needs_whole_recording: bool


def bodies_of(graph: GraphOp, section: str) -> list[BodyOp]:
    """The bodies of a section (or of `terms`), in the order of the text."""
    return [op for op in graph.body.block.ops if isinstance(op, BodyOp) and section_of(op) == section]


def render_section_module(graph: GraphOp, section: SectionOp) -> str:
    """The text of `sections/NAME.py`."""
    found = bodies_of(graph, section.sym.data)
    calls = [op for body in found for op in body.walk() if isinstance(op, CallOp)]
    called = [op.args.data for op in calls]
    attributes = block_attribute_names(
        list(dict.fromkeys(op.target.data for op in calls)), _SECTION_ATTRIBUTES
    )
    scope = NameScope({*_SECTION_ATTRIBUTES, *attributes.values()})
    cases = [case for body in found for case in _case_texts(graph, body, attributes, scope)]
    methods = list({id(case.method): case.method for case in cases}.values())
    guards = list({guard.name: guard for case in cases for guard in case.guards}.values())
    return render_template(
        "section.py.j2",
        name=section.sym.data,
        cls=section_class_name(section.sym.data),
        mode=section.mode.data if section.mode else "train",
        active_for=describe_predicate(strings_of(section.when)),
        padded=[
            f"{op.sym.data} with {', '.join(dict.fromkeys(strings_of(op.fills)))}"
            for op in graph.edges
            if op.fills and op.dst.root_reference.data == section.sym.data
        ],
        blocks=strings_of(section.blocks),
        attributes=attributes,
        cases=cases,
        methods=methods,
        guards=guards,
        optional=sorted({key for case in cases for key in case.when}),
        lists=any("listed(" in text for text in called),
        builds=any("built(" in text for text in called),
        kernels=any(
            isinstance(op, GlueOp) and op.target.data.startswith("secc.")
            for body in found
            for op in body.walk()
        ),
    )


def body_patterns(body: BodyOp) -> list[tuple[str, ...]]:
    """The patterns for which a body holds: its `when`, and those of the attribute `also` that `lower` merged
    into it."""
    return [strings_of(body.when), *(tuple(filter(None, text.split(" "))) for text in strings_of(body.also))]


def _case_texts(graph: GraphOp, body: BodyOp, attributes: dict[str, str], scope: NameScope) -> list[CaseText]:
    name, ops = scope.claim_name(body.sym.data), list(body.body.block.ops)
    needed = _computed_ops(ops)
    printer = BodyPrinter(graph, attributes, frees=True)
    lines = printer.print_lines(needed)
    method = SectionMethod(
        name,
        lines,
        {op.edge.data: printer.name_of(op.value) for op in ops if isinstance(op, SendOp)},
        {op.sym.data: printer.name_of(op.numerator) for op in ops if isinstance(op, TermOp)}
        | {OUTPUT_PREFIX + op.sym.data: printer.name_of(op.value) for op in ops if isinstance(op, OutputOp)},
        tuple(op.edge.data for op in ops if isinstance(op, ReceiveOp)),
    )
    guards = tuple(
        _guard_method(graph, body, scope.claim_name(f"guard_{name}_{i}"), op)
        for i, op in enumerate(o for o in ops if isinstance(o, GuardOp))
    )
    recorded_cases = get_strings(body, recorded_glue.RERECORD_ATTRIBUTE)
    labels = tuple(label for op in needed if (label := recorded_glue.recorded_label(op)) is not None)
    return [
        CaseText(
            when,
            method,
            guards,
            recorded_cases,
            labels,
            bool(method.terms) or any(map(_is_captured_glue, needed)),
        )
        for when in body_patterns(body)
    ]


def _is_captured_glue(op: Operation) -> bool:
    """Whether an op is glue of the captures, which only a whole recording shows to be the micro-batch's
    own."""
    return isinstance(op, GlueOp) and recorded_glue.recorded_label(op) is None


def _computed_ops(ops: Sequence[Operation]) -> list[Operation]:
    """The ops that edges, terms and outputs need; what only guards need is printed with the guards."""
    roots = [op for op in ops if isinstance(op, (SendOp, TermOp, OutputOp))]
    return ops_for_values(ops, [operand for op in roots for operand in op.operands])


def ops_for_values(ops: Sequence[Operation], values: Sequence[SSAValue]) -> list[Operation]:
    """The ops, in order, that the given values depend on."""
    wanted: set[Operation] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, OpResult) and value.owner not in wanted:
            wanted.add(value.owner)
            stack.extend(value.owner.operands)
    return [op for op in ops if op in wanted]


def _guard_method(graph: GraphOp, body: BodyOp, name: str, op: GuardOp) -> GuardMethod:
    printer = BodyPrinter(graph, {})
    lines = printer.print_lines(ops_for_values(list(body.body.block.ops), [op.value]))
    return GuardMethod(
        name, lines, printer.name_of(op.value), op.equals.data, op.where.data if op.where else ""
    )


def render_terms_module(graph: GraphOp) -> str:
    """The text of `sections/terms.py`."""
    leaves: dict[str, SectionMethod] = {}
    drawn: dict[str, SectionMethod] = {}
    coefficients: list[tuple[tuple[str, ...], SectionMethod]] = []
    placed_rows: list[PlacedRowsMethod] = []
    scope = NameScope()
    for body in bodies_of(graph, TERMS_SECTION):
        ops = list(body.body.block.ops)
        for leaf in (op for op in ops if isinstance(op, LeafOp)):
            if leaf.sym.data not in leaves | drawn:
                name = scope.claim_name(f"leaf_{leaf.sym.data}")
                needed = ops_for_values(ops, [leaf.value])
                kind = drawn if any(is_random_op(op) for op in needed) else leaves
                kind[leaf.sym.data] = _leaf_method(graph, needed, leaf, name)
        placed_rows += [_placed_rows_method(graph, ops, op) for op in ops if isinstance(op, PlacedRowsOp)]
        if any(isinstance(op, TermOp) for op in ops):
            printer = BodyPrinter(graph, {}, terms=True, whole_batch=True)
            lines = printer.print_lines(ops)
            terms = {op.sym.data: printer.name_of(op.operands[0]) for op in ops if isinstance(op, TermOp)}
            method = SectionMethod(scope.claim_name(body.sym.data), lines, {}, terms, ())
            coefficients += [(when, method) for when in body_patterns(body)]
    methods = list({id(m): m for _, m in coefficients}.values())
    return render_template(
        "terms.py.j2",
        leaves=leaves,
        drawn_leaves=drawn,
        coefficients=coefficients,
        placed_rows=placed_rows,
        methods=methods,
        constant=_loss_constant(graph),
        buffers=[key for key in constants_of(graph, TERMS_SECTION) if key.startswith(BUFFER_CONSTANT_PREFIX)],
        optional=sorted({key for when, _ in coefficients for key in when}),
    )


def constants_of(graph: GraphOp, section: str) -> list[str]:
    """The names of the constants that a section (or `terms`) reads."""
    return sorted(
        {op.key.data for body in bodies_of(graph, section) for op in body.walk() if isinstance(op, ConstOp)}
    )


def _leaf_method(graph: GraphOp, ops: Sequence[Operation], leaf: LeafOp, name: str) -> SectionMethod:
    printer = BodyPrinter(graph, {}, terms=True, one_sample=not any(map(is_random_op, ops)))
    lines = printer.print_lines(ops)
    return SectionMethod(name, lines, {}, {leaf.sym.data: printer.name_of(leaf.value)}, ())


def _placed_rows_method(graph: GraphOp, ops: Sequence[Operation], count: PlacedRowsOp) -> PlacedRowsMethod:
    printer = BodyPrinter(graph, {}, terms=True, whole_batch=True)
    lines = printer.print_lines(ops)
    body = count.parent_op()
    assert isinstance(body, BodyOp)
    places, *selected = (f"int({printer.name_of(value)})" for value in count.operands)
    rows = " * ".join([f"({count.rows.data})", *selected])
    return PlacedRowsMethod(body.sym.data, lines, places, rows, count.what.data, source_line(count))


def _loss_constant(graph: GraphOp) -> str:
    """The part of the loss that is in no term, counted once for a global batch."""
    found = graph.attributes.get("constant")
    return found.data if isinstance(found, StringAttr) else "0.0"
