"""Cases with glue that is re-recorded for each micro-batch, because values of the inputs decide its ops.

Such a case has the blocks and the loss of the captures; a tensor that glue makes for a block is one op,
`recorded`. A dim of such a tensor, or of a block's result, that no size explains is a number of rows that
values decide. It becomes a symbol of its own if the rows of a batch are the sum over its samples recorded
alone; section edges can carry such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from secc.frontend.capture.control_flow_paths import (
    GlueDiagnostic,
    GlueError,
    LabelledShapes,
    ObservedRecording,
    find_first_difference,
    graph_signature,
)
from secc.frontend.capture.generalize import MIN_CAPTURES, BatchProbe, GenericGraph, merge_captures
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey, Sample
from secc.ir.dialect import size_expr
from secc.ir.dialect.readable_names import make_unique, shortest_tail, to_identifier
from secc.runtime.plan import schema
from secc.runtime.plan.json_shapes import MAX_NUMBER
from secc.runtime.recorder.loss_loops import roll_loss_loops
from secc.runtime.recorder.match_outline import find_outline_mismatch, node_kind
from secc.runtime.recorder.outline import Outline


@dataclass
class RowSymbols:
    """Symbols of numbers of rows that values decide, over all cases: the name of each (label of the
    tensor, dim)."""

    taken_names: set[str]
    name_by_dim: dict[tuple[str, int], str] = field(default_factory=dict)

    def name_dim(self, label: str, dim: int) -> str:
        """Returns the symbol of a dim of a labelled tensor."""
        if (label, dim) not in self.name_by_dim:
            path = label.split()[1] if label.startswith("result ") else label.partition(":")[0]
            wish = f"n_{to_identifier(shortest_tail(path.partition('#')[0], ()))}"
            self.name_by_dim[label, dim] = make_unique(
                wish, self.taken_names | set(self.name_by_dim.values())
            )
        return self.name_by_dim[label, dim]

    def sizes_from_shapes(self, shapes: LabelledShapes) -> dict[str, int]:
        """Returns the symbol values of a recording; a tensor that it does not have has no rows."""
        return {
            name: shapes[label][dim] if label in shapes else 0
            for (label, dim), name in self.name_by_dim.items()
        }

    def plan_symbols(self) -> tuple[schema.Symbol, ...]:
        """Returns the symbols as a plan declares them; `key` is the label of the tensor that a recording
        gives."""
        return tuple(
            schema.Symbol(name, "rows", label, dim) for (label, dim), name in self.name_by_dim.items()
        )


class OutlinedCaptures:
    """Outlines of one pattern's captures; with `loops`, of losses summed in loops over samples.

    Create it before the captures are merged, which uses one of them up.
    """

    def __init__(self, observed: Sequence[ObservedRecording], loops: bool = False) -> None:
        self._make_outline = _outline_with_loops if loops else _outline
        outlines = [self._make_outline(o) for o in observed]
        if loops and not all(f"{schema.LOOP_LABEL_PREFIX}0" in o.labelled_tensors for o in outlines):
            raise GlueError("", "the loss has no loop over samples")
        self._sources_by_label = _union_sources(o.sources_by_label() for o in outlines)
        self._labelled_shapes = [o.known_shapes() for o in outlines]
        self._outlined = [
            replace(seen, recording=o.make_skeleton(self._sources_by_label))
            for seen, o in zip(observed, outlines, strict=True)
        ]

    def build_case(self, rows: RowSymbols, probe: BatchProbe) -> GenericGraph:
        """Returns the one case of all captures. Raises GlueError if blocks or the loss differ in a way
        that no size explains."""
        groups = self._group_by_blocks()
        if len(groups) > 1:
            problem = find_first_difference(
                [[self._outlined[i] for i in g] for g in groups]
            ) or GlueDiagnostic("the blocks change with the batch", "")
            raise problem.to_error()
        return self._merge_group(groups[0], rows, probe)

    def build_cases_by_path(self, rows: RowSymbols, probe: BatchProbe) -> list[GenericGraph]:
        """Returns a case for each way in which blocks are called, if enough captures took it."""
        cases: list[GenericGraph] = []
        for group in self._group_by_blocks():
            with suppress(GlueError):
                cases += [self._merge_group(group, rows, probe)] if len(group) >= MIN_CAPTURES else []
        return cases

    def check_other_batches(
        self, case: GenericGraph, others: Iterable[ObservedRecording], rows: RowSymbols
    ) -> None:
        """Raises GlueError if other micro-batches do not fit a case; those of one sample may skip a loop."""
        nodes = outline_nodes(case)
        for other in others:
            outline = self._make_outline(other)
            sizes = {**other.sizes, **rows.sizes_from_shapes(outline.known_shapes())}
            problem = find_outline_mismatch(outline.make_skeleton(self._sources_by_label), nodes, sizes)
            if problem is not None:
                raise GlueError("", problem.message, problem.where)

    def _group_by_blocks(self) -> list[list[int]]:
        groups: dict[Any, list[int]] = {}
        for i, o in enumerate(self._outlined):
            groups.setdefault(graph_signature(o.recording.graph), []).append(i)
        return sorted(groups.values(), key=len, reverse=True)

    def _merge_group(self, group: Sequence[int], rows: RowSymbols, probe: BatchProbe) -> GenericGraph:
        case = merge_captures(
            [self._outlined[i] for i in group],
            _OutlineProbe(probe, self._sources_by_label, self._make_outline),
            rows,
        )
        nodes = outline_nodes(case)
        for i in group[1:]:  # the first is used up
            problem = find_outline_mismatch(
                self._outlined[i].recording,
                nodes,
                {**self._outlined[i].sizes, **rows.sizes_from_shapes(self._labelled_shapes[i])},
            )
            if problem is not None:
                raise GlueError("", problem.message, problem.where)
        return case


class _OutlineProbe:
    """A `BatchProbe` that gives its recordings as outlines."""

    def __init__(
        self,
        probe: BatchProbe,
        sources: Mapping[str, Sequence[str]],
        outline: Callable[[ObservedRecording], Outline],
    ) -> None:
        self._probe, self._sources_by_label, self._make_outline, self.padded_symbols, self.explanations = (
            probe,
            sources,
            outline,
            probe.padded_symbols,
            probe.explanations,
        )

    def __call__(self, name: str, size: int) -> ObservedRecording | None:
        found = self._probe(name, size)
        return (
            None
            if found is None
            else replace(found, recording=self._make_outline(found).make_skeleton(self._sources_by_label))
        )

    def record_padded(self, known: ObservedRecording, name: str, size: int) -> ObservedRecording | None:
        """Returns nothing: only the recordings that `probe(name, size)` gives are compared."""
        return None

    def record_other_widths(self, name: str, size: int) -> Iterator[ObservedRecording]:
        """Yields nothing: numbers that look constant are re-recorded."""
        yield from ()

    def record_held_out(self) -> Iterator[ObservedRecording]:
        """Yields outlines of held-out micro-batches."""
        for recording in self._probe.record_held_out():
            yield replace(
                recording,
                recording=self._make_outline(recording).make_skeleton(self._sources_by_label),
            )

    def record_with_repeats(self, recordings: Sequence[ObservedRecording]) -> Iterator[ObservedRecording]:
        """Yields nothing: numbers that values decide are re-recorded."""
        yield from ()

    def record_without_rows(self) -> Iterator[ObservedRecording]:
        """Yields nothing: numbers that values decide are re-recorded."""
        yield from ()


def _outline(observed: ObservedRecording) -> Outline:
    return Outline.of_recording(observed.recording)


def _outline_with_loops(observed: ObservedRecording) -> Outline:
    """Returns an outline in which the terms that loops over samples add to the loss are re-recorded, and what
    joins parts of samples for it."""
    return Outline.of_recording(roll_loss_loops(observed.recording, observed.sizes["B"] == 1))


def _union_sources(sources_of_captures: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Returns what each labelled tensor is made from in any capture."""
    union: dict[str, dict[str, None]] = {}
    for one in sources_of_captures:
        for label, sources in one.items():
            union.setdefault(label, {}).update(dict.fromkeys(sources))
    return {label: list(sources) for label, sources in union.items()}


