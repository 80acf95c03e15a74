"""Makes one generic graph from several captures of the same pattern: sizes become symbols by comparison.

Captures with the same ops are compared node by node. Every number and every dim that differs between them
is explained as an expression over the sizes of the inputs. A value that Python read from inputs is
explained by sizes, or has no influence, or becomes a *guard*: the graph is valid for that value only.
Captures with different ops become separate cases.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from secc.frontend.capture.control_flow_paths import (
    LONG_WIDTH,
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
from secc.runtime.plan.schema import COUNTS_SUFFIX, SIZES_SUFFIX
from secc.runtime.recorder import Read, is_read_node, take_at_path
from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.recording import has_drawn_rows, iter_nodes_behind, picks_drawn_rows

_MAX_PROBES = 24  # further captures at most to put explanations to the test
_PADDED_MEMBERS = 2  # micro-batches of a path that are padded themselves
_PROBE_EXTRA_WIDTHS = (3, 8)  # by how much probes are wider than captures that are all of one width

aten = torch.ops.aten


@dataclass
class GenericGraph:
    """A graph that is valid at every size.

    The meta of its nodes has `args` and `kwargs` (structures of nodes, sympy expressions and literals) and
    `shape` (sympy expressions); the read nodes left in it are guards. data_symbols: symbols that values of
    the inputs decide, with an estimate in terms of other sizes.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: dict[str, fx.Node]
    data_symbols: dict[str, Expr] = field(default_factory=dict[str, Expr])

    @property
    def guards(self) -> list[fx.Node]:
        """The read nodes left in the graph; `meta["read"]` is (kind, value)."""
        return [n for n in self.graph.nodes if is_read_node(n)]


