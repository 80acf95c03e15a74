"""`sections/*.py`: one readable module for each section, and `terms.py` for the loss's leaves and
coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, OpResult, SSAValue

from secc.codegen.body_printer import BodyPrinter
from secc.codegen.python_names import Scope, attribute_names, class_name, identifier
from secc.codegen.render import render
from secc.ir.analysis import recorded_glue
from secc.ir.analysis.dataflow import texts_of
from secc.ir.dialect.ops import (
    BodyOp,
    CallOp,
    ConstOp,
    GlueOp,
    GraphOp,
    GuardOp,
    LeafOp,
    ReceiveOp,
    SectionOp,
    SendOp,
    TermOp,
    section_of,
    strings,
)
from secc.ir.dialect.readable_names import BUFFER
from secc.runtime.sections.base import Section

TERMS = "terms"
_OWN = frozenset(dir(Section)) | {
    "constants",
    "draws",
}  # attributes of every section: a block or a case of that name has another one


@dataclass(frozen=True)
class Method:
    """A method of a section: its name, its lines, and what it returns by name."""

    name: str
    lines: list[str]
    sends: dict[str, str]
    terms: dict[str, str]
    receives: tuple[str, ...]


@dataclass(frozen=True)
class Guard:
    """A method that reads a value again, what it must be (a Python literal), and where the user's forward
    reads it."""

    name: str
    lines: list[str]
    value: str
    equals: str
    place: str


@dataclass(frozen=True)
class CaseText:
    """One way through the section: the optional keys present, its guards, of which cases recorded glue is
    taken, the labels of that glue, and whether the rest of the forward counts as well."""

    when: tuple[str, ...]
    method: Method
    guards: tuple[Guard, ...]
    anew: tuple[str, ...]
    takes: tuple[str, ...]
    whole: bool


def bodies(graph: GraphOp, section: str) -> list[BodyOp]:
    """The bodies of a section (or of `terms`), in the order of the text."""
    return [op for op in graph.body.block.ops if isinstance(op, BodyOp) and section_of(op) == section]


def section_module(graph: GraphOp, section: SectionOp) -> str:
    """The text of `sections/NAME.py`."""
    found = bodies(graph, section.sym.data)
    calls = [op for body in found for op in body.walk() if isinstance(op, CallOp)]
    called = [op.args.data for op in calls]
    attributes = attribute_names(list(dict.fromkeys(op.target.data for op in calls)), _OWN)
    scope = Scope({*_OWN, *attributes.values()})
    cases = [case for body in found for case in _cases(graph, body, attributes, scope.name(body.sym.data))]
    methods = list({id(case.method): case.method for case in cases}.values())
    guards = list({guard.name: guard for case in cases for guard in case.guards}.values())
    return render(
        "section.py.j2",
        name=section.sym.data,
        cls=class_name(section.sym.data),
        mode=section.mode.data if section.mode else "train",
        when=strings(section.when),
        blocks=strings(section.blocks),
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


def patterns(body: BodyOp) -> list[tuple[str, ...]]:
    """The patterns for which a body holds: its `when`, and those of the attribute `also` that `lower` merged
    into it."""
    return [strings(body.when), *(tuple(filter(None, text.split(" "))) for text in strings(body.also))]


def _cases(graph: GraphOp, body: BodyOp, attributes: dict[str, str], name: str) -> list[CaseText]:
    ops = list(body.body.block.ops)
    needed = _computation(ops)
    printer = BodyPrinter(graph, attributes)
    lines = printer.lines(needed)
    method = Method(
        name,
        lines,
        {op.edge.data: printer.value(op.value) for op in ops if isinstance(op, SendOp)},
        {op.sym.data: printer.value(op.numerator) for op in ops if isinstance(op, TermOp)},
        tuple(op.edge.data for op in ops if isinstance(op, ReceiveOp)),
    )
    guards = tuple(
        _guard(graph, body, f"guard_{name}_{i}", op)
        for i, op in enumerate(o for o in ops if isinstance(o, GuardOp))
    )
    anew = texts_of(body, recorded_glue.ANEW)
    takes = tuple(label for op in needed if (label := recorded_glue.label(op)) is not None)
    return [
        CaseText(when, method, guards, anew, takes, bool(method.terms) or any(map(_is_compiled, needed)))
        for when in patterns(body)
    ]


def _is_compiled(op: Operation) -> bool:
    """Whether an op is glue of the captures, which only a whole recording shows to be the micro-batch's
    own."""
    return isinstance(op, GlueOp) and recorded_glue.label(op) is None


def _computation(ops: Sequence[Operation]) -> list[Operation]:
    """The ops that edges and terms need; what only guards need is printed with the guards."""
    roots = [op for op in ops if isinstance(op, (SendOp, TermOp))]
    return slice_of(ops, [operand for op in roots for operand in op.operands])


def slice_of(ops: Sequence[Operation], values: Sequence[SSAValue]) -> list[Operation]:
    """The ops, in order, that the given values are computed from."""
    wanted: set[Operation] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, OpResult) and value.owner not in wanted:
            wanted.add(value.owner)
            stack.extend(value.owner.operands)
    return [op for op in ops if op in wanted]


def _guard(graph: GraphOp, body: BodyOp, name: str, op: GuardOp) -> Guard:
    printer = BodyPrinter(graph, {})
    lines = printer.lines(slice_of(list(body.body.block.ops), [op.value]))
    return Guard(name, lines, printer.value(op.value), op.equals.data, op.where.data if op.where else "")


def terms_module(graph: GraphOp) -> str:
    """The text of `sections/terms.py`."""
    leaves: dict[str, Method] = {}
    coefficients: list[tuple[tuple[str, ...], Method]] = []
    scope = Scope({"coefficients", "scalar", "constants"})
    for body in bodies(graph, TERMS):
        ops = list(body.body.block.ops)
        for leaf in (op for op in ops if isinstance(op, LeafOp)):
            leaves.setdefault(leaf.sym.data, _leaf(graph, ops, leaf))
        if any(isinstance(op, TermOp) for op in ops):
            printer = BodyPrinter(graph, {}, terms=True, whole_batch=True)
            lines = printer.lines(ops)
            terms = {op.sym.data: printer.value(op.operands[0]) for op in ops if isinstance(op, TermOp)}
            method = Method(scope.name(body.sym.data), lines, {}, terms, ())
            coefficients += [(when, method) for when in patterns(body)]
    methods = list({id(m): m for _, m in coefficients}.values())
    return render(
        "terms.py.j2",
        leaves=leaves,
        coefficients=coefficients,
        methods=methods,
        constant=_constant(graph),
        buffers=[key for key in constants_of(graph, TERMS) if key.startswith(BUFFER)],
        optional=sorted({key for when, _ in coefficients for key in when}),
    )


def constants_of(graph: GraphOp, section: str) -> list[str]:
    """The names of the constants that a section (or `terms`) reads."""
    return sorted(
        {op.key.data for body in bodies(graph, section) for op in body.walk() if isinstance(op, ConstOp)}
    )


def _leaf(graph: GraphOp, ops: Sequence[Operation], leaf: LeafOp) -> Method:
    printer = BodyPrinter(graph, {}, terms=True)
    lines = printer.lines(slice_of(ops, [leaf.value]))
    return Method(
        identifier(f"leaf_{leaf.sym.data}"), lines, {}, {leaf.sym.data: printer.value(leaf.value)}, ()
    )


def _constant(graph: GraphOp) -> str:
    """What the terms leave over of the loss, counted once for a global batch."""
    found = graph.attributes.get("constant")
    return found.data if isinstance(found, StringAttr) else "0.0"