def add_row_symbols(
    inputs: ModelInputs,
    rows: RowSymbols,
    survey: DatasetSurvey,
    record_shapes: Callable[[Sample], LabelledShapes],
) -> ModelInputs:
    """Adds the symbols of rows that values decide to the inputs.

    record_shapes: labelled shapes of a sample recorded alone. A sample that the survey did not keep gets
    the mean of the kept ones of its pattern.
    """
    if not rows.name_by_dim:
        return inputs
    known_sizes = {
        i: rows.sizes_from_shapes(record_shapes(d.sample))
        for i, d in enumerate(survey.drawn_samples)
        if d.sample is not None
    }
    sizes: list[Mapping[str, int]] = []
    for i, (d, own_sizes) in enumerate(zip(survey.drawn_samples, inputs.sample_sizes, strict=True)):
        same_pattern = [
            known_sizes[j]
            for j, other in enumerate(survey.drawn_samples)
            if j in known_sizes and other.pattern == d.pattern
        ]
        mean = {
            n: round(sum(one[n] for one in same_pattern) / len(same_pattern))
            for n in rows.name_by_dim.values()
        }
        sizes.append({**own_sizes, **known_sizes.get(i, mean)})
    return replace(inputs, symbols=(*inputs.symbols, *rows.plan_symbols()), sample_sizes=tuple(sizes))


