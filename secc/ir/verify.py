"""The rules of the dialect, each one function: what a pass may rely on and must leave true.

They are kept beside each other, not inside the ops, so that the contract between passes can be read on one page.
"""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation

from secc.ir import expr, template
from secc.ir.carry import pipeline_of
from secc.ir.dialect import CallOp, CaseOp, Computation, EdgeOp, GlueOp, GraphOp, ReturnOp, TermOp, TransferOp, section_of, strings
from secc.ir.types import TensorType, tensor

Problem = tuple[Operation, str]


def problems(module: ModuleOp) -> Iterator[Problem]:
    """Every broken rule, in the order of the text."""
    for graph in module.ops:
        if not isinstance(graph, GraphOp):
            yield graph, "only sec.graph may stand in a module"
            continue
        for op in graph.walk():
            for rule in (arguments, no_mutation, outputs, section, sizes, terminator, term, transfer):
                yield from rule(graph, op)


def arguments(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """An argument template reads, and uses each operand and no other."""
    if not isinstance(op, Computation):
        return
    try:
        used = {leaf.index for leaf in op.arguments.leaves() if isinstance(leaf, template.Ref)}
    except ValueError as error:
        yield op, str(error)
        return
    if used != set(range(len(op.operands))):
        yield op, f"the arguments use operands {sorted(used)}, but the op has {len(op.operands)}"


def no_mutation(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """Glue is functional: slicing a graph that mutates would lose writes silently."""
    if isinstance(op, GlueOp) and not op.target.data.startswith("function."):
        name = op.target.data.split(".")[1] if "." in op.target.data else op.target.data
        if name.endswith("_") and not name.startswith("_"):
            yield op, f"{op.target.data} mutates its argument"


def outputs(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """A call has an access path for each result, and its block is declared."""
    if not isinstance(op, CallOp):
        return
    if len(strings(op.outs)) != len(op.results):
        yield op, f"{len(strings(op.outs))} access paths for {len(op.results)} results"
    if op.target.data not in graph.blocks:
        yield op, f"block {op.target.data} is not declared"


def section(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """An op is in a section that is declared."""
    name = section_of(op)
    if name not in {None, "terms"} and name not in {s.sym.data for s in graph.sections}:
        yield op, f"section @{name} is not declared"


def sizes(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """Types use declared symbols only."""
    known = set(graph.symbols)
    for result in op.results:
        if isinstance(result.type, TensorType):
            used = set[str]().union(*(expr.symbols(d) for d in result.type.shape))
            if used - known:
                yield op, f"symbols {sorted(used - known)} are not declared"


def terminator(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """A case ends with sec.return."""
    if isinstance(op, CaseOp) and (not op.ops or not isinstance(op.ops[-1], ReturnOp)):
        yield op, "a case ends with sec.return"


def term(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """A term has a scalar numerator and at most one, scalar, coefficient."""
    if isinstance(op, TermOp):
        if len(op.operands) not in {1, 2}:
            yield op, "a term has a numerator and at most one coefficient"
        elif any(len(tensor(o).dims) for o in op.operands):
            yield op, "numerator and coefficient are scalars"


def transfer(graph: GraphOp, op: Operation) -> Iterator[Problem]:
    """An edge joins two declared sections along a dim that the tensor has, or stages of one pipeline."""
    if not isinstance(op, (TransferOp, EdgeOp)):
        return
    names = {s.sym.data for s in graph.sections}
    for end in (op.src, op.dst):
        if end.root_reference.data not in names:
            yield op, f"section @{end.root_reference.data} is not declared"
    if op.dim is None or op.rows is None:
        ends = [pipeline_of(s) for s in graph.sections if s.sym.data in {op.src.root_reference.data, op.dst.root_reference.data}]
        if op.dim is not op.rows or not ends[0] or len(set(ends)) > 1:
            yield op, "an edge has a dim and rows, or neither of them between stages of a pipeline"
    elif not 0 <= op.dim.data < len(tensor(op.result).dims):
        yield op, f"dim {op.dim.data} of a tensor with {len(tensor(op.result).dims)} dims"


def where(op: Operation) -> str:
    """The user's file:line of an op, "" if it has none."""
    place = op.properties.get("where")
    return place.data if isinstance(place, StringAttr) else ""