class UnexplainedNumber(Exception):
    """Raised while captures are merged, if no expression explains a number."""

    def __init__(self, diagnostic: GlueDiagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


class BatchProbe(Protocol):
    """Records further micro-batches for a comparison.

    padded_symbols: symbols for which any larger size can be had by padding. explanations: expressions
    found for other patterns.
    """

    padded_symbols: frozenset[str]  # symbols for which any larger size can be had
    explanations: SharedExplanations  # what was found of the other patterns

    def __call__(self, name: str, size: int) -> ObservedRecording | None:
        """A micro-batch like the one in which `name` is smallest, but of this size, None if there is none."""
        ...

    def record_padded(self, known: ObservedRecording, name: str, size: int) -> ObservedRecording | None:
        """The micro-batch of a recording, padded so that `name` is of this size; None if that cannot be."""
        ...

    def record_other_widths(self, name: str, size: int) -> Iterator[ObservedRecording]:
        """Yields recordings of micro-batches of one sample each, in which `name` is not of this size."""
        ...

    def record_held_out(self) -> Iterator[ObservedRecording]:
        """Yields recordings of micro-batches with other samples."""
        ...

    def record_with_repeats(self, recordings: Sequence[ObservedRecording]) -> Iterator[ObservedRecording]:
        """Yields recordings of the same micro-batches with some samples more than once."""
        ...

    def record_without_rows(self) -> Iterator[ObservedRecording]:
        """Yields recordings of micro-batches in which values may leave no rows to count."""
        ...


def generalize_captures(
    observed: Sequence[ObservedRecording], probe: BatchProbe | None = None
) -> tuple[list[GenericGraph], list[GlueDiagnostic]]:
    """Returns the cases of one pattern, those with most captures first, and diagnostics of what could not
    be explained.

    With `probe`, explanations that another recording could refute are tested. Raises GlueError if no case
    is left, or if no guard keeps a case from being taken for a batch of another path.
    """
    if probe is not None:
        probe.explanations.start_pattern()
    groups: dict[Any, list[ObservedRecording]] = {}
    for o in observed:
        groups.setdefault(graph_signature(o.recording.graph), []).append(o)
    ways = sorted(groups.values(), key=len, reverse=True)
    reads = {id(o): o.recording.reads for o in observed}
    cases, problems = [], []
    if probe is not None and len(ways) > 1:
        _record_counted_rows(ways, probe)
    for group in ways:
        found, notes = _merge_or_split(group, probe)
        for case, members in found:
            if (problem := _find_fixed_size(case, members, observed)) is None:
                cases.append((case, members))
            else:
                problems.append(problem)
        problems += notes
    # A rank picks a case by its guards, so each case must reject every recording of the other cases. A case
    # without such a guard would compute something else for their batches without an error.
    for case, group in cases:
        strangers = [o for o in observed if all(o is not member for member in group)]
        if not all(_guard_rejects(case, reads[id(o)]) for o in strangers):
            raise (
                find_first_difference(ways)
                or GlueDiagnostic("forward takes different paths that no value it reads tells apart", "")
            ).to_error()
    if not cases:
        raise (problems[0] if len(ways) == 1 else find_first_difference(ways) or problems[0]).to_error()
    return [case for case, _ in cases], problems


def _record_counted_rows(ways: Sequence[Sequence[ObservedRecording]], probe: BatchProbe) -> None:
    """Keeps which rows values decide on one of several paths, so that they are counted on all of them."""
    for group in ways:
        if len(group) >= MIN_CAPTURES and any(map(_has_dynamic_shape, group[0].recording.graph.nodes)):
            with suppress(UnexplainedNumber):
                _CaptureMerger(group, probe).record_counted_rows()


def _merge_or_split(
    group: list[ObservedRecording], probe: BatchProbe | None
) -> tuple[list[tuple[GenericGraph, list[ObservedRecording]]], list[GlueDiagnostic]]:
    """Merges captures of one structure; if that leaves something unexplained, merges them separately by
    the values that Python read."""
    if len(group) < MIN_CAPTURES:
        place = next((n.meta["where"] for n in group[0].recording.graph.nodes if n.meta.get("where")), "")
        return [], [
            GlueDiagnostic(
                f"only {len(group)} of the captures took this path, too few to tell sizes from constants",
                place,
            )
        ]
    try:
        return [(merge_captures(group, probe), group)], []
    except UnexplainedNumber as error:
        problem = error.diagnostic
    # The ops are equal, yet sizes do not explain a number: a value that Python read may decide it. With each
    # such path by itself the value is constant, and a guard on it makes the case valid.
    parts: dict[Any, list[ObservedRecording]] = {}
    for o in group:
        parts.setdefault(path_signature(o.recording)[1], []).append(o)
    if len(parts) == 1:
        return [], [problem]
    results = [_merge_or_split(part, probe) for part in parts.values()]
    return [c for cases, _ in results for c in cases], [p for _, problems in results for p in problems]


def _find_fixed_size(
    case: GenericGraph, group: Sequence[ObservedRecording], observed: Sequence[ObservedRecording]
) -> GlueDiagnostic | None:
    """Returns why a case holds at one size only: its captures had the same number of rows by chance, which
    decides a number that Python reads. None for a case that holds at every size."""
    guard = next((g for g in case.guards if not isinstance(g.meta["read"][1], bool)), None)
    if guard is None:
        return None
    for name in group[0].sizes:
        if len({o.sizes[name] for o in group}) == 1 < len({o.sizes[name] for o in observed}):
            message = (
                f"all captures that took this path have {name} = {group[0].sizes[name]}, so sizes cannot be "
                "told from constants"
            )
            return GlueDiagnostic(message, guard.meta["where"])
    return None


class RowNames(Protocol):
    """Names the numbers of rows that values of the inputs decide."""

    def name_dim(self, label: str, dim: int) -> str:
        """Returns the symbol of a dim of a labelled tensor."""
        ...


def merge_captures(
    group: Sequence[ObservedRecording], probe: BatchProbe | None, names: RowNames | None = None
) -> GenericGraph:
    """Merges captures of one structure into one graph, with as many further recordings as its explanations
    need.

    names: for glue that is re-recorded. Raises GlueError if `names` are given, else UnexplainedNumber.
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
    recordings = list(group)
    if probe is not None:
        recordings += _probe_constant_widths(group, probe, is_generic=names is None)
    # Each round asks for one recording at a size where the present explanations could fail (`find_doubts`),
    # until all such sizes were asked for. Where padding leads to another path, as from full masks to others,
    # other samples are recorded, once.
    asked, has_other_samples = set[tuple[str, int]](), False
    for _ in range(_MAX_PROBES if probe is not None else 0):
        assert probe is not None
        doubts = _CaptureMerger(recordings, probe, names, is_probing=True).find_doubts()
        doubt = next((d for d in doubts if d not in asked), None)
        if doubt is None:
            break
        asked.add(doubt)
        extra = probe(*doubt)
        found = [] if extra is None else _keep_path(recordings, [extra])
        if not found and not has_other_samples:
            least = min(o.sizes[doubt[0]] for o in recordings)
            found = _keep_path(recordings, probe.record_other_widths(doubt[0], least))
            has_other_samples = True
        recordings += found
    merger = _CaptureMerger(recordings, probe, names)
    if probe is None:
        return merger.merge()
    more = list[ObservedRecording]()
    # A quotient fits few values easily by chance, so it is tested on samples that no fit has seen.
    if merger.uses_floor_division():
        ways = [path_signature(o.recording) for o in recordings]
        more += [o for o in probe.record_held_out() if path_signature(o.recording) in ways]
    # A few samples of each kind are often as many in each small batch.
    if _CaptureMerger([*recordings, *more], probe, names).picks_as_many_rows():
        more += _keep_path(recordings, probe.record_with_repeats([*recordings, *more]))
    # Masks that forward draws may pick equally many rows in a few micro-batches.
    if merger.picks_drawn_rows():
        more += _keep_path(recordings, probe.record_with_repeats([*recordings, *more]))
        more += _keep_path(recordings, probe.record_held_out())
    if more:
        recordings += more
        merger = _CaptureMerger(recordings, probe, names)
    # A count that values decide may be 0, where an op may behave differently. The recording without rows is
    # merged too if that is possible, so that explanations hold there as well.
    if merger.takes_data_symbols():
        for empty in probe.record_without_rows():
            if graph_signature(empty.recording.graph) == graph_signature(recordings[0].recording.graph):
                try:
                    return _CaptureMerger([*recordings, empty], probe, names).merge()
                except UnexplainedNumber:
                    continue  # without rows forward does something else
    return merger.merge()


def _keep_path(
    known: Sequence[ObservedRecording], others: Iterable[ObservedRecording]
) -> list[ObservedRecording]:
    """Returns those of other recordings that take the path of the known ones."""
    signature = graph_signature(known[0].recording.graph)
    return [o for o in others if graph_signature(o.recording.graph) == signature]


def _probe_constant_widths(
    group: Sequence[ObservedRecording], probe: BatchProbe, is_generic: bool
) -> list[ObservedRecording]:
    """Returns recordings with other widths, for widths that are equal in all captures, and for long ones
    that are nearly equal, as raw sounds are: whatever depends on them, if only by a large stride, would look
    constant. A path without padding is not that of padded micro-batches.

    Raises UnexplainedNumber, if the graph is to be generic, where micro-batches have other widths and none of
    them that was recorded takes the path, for another reason than this width.
    """

    found = list[ObservedRecording]()
    for name in sorted(probe.padded_symbols):
        shortest, longest = min(o.sizes[name] for o in group), max(o.sizes[name] for o in group)
        if shortest == longest:
            probed = [o for more in _PROBE_EXTRA_WIDTHS if (o := probe(name, longest + more)) is not None]
            if not (kept := _keep_path(group, probed)):
                probed += probe.record_other_widths(name, longest)
                kept = _keep_path(group, probed)
            if is_generic and not kept:  # the batches that are padded above may take another path
                sizes = product(group[:_PADDED_MEMBERS], _PROBE_EXTRA_WIDTHS)
                own = [probe.record_padded(o, name, longest + more) for o, more in sizes]
                kept = _keep_path(group, [o for o in own if o is not None])
            found += kept
            if is_generic and probed and not kept and not _decides_path(group[0], probed):
                place = next(
                    (n.meta["where"] for n in group[0].recording.graph.nodes if n.meta.get("where")), ""
                )
                message = (
                    f"all captures that took this path have {name} = {longest}, so sizes cannot be told from"
                    " constants"
                )
                raise UnexplainedNumber(GlueDiagnostic(message, place))
        elif shortest >= LONG_WIDTH and longest < 2 * shortest:
            found += _keep_path(group, (o for o in [probe(name, 2 * longest)] if o is not None))
    return found


def _decides_path(known: ObservedRecording, others: Sequence[ObservedRecording]) -> bool:
    """Whether each of the other recordings left the path of the known one where Python read a size."""

    def leaves_at_size(other: ObservedRecording) -> bool:
        pairs = zip(known.recording.reads, other.recording.reads, strict=False)
        first = next((a for a, b in pairs if (a.kind, a.value) != (b.kind, b.value)), None)
        return first is not None and first.kind == "size"

    return all(map(leaves_at_size, others))


def _guard_rejects(case: GenericGraph, reads: Sequence[Read]) -> bool:
    """Whether a guard of the case tells a recording with these reads from the case's own recordings."""
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
    """Merges captures of one structure. The result is the first capture's graph with its numbers
    explained."""

    def __init__(
        self,
        group: Sequence[ObservedRecording],
        probe: BatchProbe | None,
        names: RowNames | None = None,
        is_probing: bool = False,
    ) -> None:
        self._row_names, self._sample_shapes = names, [o.sample_shapes for o in group]
        self._explanations = probe.explanations if probe is not None else SharedExplanations()
        self._first_recording = group[0].recording
        self._graphs = [o.recording.graph for o in group]
        self._recordings = [o.recording for o in group]
        padded = probe.padded_symbols if probe is not None else ()
        self._padded_symbols = frozenset(padded)
        self._fitter = SizeFitter([o.sizes for o in group], padded, is_probing)
        self._data_names: list[str] = []
        self._dims: dict[fx.Node, tuple[Expr, ...]] = {}  # of nodes that are explained, of each graph's first
        self._data_numbers, self._real_symbols = DataNumbers(), dict[tuple[float, ...], Expr]()
        self._unused_reads: dict[
            str, UnexplainedNumber
        ] = {}  # symbols for values that Python read, which no number has been explained by

    def record_counted_rows(self) -> None:
        """Keeps the places of rows that values of the inputs decide. Changes nothing else."""
        _ = self._explained
        for source in self._data_numbers.sources.values():
            if source.dim is not None and _has_dynamic_shape(source.node):
                self._explanations.record_counted_rows(source.node)

    def find_doubts(self) -> list[tuple[str, int]]:
        """Returns symbols, each with a size of it at which an explanation might fail. Changes nothing."""
        _ = self._explained
        return self._fitter.doubts

    def uses_floor_division(self) -> bool:
        """Whether a floor division explains some number; a few values may match one by chance. Changes
        nothing."""
        _ = self._explained
        return self._fitter.used_division

    def picks_as_many_rows(self) -> bool:
        """Whether values of the inputs picked as many rows, and not none, in all recordings. Changes
        nothing."""
        for nodes in zip(*(g.nodes for g in self._graphs), strict=True):
            if any(map(_depends_on_inputs, _pick_inputs(nodes[0]))):
                counts = {n.meta["shape"][:1] for n in nodes if "shape" in n.meta}
                if len(counts) == 1 and counts.isdisjoint({(), (0,)}):
                    return True
        return False

    def picks_drawn_rows(self) -> bool:
        """Whether random numbers picked rows. Changes nothing."""
        return has_drawn_rows(self._graphs[0])

    def takes_data_symbols(self) -> bool:
        """Whether an op takes a number that values of the inputs decide, which might differ without rows.
        Changes nothing."""
        explained, _ = self._explained
        return any(
            self._data_numbers.accepts_tensor(n, meta.get("args", (None,)))
            and self._have_data_symbol(meta["args"][1:2])
            for n, meta in explained.items()
        )

    def _have_data_symbol(self, args: Sequence[Any]) -> bool:
        return any(isinstance(a, sympy.Expr) and bool(symbol_names(a) & set(self._data_names)) for a in args)

    def merge(self) -> GenericGraph:
        """Returns the merged graph. The first capture is used up."""
        explained, dropped = self._explained
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

    @cached_property
    def _explained(self) -> tuple[dict[fx.Node, dict[str, Any]], list[fx.Node]]:
        """Returns the explained meta of each node, and the reads that need no guard."""
        explained: dict[fx.Node, dict[str, Any]] = {}
        dropped: list[fx.Node] = []
        for order, read in enumerate(self._first_recording.reads):
            read.node.meta["order"] = order
        # Nodes are visited in the order of execution: a data symbol that one node introduces can explain the
        # numbers of later nodes, because `_fitter` has it from then on.
        for nodes in list(zip(*(g.nodes for g in self._graphs), strict=True)):
            if is_read_node(nodes[0]) and self._is_read_explained(nodes):
                dropped.append(nodes[0])
            else:
                explained[nodes[0]] = self._explain_node(nodes)
        # A value that Python read without an op that takes it may have decided anything else.
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
            meta["shape"] = self._dims[first] = self._explain_shape(first, [n.meta["shape"] for n in nodes])
        if "results" in first.meta:
            results = [n.meta["results"] for n in nodes]
            if len({len(r) for r in results}) > 1:
                message = f"the number of results of {first.target} differs between batches"
                raise _unexplained_number(first, message, [len(r) for r in results])
            meta["results"] = [
                r[0] | {"shape": self._explain_shape(first, [x["shape"] for x in r])}
                for r in zip(*results, strict=True)
            ]
        return meta

    def _check_data_symbols(self, node: fx.Node, *arguments: Any) -> None:
        """Checks that numbers in arguments are known from sizes alone before the op runs, or that a tensor
        can replace them."""
        numbers = [
            leaf
            for a in arguments
            for leaf in argument_template.CallArguments([a]).leaves()
            if isinstance(leaf, sympy.Expr)
        ]
        # A plan computes numbers from sizes, which are known before the forward; these are not. An op that
        # also accepts a tensor in place of the number gets the tensor that holds it; no other op can be
        # called.
        decided = set[str]().union(*(symbol_names(e) for e in numbers)) & set(self._data_names)
        if decided and self._data_numbers.accepts_tensor(node, arguments[0]):
            for name in decided:
                self._unused_reads.pop(name, None)
        elif decided:
            if unused := decided & self._unused_reads.keys():
                raise self._unused_reads[min(unused)]
            message = f"an argument of {node.target} is a number of rows that values of the inputs decide"
            raise _unexplained_number(node, message, ())

    def _explain_shape(self, node: fx.Node, shapes: list[tuple[int, ...]]) -> tuple[Expr, ...]:
        if picks_drawn_rows(node) and len(set(shapes)) == 1:
            message = "a mask that forward draws picks equally many rows in all captures, by chance"
            raise _unexplained_number(node, message, shapes)
        return tuple(self._explain_dim(node, i, dims) for i, dims in enumerate(zip(*shapes, strict=True)))

    def _explain_value(self, node: fx.Node, values: list[Any]) -> Any:
        """Returns one argument of all captures as one structure."""
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
            message = (
                f"a number in {node.target} differs between batches, "
                "and no expression over their sizes explains it; what collate() counts over its samples"
                " (num_items_in_batch) may be a tensor without dims, which then is a sum over the batch"
            )
            raise _unexplained_number(node, message, values)
        return int(expr) if isinstance(expr, sympy.Integer) else expr

    def _explain_integer(self, node: fx.Node, values: Sequence[int]) -> Expr | None:
        if len(set(values)) == 1:  # an expression of sizes that vary here would be constant by chance
            return sympy.Integer(values[0])
        return self._explanations.find_fitting(node, values, self._fitter) or self._fitter.fit_integer(values)

    def _explain_dim(self, node: fx.Node, dim: int, values: Sequence[int]) -> Expr:
        # 1. Sizes explain the dim. 2. It adds up over the samples: a symbol of its own, named by `RowNames`.
        # 3. Values decide it (re-recorded glue, an op with a dynamic shape): a data symbol of this graph.
        expr = self._find_inherited_rows(node, values) or self._explain_integer(node, values)
        names = symbol_names(expr) if expr is not None else set[str]()
        # What is left of the samples if other rows are picked is that of this path alone; a divisor is not.
        is_counted = self._explanations.has_counted_rows(node) and str(expr) not in self._data_names
        if expr is not None and names and (is_counted or self._fits_by_chance(node, expr)):
            return size_symbol(self._add_data_symbol(NumberSource(node, dim), values))
        if expr is not None:
            return expr
        if (name := self._name_rows(node, dim, values)) is not None:
            self._fitter = self._fitter.with_symbol(name, values)
        elif "label" in node.meta or _has_dynamic_shape(node):
            self._add_data_symbol(NumberSource(node, dim), values)
        else:
            made_by = node.args[0] if node.target is take_at_path else node.target
            message = (
                f"a dim of the result of {made_by} differs between batches, "
                "and no expression over their sizes explains it"
            )
            raise _unexplained_number(node, message, values)
        found = self._fitter.fit_integer(values)
        assert found is not None
        return found

    def _find_inherited_rows(self, node: fx.Node, values: Sequence[int]) -> Expr | None:
        """Returns the symbol of rows that values picked, if an operand has them and no other dim of this
        size: on some paths they are as many as the samples."""
        if not self._data_names or len(set(values)) == 1 or _has_dynamic_shape(node):
            return None
        block = node.args[0] if node.target is take_at_path else node
        operands = block.all_input_nodes if isinstance(block, fx.Node) else ()
        dims = dict.fromkeys(d for o in operands for d in self._dims.get(o, ()))
        alike = [d for d in dims if symbol_names(d) and self._fitter.evaluate_column(d) == tuple(values)]
        return alike[0] if len(alike) == 1 and str(alike[0]) in self._data_names else None

    def _divides_rows(self, found: Any) -> bool:
        """Whether an expression for a value that Python reads rounds a quotient of a number of rows, which no
        sum, and no maximum, over samples is: it fits these batches by chance."""
        floors = found.atoms(sympy.floor) if isinstance(found, sympy.Expr) and self._padded_symbols else ()
        return any(not symbol_names(f) <= self._padded_symbols for f in floors)

    def _fits_by_chance(self, node: fx.Node, expr: Expr) -> bool:
        """Whether an expression for the number of rows that values of the inputs pick fits these batches
        only: such a number adds up over samples, so it is linear in the numbers of rows, those that values
        pick among them."""
        masks = [i for i in _pick_inputs(node) if _depends_on_inputs(i)]
        rows = [size_symbol(n) for n in sorted(symbol_names(expr) - self._padded_symbols)]
        if not self._padded_symbols or not masks or not rows:
            return False
        return not expr.is_polynomial(*rows) or sympy.Poly(expr, *rows).total_degree() > 1

    def _name_rows(self, node: fx.Node, dim: int, values: Sequence[int]) -> str | None:
        """Returns the symbol of a size that values of the inputs decide and that is the sum over the
        samples; None for other sizes."""
        label = node.meta.get("label")
        if label is None or self._row_names is None:
            return None
        sums = [sum(part[label][dim] for part in parts if label in part) for parts in self._sample_shapes]
        return self._row_names.name_dim(label, dim) if sums == list(values) else None

    def _add_data_symbol(self, source: NumberSource, values: Sequence[float]) -> str:
        """Adds a symbol for a number that values of the inputs decide; returns its name."""
        name = f"{DATA_SYMBOL_PREFIX}{len(self._data_names)}"
        self._data_names.append(name)
        self._data_numbers.sources[name] = source
        if all(float(v).is_integer() for v in values):
            self._fitter = self._fitter.with_symbol(name, [int(v) for v in values])
        else:
            self._real_symbols[tuple(values)] = size_symbol(name)
        return name

    def _is_read_explained(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether a read needs no guard: sizes explain it, or it was seen both true and false and changed
        nothing.

        A value that never changed is a guard. One that changed and is not explained raises
        UnexplainedNumber.
        """
        values = [n.meta["read"][1] for n in nodes]
        if _reads_list_sizes(nodes[0]):
            return True  # what is done with its tensors has numbers of its own
        if all(v == values[0] for v in values):
            return not _depends_on_inputs(nodes[0])
        # Both outcomes led to the same ops and explainable numbers, so the value decided nothing.
        if all(isinstance(v, bool) for v in values) or nodes[0].meta["read"][0] == "size":
            return True
        try:
            if self._divides_rows(self._explain_value(nodes[0], values)):
                raise ValueError
        except (UnexplainedNumber, ValueError):
            kind = nodes[0].meta["read"][0]
            problem = _unexplained_number(
                nodes[0], f"Python reads a value ({kind}) of the inputs that sizes do not explain", values
            )
            # Python may pass a number that it took out of a tensor to an op. So the number gets a symbol, and
            # the problem is raised at the end unless an op takes that (`_check_data_symbols`).
            if kind != "item":
                raise problem from None
            read = nodes[0].args[0]
            assert isinstance(read, fx.Node)
            self._unused_reads[self._add_data_symbol(NumberSource(read, None), values)] = problem
        return True

    def _explain_constant(self, nodes: Sequence[fx.Node]) -> dict[str, Any]:
        """Explains a tensor made from Python data: equal in all captures, filled with a size, or a range
        of a size."""
        node = nodes[0]
        tensors = [r.constants[str(n.target)] for r, n in zip(self._recordings, nodes, strict=True)]
        if all(t.shape == tensors[0].shape and torch.equal(t, tensors[0]) for t in tensors):
            shape = tuple(sympy.Integer(s) for s in tensors[0].shape)
            return {"args": (), "kwargs": {}, "shape": shape}
        shape = self._explain_shape(node, [tuple(t.shape) for t in tensors])
        explained = self._constant_as_full(node, tensors, shape) or self._constant_as_arange(node, tensors)
        if explained is None:
            user = next(iter(node.users), node)
            raise _unexplained_number(
                user, "a tensor made of Python data changes with the batch", [t.tolist() for t in tensors]
            )
        target, args = explained
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
    """Returns the arguments; in a reshape, one size that values of the inputs decide is left to torch as
    -1."""
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
        n.op == "placeholder"
        and str(n.target).endswith((f"{KEY_SEPARATOR}{SIZES_SUFFIX}", f"{KEY_SEPARATOR}{COUNTS_SUFFIX}"))
        for n in node.all_input_nodes
    )


def _pick_inputs(node: fx.Node) -> Sequence[fx.Node]:
    """Returns what decides how many rows an op picks: masks; nothing for ops that pick none."""
    if not _has_dynamic_shape(node):
        return ()
    indices: Any = node.args[1] if node.target is torch.ops.aten.index.Tensor else node.args[-1:]
    return [i for i in indices if isinstance(i, fx.Node)]


def _has_dynamic_shape(node: fx.Node) -> bool:
    """Whether values of an op's inputs decide its shape."""
    source = node.args[0] if node.target is operator.getitem else node
    target = source.target if isinstance(source, fx.Node) else None
    return isinstance(target, OpOverload) and torch.Tag.dynamic_output_shape in target.tags
