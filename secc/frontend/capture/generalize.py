"""One generic graph from several captures of the same pattern: sizes become symbols by comparison.

Captures whose ops agree are aligned node by node. Every number and every dim that moved is explained as an
expression over the sizes of the inputs. What Python read from inputs is explained by sizes, or has no
influence, or is a *guard*: the value that the graph is valid under. Captures whose ops differ are cases of
their own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from secc.frontend.capture.control_flow_paths import (
    MIN_CAPTURES,
    GlueDiagnostic,
    ObservedRecording,
    find_first_difference,
    graph_signature,
    path_signature,
)
from secc.frontend.capture.data_numbers import DataNumbers, NumberSource
from secc.frontend.capture.shared_explanations import SharedExplanations
from secc.frontend.capture.size_fit import SizeFitter
from secc.ir.dialect import argument_template
from secc.ir.dialect.readable_names import DATA_SYMBOL_PREFIX
from secc.ir.dialect.size_expr import Expr, size_symbol, symbol_names
from secc.runtime.model.nested_batch import KEY_SEPARATOR
from secc.runtime.plan.schema import SIZES_SUFFIX
from secc.runtime.recorder import Read, is_read_node, take_at_path
from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.recording import iter_nodes_behind

_MAX_PROBES = 24  # further captures at most to put explanations to the test
_PROBE_EXTRA_WIDTHS = (3, 8)  # by how much probes are wider than captures that are all of one width

aten = torch.ops.aten


@dataclass
class GenericGraph:
    """A graph that holds at every size. Its nodes' meta has `args` and `kwargs` (structures of nodes, sympy
    expressions and literals) and a `shape` of sympy expressions; the read nodes left in it are guards. `data`
    are the symbols that inputs' values decide, with what they are about.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: dict[str, fx.Node]
    data_symbols: dict[str, Expr] = field(default_factory=dict[str, Expr])

    @property
    def guards(self) -> list[fx.Node]:
        """The read nodes: `meta["read"]` has (kind, value)."""
        return [n for n in self.graph.nodes if is_read_node(n)]


