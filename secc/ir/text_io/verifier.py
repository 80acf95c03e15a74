"""The rules of the dialect, one function each: what a pass may rely on and must preserve.

They stand here together, not inside the ops, so that the contract between passes can be read on one page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation

from secc.ir.analysis.transferable_values import pipeline_of
from secc.ir.dialect import argument_template, size_expr
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    Computation,
    EdgeOp,
    GlueOp,
    GraphOp,
    ReturnOp,
    TermOp,
    TransferOp,
    section_of,
    strings_of,
)
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.runtime.plan.schema import is_statistic

RuleViolation = tuple[Operation, str]


@dataclass(frozen=True)
class GraphDeclarations:
    """What a graph declares: blocks and symbols by name, and sections with the pipeline that they are a stage
    of."""

    blocks: frozenset[str]
    symbols: frozenset[str]
    sections: dict[str, str]

    @classmethod
    def from_graph(cls, graph: GraphOp) -> GraphDeclarations:
        """The declarations of a graph."""
        return cls(
            frozenset(graph.blocks),
            frozenset(graph.symbols),
            {s.sym.data: pipeline_of(s) for s in graph.sections},
        )


def find_violations(module: ModuleOp) -> Iterator[RuleViolation]:
    """Yields every violation of a rule, in the order of the text."""
    for graph in module.ops:
        if not isinstance(graph, GraphOp):
            yield graph, "only sec.graph may stand in a module"
            continue
        declared = GraphDeclarations.from_graph(graph)
        for op in graph.walk():
            for rule in (
                check_arguments,
                check_no_mutation,
                check_outputs,
                check_section,
                check_sizes,
                check_terminator,
                check_term,
                check_transfer,
            ):
                yield from rule(declared, op)


def check_arguments(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """An argument template can be parsed, and uses each operand and no other."""
    if not isinstance(op, Computation):
        return
    try:
        used = {
            leaf.index for leaf in op.arguments.leaves() if isinstance(leaf, argument_template.OperandRef)
        }
    except ValueError as error:
        yield op, str(error)
        return
    if used != set(range(len(op.operands))):
        yield op, f"the arguments use operands {sorted(used)}, but the op has {len(op.operands)}"


def check_no_mutation(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """Glue is functional: a section that is cut out of a graph with mutations would silently lose writes."""
    if isinstance(op, GlueOp) and not op.target.data.startswith("function."):
        name = op.target.data.split(".")[1] if "." in op.target.data else op.target.data
        if name.endswith("_") and not name.startswith("_"):
            yield op, f"{op.target.data} mutates its argument"


def check_outputs(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """A call has an access path for each result, and its block is declared."""
    if not isinstance(op, CallOp):
        return
    if len(strings_of(op.outs)) != len(op.results):
        yield op, f"{len(strings_of(op.outs))} access paths for {len(op.results)} results"
    if op.target.data not in declared.blocks:
        yield op, f"block {op.target.data} is not declared"


def check_section(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """An op is in a declared section."""
    name = section_of(op)
    if name not in {None, "terms"} and name not in declared.sections:
        yield op, f"section @{name} is not declared"


def check_sizes(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """Types use declared symbols only."""
    for result in op.results:
        if isinstance(result.type, TensorType):
            used = set[str]().union(*(size_expr.symbol_names(d) for d in result.type.shape))
            if unknown := used - declared.symbols:
                yield op, f"symbols {sorted(unknown)} are not declared"


def check_terminator(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """A case ends with sec.return."""
    if isinstance(op, CaseOp) and (not op.ops or not isinstance(op.ops[-1], ReturnOp)):
        yield op, "a case ends with sec.return"


def check_term(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """A term has a scalar numerator, or several numbers if it is a statistic, and at most one, scalar,
    coefficient."""
    if isinstance(op, TermOp):
        if len(op.operands) not in {1, 2}:
            yield op, "a term has a numerator and at most one coefficient"
        elif any(len(tensor_type(o).dims) for o in op.operands[is_statistic(op.sym.data) :]):
            yield op, "numerator and coefficient are scalars"


def check_transfer(declared: GraphDeclarations, op: Operation) -> Iterator[RuleViolation]:
    """An edge joins two declared sections along a dim that the tensor has, or stages of one pipeline."""
    if not isinstance(op, (TransferOp, EdgeOp)):
        return
    names = [end.root_reference.data for end in (op.src, op.dst)]
    yield from ((op, f"section @{name} is not declared") for name in names if name not in declared.sections)
    if op.dim is None or op.rows is None:
        ends = {declared.sections.get(name, "") for name in names}
        if op.dim is not op.rows or "" in ends or len(ends) > 1:
            yield op, "an edge has a dim and rows, or neither of them between stages of a pipeline"
    elif not 0 <= op.dim.data < len(tensor_type(op.result).dims):
        yield op, f"dim {op.dim.data} of a tensor with {len(tensor_type(op.result).dims)} dims"


def source_line(op: Operation) -> str:
    """The user's file:line of an op, "" if it has none."""
    place = op.properties.get("where")
    return place.data if isinstance(place, StringAttr) else ""