def outline_nodes(generic: GenericGraph) -> tuple[dict[str, Any], ...]:
    """Returns the outline of a case as plain data for plan.json, with sizes as expressions; see
    `secc.runtime.recorder`."""
    number = {n: i for i, n in enumerate(generic.graph.nodes)}
    return tuple(_node_to_data(n, number, generic.data_symbols) for n in generic.graph.nodes)


def _node_to_data(node: fx.Node, number: Mapping[fx.Node, int], data: Collection[str]) -> dict[str, Any]:
    data_of_node: dict[str, Any] = {"kind": node_kind(node)}
    if "log" in node.meta:
        data_of_node["log"] = list(node.meta["log"])
    if node.op == "output":
        return data_of_node | {"args": _value_to_data(list(node.args), number), "kwargs": {}}
    if node.op in ("placeholder", "get_attr"):
        return data_of_node
    if "label" in node.meta:
        data_of_node["shape"] = [
            None if size_expr.symbol_names(d) & set(data) else size_expr.format_expr(d)
            for d in node.meta["shape"]
        ]
    if data_of_node["kind"][0] == "recorded":
        return data_of_node | {
            "sources": [number[a] for a in node.args[1:] if isinstance(a, fx.Node)],
            "where": node.meta["where"],
        }
    args = node.meta["args"][:1] if data_of_node["kind"][0] == "result" else node.meta["args"]
    computed = {"made": True} if node.meta.get("made") else {}
    return (
        data_of_node
        | computed
        | {"args": _value_to_data(list(args), number), "kwargs": _value_to_data(node.meta["kwargs"], number)}
    )


def _value_to_data(value: Any, number: Mapping[fx.Node, int]) -> Any:
    def recurse(v: Any) -> Any:
        return _value_to_data(v, number)

    match value:
        case fx.Node():
            return {"node": number[value]}
        case sympy.Expr():
            whole, over = sympy.fraction(value) if not value.has(sympy.floor) else (value, sympy.Integer(1))
            return {"size": size_expr.format_expr(whole)} | (
                {"over": size_expr.format_expr(over)} if over != 1 else {}
            )
        case list() | tuple():
            return [recurse(v) for v in value]
        case dict():
            return {k: recurse(v) for k, v in value.items()}
        case slice():
            return {"slice": [recurse(v) for v in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.device() | torch.memory_format() | torch.layout():
            return {"name": str(value)}
        case float() if not abs(value) <= MAX_NUMBER:  # as masks have
            return {"float": str(value)}
        case _:
            return value