class UnexplainedNumber(Exception):
    """Raised while captures are merged."""

    def __init__(self, diagnostic: GlueDiagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


class BatchProbe(Protocol):
    """Observes one more micro-batch."""

    padded_symbols: frozenset[str]  # the symbols whose size can be chosen
    explanations: SharedExplanations  # what was found of the other patterns

    def __call__(self, name: str, size: int) -> ObservedRecording | None:
        """A micro-batch like the one in which `name` is smallest, but of this size, None if there is none."""
        ...

    def record_held_out(self) -> Iterator[ObservedRecording]:
        """Micro-batches of other samples."""
        ...

    def record_without_rows(self) -> Iterator[ObservedRecording]:
        """Micro-batches in which values may leave no rows to count."""
        ...


def generalize_captures(
    observed: Sequence[ObservedRecording], probe: BatchProbe | None = None
) -> tuple[list[GenericGraph], list[GlueDiagnostic]]:
    """The cases of one pattern from folded recordings, those with most captures first, and what could not be
    explained.

    With `probe`, explanations that another observation could refute are put to the test.
    Raises GlueError if no case is left, or if a case could be taken for a batch that goes another way.
    """
    groups: dict[Any, list[ObservedRecording]] = {}
    for o in observed:
        groups.setdefault(graph_signature(o.recording.graph), []).append(o)
    ways = sorted(groups.values(), key=len, reverse=True)
    reads = {id(o): o.recording.reads for o in observed}
    cases, problems = [], []
    for group in ways:
        found, notes = _merge_or_split(group, probe)
        cases += found
        problems += notes
    for case, group in cases:
        strangers = [o for o in observed if all(o is not member for member in group)]
        if not all(_guard_rejects(case, reads[id(o)]) for o in strangers):
            raise (
                find_first_difference(ways)
                or GlueDiagnostic("forward goes different ways that no value it reads tells apart", "")
            ).to_error()
    if not cases:
        raise (problems[0] if len(ways) == 1 else find_first_difference(ways) or problems[0]).to_error()
    return [case for case, _ in cases], problems


def _merge_or_split(
    group: list[ObservedRecording], probe: BatchProbe | None
) -> tuple[list[tuple[GenericGraph, list[ObservedRecording]]], list[GlueDiagnostic]]:
    """Merge captures of one structure: together if that explains all, else apart by what Python read."""
    if len(group) < MIN_CAPTURES:
        place = next((n.meta["where"] for n in group[0].recording.graph.nodes if n.meta.get("where")), "")
        return [], [
            GlueDiagnostic(
                f"only {len(group)} of the captures took this way, too few to tell sizes from constants",
                place,
            )
        ]
    try:
        return [(merge_captures(group, probe), group)], []
    except UnexplainedNumber as error:
        problem = error.diagnostic
    parts: dict[Any, list[ObservedRecording]] = {}
    for o in group:
        parts.setdefault(path_signature(o.recording)[1], []).append(o)
    if len(parts) == 1:
        return [], [problem]
    results = [_merge_or_split(part, probe) for part in parts.values()]
    return [c for cases, _ in results for c in cases], [p for _, problems in results for p in problems]


class RowNames(Protocol):
    """Names the numbers of rows that inputs' values decide."""

    def name_dim(self, label: str, dim: int) -> str:
        """The symbol of a dim of a labelled tensor."""
        ...


def merge_captures(
    group: Sequence[ObservedRecording], probe: BatchProbe | None, names: RowNames | None = None
) -> GenericGraph:
    """The captures, of one structure, as one graph, after as many further ones as its explanations need.

    `names` is for glue that is recorded anew. Raises GlueError with it, Unexplained without it.
    """
    try:
        return _merge_with_probes(group, probe, names)
    except UnexplainedNumber as error:
        if names is None:
            raise
        raise error.diagnostic.to_error() from None


def _merge_with_probes(
    group: Sequence[ObservedRecording], probe: BatchProbe | None, names: RowNames | None
) -> GenericGraph:
    known = list(group) + (_probe_constant_widths(group, probe) if probe is not None else [])
    for _ in range(_MAX_PROBES if probe is not None else 0):
        assert probe is not None
        doubt = _CaptureMerger(known, probe, names).find_doubt()
        more = probe(*doubt) if doubt is not None else None
        if more is None or graph_signature(more.recording.graph) != graph_signature(known[0].recording.graph):
            break
        known.append(more)
    if probe is not None and _CaptureMerger(known, probe, names).uses_floor_division():
        ways = [path_signature(o.recording) for o in known]
        known += [o for o in probe.record_held_out() if path_signature(o.recording) in ways]
    if probe is not None and _CaptureMerger(known, probe, names).takes_data_symbols():
        for empty in probe.record_without_rows():
            if graph_signature(empty.recording.graph) == graph_signature(known[0].recording.graph):
                try:
                    return _CaptureMerger([*known, empty], probe, names).merge()
                except UnexplainedNumber:
                    continue  # without rows forward does something else
    return _CaptureMerger(known, probe, names).merge()


def _probe_constant_widths(group: Sequence[ObservedRecording], probe: BatchProbe) -> list[ObservedRecording]:
    """Probes along widths that are the same in all captures of a group: what depends on such a width would
    look constant."""
    first = group[0]
    still = sorted(name for name in probe.padded_symbols if len({o.sizes[name] for o in group}) == 1)
    found = [probe(name, first.sizes[name] + more) for name in still for more in _PROBE_EXTRA_WIDTHS]
    return [
        o
        for o in found
        if o is not None and graph_signature(o.recording.graph) == graph_signature(first.recording.graph)
    ]


def _guard_rejects(case: GenericGraph, reads: Sequence[Read]) -> bool:
    """Whether a guard of the case tells a recording with these reads from the case's own."""
    for guard in case.guards:
        order, (kind, value) = guard.meta["order"], guard.meta["read"]
        if (
            order < len(reads)
            and (reads[order].kind, reads[order].where) == (kind, guard.meta["where"])
            and reads[order].value != value
        ):
            return True
    return False


class _CaptureMerger:
    """Captures of one structure as one generic graph, which is the first one's with its numbers explained."""

    def __init__(
        self, group: Sequence[ObservedRecording], probe: BatchProbe | None, names: RowNames | None = None
    ) -> None:
        self._row_names, self._sample_shapes = names, [o.sample_shapes for o in group]
        self._explanations = probe.explanations if probe is not None else SharedExplanations()
        self._first_recording = group[0].recording
        self._graphs = [o.recording.graph for o in group]
        self._recordings = [o.recording for o in group]
        self._fitter = SizeFitter([o.sizes for o in group], probe.padded_symbols if probe is not None else ())
        self._data_names: list[str] = []
        self._data_numbers, self._real_symbols = DataNumbers(), dict[tuple[float, ...], Expr]()
        self._unused_reads: dict[
            str, UnexplainedNumber
        ] = {}  # symbols for values that Python read, which no number has been explained by

    def find_doubt(self) -> tuple[str, int] | None:
        """A symbol and a size of it at which an explanation might fail. Nothing is changed."""
        self._explain_nodes()
        return self._fitter.doubt

    def uses_floor_division(self) -> bool:
        """Whether a floor division explains some number, which values of the inputs may have by chance.
        Nothing is changed."""
        self._explain_nodes()
        return self._fitter.used_division

    def takes_data_symbols(self) -> bool:
        """Whether an op takes a number that inputs' values decide, which without rows might be another.
        Nothing is changed."""
        explained = self._explain_nodes()[0]
        return any(
            self._data_numbers.accepts_tensor(n, meta.get("args", (None,)))
            and self._have_data_symbol(meta["args"][1:2])
            for n, meta in explained.items()
        )

    def _have_data_symbol(self, args: Sequence[Any]) -> bool:
        return any(isinstance(a, sympy.Expr) and bool(symbol_names(a) & set(self._data_names)) for a in args)

    def merge(self) -> GenericGraph:
        """The merged graph. The first capture is used up."""
        explained, dropped = self._explain_nodes()
        for node, meta in explained.items():
            if "target" in meta:
                node.op, node.target, node.meta["made"] = "call_function", meta.pop("target"), True
            node.meta |= meta
            self._explanations.record_node(node)
        for node in list(self._first_recording.graph.nodes):
            self._data_numbers.replace_number(node)
        for node in dropped:
            self._first_recording.graph.erase_node(node)
        self._first_recording.graph.eliminate_dead_code(is_needed)
        return self._build_generic_graph()

    def _explain_nodes(self) -> tuple[dict[fx.Node, dict[str, Any]], list[fx.Node]]:
        """What is found of each node, and the reads that may be forgotten."""
        explained: dict[fx.Node, dict[str, Any]] = {}
        dropped: list[fx.Node] = []
        for order, read in enumerate(self._first_recording.reads):
            read.node.meta["order"] = order
        for nodes in list(zip(*(g.nodes for g in self._graphs), strict=True)):
            if is_read_node(nodes[0]) and self._is_read_explained(nodes):
                dropped.append(nodes[0])
            else:
                explained[nodes[0]] = self._explain_node(nodes)
        for problem in self._unused_reads.values():
            raise problem
        return explained, dropped

    def _build_generic_graph(self) -> GenericGraph:
        graph = self._first_recording.graph
        used = {n.target for n in graph.nodes if n.op == "get_attr"}
        constants = {k: v for k, v in self._first_recording.constants.items() if k in used}
        data = {name: self._fitter.estimate_data_size(name, self._data_names) for name in self._data_names}
        return GenericGraph(graph, constants, self._first_recording.inputs, data)

    def _explain_node(self, nodes: Sequence[fx.Node]) -> dict[str, Any]:
        first = nodes[0]
        if first.op == "get_attr" and first.target in self._first_recording.constants:
            return self._explain_constant(nodes)
        meta: dict[str, Any] = {}
        if first.op != "output":
            meta["args"] = _infer_reshape_size(
                first, self._explain_value(first, [n.args for n in nodes]), self._data_names
            )
            meta["kwargs"] = self._explain_value(first, [n.kwargs for n in nodes])
            self._check_data_symbols(first, meta["args"], meta["kwargs"])
        if "shape" in first.meta:
            meta["shape"] = self._explain_shape(first, [n.meta["shape"] for n in nodes])
        if "results" in first.meta:
            results = zip(*(n.meta["results"] for n in nodes), strict=True)
            meta["results"] = [
                r[0] | {"shape": self._explain_shape(first, [x["shape"] for x in r])} for r in results
            ]
        return meta

    def _check_data_symbols(self, node: fx.Node, *arguments: Any) -> None:
        """Numbers in arguments must be known before the op runs, from sizes alone."""
        found = [
            leaf
            for a in arguments
            for leaf in argument_template.CallArguments([a]).leaves()
            if isinstance(leaf, sympy.Expr)
        ]
        decided = set[str]().union(*(symbol_names(e) for e in found)) & set(self._data_names)
        if decided and self._data_numbers.accepts_tensor(node, arguments[0]) and not arguments[1]:
            for name in decided:
                self._unused_reads.pop(name, None)
        elif decided:
            if unused := decided & self._unused_reads.keys():
                raise self._unused_reads[min(unused)]
            message = f"an argument of {node.target} is a number of rows that values of the inputs decide"
            raise _unexplained_number(node, message, ())

    def _explain_shape(self, node: fx.Node, shapes: list[tuple[int, ...]]) -> tuple[Expr, ...]:
        return tuple(self._explain_dim(node, i, dims) for i, dims in enumerate(zip(*shapes, strict=True)))

    def _explain_value(self, node: fx.Node, values: list[Any]) -> Any:
        """One argument of all captures as one structure."""
        first = values[0]
        match first:
            case fx.Node() | bool() | None | str():
                return first
            case list() | tuple():
                return type(first)(self._explain_value(node, list(v)) for v in zip(*values, strict=True))
            case dict():
                return {k: self._explain_value(node, [v[k] for v in values]) for k in first}
            case slice():
                return slice(
                    *(
                        self._explain_value(node, [getattr(v, part) for v in values])
                        for part in ("start", "stop", "step")
                    )
                )
            case int():
                return self._require_explained(node, values, self._explain_integer(node, values))
            case float():
                return self._require_explained(node, values, self._fitter.fit_real(values))
            case _:
                return first

    def _require_explained(self, node: fx.Node, values: list[Any], expr: Expr | float | None) -> Any:
        expr = self._real_symbols.get(tuple(values)) if expr is None else expr
        if expr is None:
            message = f"a number in {node.target} moves with the batch, and no expression over its sizes explains it"
            raise _unexplained_number(node, message, values)
        return int(expr) if isinstance(expr, sympy.Integer) else expr

    def _explain_integer(self, node: fx.Node, values: Sequence[int]) -> Expr | None:
        return self._explanations.find_fitting(node, values, self._fitter) or self._fitter.fit_integer(values)

    def _explain_dim(self, node: fx.Node, dim: int, values: Sequence[int]) -> Expr:
        expr = self._explain_integer(node, values)
        if expr is not None:
            return expr
        if (name := self._name_rows(node, dim, values)) is not None:
            self._fitter = self._fitter.with_symbol(name, values)
        elif "label" in node.meta or _has_dynamic_shape(node):
            self._add_data_symbol(NumberSource(node, dim), values)
        else:
            made_by = node.args[0] if node.target is take_at_path else node.target
            message = f"a dim of the result of {made_by} moves with the batch, and no expression over its sizes explains it"
            raise _unexplained_number(node, message, values)
        found = self._fitter.fit_integer(values)
        assert found is not None
        return found

    def _name_rows(self, node: fx.Node, dim: int, values: Sequence[int]) -> str | None:
        """The symbol of a size that inputs' values decide and that is the sum of the samples'; None for every
        other size."""
        label = node.meta.get("label")
        if label is None or self._row_names is None:
            return None
        sums = [sum(part[label][dim] for part in parts if label in part) for parts in self._sample_shapes]
        return self._row_names.name_dim(label, dim) if sums == list(values) else None

    def _add_data_symbol(self, source: NumberSource, values: Sequence[float]) -> str:
        """A new symbol for a number that the inputs' values decide; its name."""
        name = f"{DATA_SYMBOL_PREFIX}{len(self._data_names)}"
        self._data_names.append(name)
        self._data_numbers.sources[name] = source
        if all(float(v).is_integer() for v in values):
            self._fitter = self._fitter.with_symbol(name, [int(v) for v in values])
        else:
            self._real_symbols[tuple(values)] = size_symbol(name)
        return name

    def _is_read_explained(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether a read may be forgotten: sizes explain it, or it was seen both true and false and changed
        nothing.

        A value that never moved is a guard; one that moved and is not explained is a problem.
        """
        values = [n.meta["read"][1] for n in nodes]
        if _reads_list_sizes(nodes[0]):
            return True  # what is done with its tensors has numbers of its own
        if all(v == values[0] for v in values):
            return not _depends_on_inputs(nodes[0])
        if all(isinstance(v, bool) for v in values) or nodes[0].meta["read"][0] == "size":
            return True
        try:
            self._explain_value(nodes[0], values)
        except (UnexplainedNumber, ValueError):
            kind = nodes[0].meta["read"][0]
            problem = _unexplained_number(
                nodes[0], f"Python reads a value ({kind}) of the inputs that sizes do not explain", values
            )
            if kind != "item":
                raise problem from None
            read = nodes[0].args[0]
            assert isinstance(read, fx.Node)
            self._unused_reads[self._add_data_symbol(NumberSource(read, None), values)] = problem
        return True

    def _explain_constant(self, nodes: Sequence[fx.Node]) -> dict[str, Any]:
        """A tensor made of Python data: the same in all captures, or a size, or a range of a size."""
        node = nodes[0]
        tensors = [r.constants[str(n.target)] for r, n in zip(self._recordings, nodes, strict=True)]
        if all(t.shape == tensors[0].shape and torch.equal(t, tensors[0]) for t in tensors):
            shape = tuple(sympy.Integer(s) for s in tensors[0].shape)
            return {"args": (), "kwargs": {}, "shape": shape}
        shape = self._explain_shape(node, [tuple(t.shape) for t in tensors])
        made = self._constant_as_full(node, tensors, shape) or self._constant_as_arange(node, tensors)
        if made is None:
            user = next(iter(node.users), node)
            raise _unexplained_number(
                user, "a tensor made of Python data changes with the batch", [t.tolist() for t in tensors]
            )
        target, args = made
        kwargs = {"dtype": tensors[0].dtype, "device": torch.device("cpu")}
        modes = {"where": _first_use_place(node), "grad": False, "autocast": "", "requires_grad": False}
        return {"target": target, "args": args, "kwargs": kwargs, "shape": shape} | modes

    def _constant_as_full(
        self, node: fx.Node, tensors: list[torch.Tensor], shape: tuple[Expr, ...]
    ) -> tuple[Any, tuple[Any, ...]] | None:
        values = [t.flatten().tolist() for t in tensors]
        if not all(v and all(x == v[0] for x in v) for v in values):
            return None
        return aten.full.default, (list(shape), self._explain_value(node, [v[0] for v in values]))

    def _constant_as_arange(
        self, node: fx.Node, tensors: list[torch.Tensor]
    ) -> tuple[Any, tuple[Any, ...]] | None:
        if any(t.ndim != 1 or not torch.equal(t, torch.arange(len(t), dtype=t.dtype)) for t in tensors):
            return None
        return aten.arange.default, (self._explain_value(node, [len(t) for t in tensors]),)


def _infer_reshape_size(node: fx.Node, args: Any, data: Sequence[str]) -> Any:
    """The arguments; in a reshape, one size that the inputs' values decide is left to torch."""
    if node.target is not aten.reshape.default or -1 in args[1]:
        return args
    unknown = [i for i, s in enumerate(args[1]) if isinstance(s, sympy.Expr) and symbol_names(s) & set(data)]
    return (
        (args[0], [-1 if i == unknown[0] else s for i, s in enumerate(args[1])])
        if len(unknown) == 1
        else args
    )


def _unexplained_number(node: fx.Node, message: str, values: Sequence[Any]) -> UnexplainedNumber:
    return UnexplainedNumber(GlueDiagnostic(message, node.meta["where"], tuple(values), node.meta["module"]))


def _first_use_place(node: fx.Node) -> str:
    return next((u.meta["where"] for u in node.users), "")


def _depends_on_inputs(node: fx.Node) -> bool:
    """Whether a value is computed from inputs, not from constants alone."""
    return any(n.op == "placeholder" for n in iter_nodes_behind([node]))


def _reads_list_sizes(node: fx.Node) -> bool:
    """Whether a read is that of the sizes of a list's tensors (`secc.runtime.model.nested_batch`)."""
    return any(
        n.op == "placeholder" and str(n.target).endswith(f"{KEY_SEPARATOR}{SIZES_SUFFIX}")
        for n in node.all_input_nodes
    )


def _has_dynamic_shape(node: fx.Node) -> bool:
    """Whether the values of an op's inputs decide its shape."""
    source = node.args[0] if node.target is operator.getitem else node
    target = source.target if isinstance(source, fx.Node) else None
    return isinstance(target, OpOverload) and torch.Tag.dynamic_output_shape in target.tags
