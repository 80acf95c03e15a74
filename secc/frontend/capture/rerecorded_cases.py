"""Cases whose glue is recorded anew for each micro-batch, because values of the inputs decide its ops.

Such a case has the blocks and the loss of the captures; a tensor that glue makes for a block is one op,
`recorded`. A dim of such a tensor, or of a block's result, that no size explains is a number of rows that
values decide: a symbol of its own if the rows of a batch are the sum of its samples' (each recorded alone),
which edges can carry.
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
from secc.runtime.recorder.loss_loops import roll_loss_loops
from secc.runtime.recorder.match_outline import find_outline_mismatch, node_kind
from secc.runtime.recorder.outline import Outline
from secc.runtime.recorder.recording import Recording


@dataclass
class RowSymbols:
    """The symbols of numbers of rows that values decide, in all cases: (label of the tensor, dim) of each
    name."""

    taken_names: set[str]
    name_by_dim: dict[tuple[str, int], str] = field(default_factory=dict)

    def name_dim(self, label: str, dim: int) -> str:
        """The symbol of a dim of a labelled tensor."""
        if (label, dim) not in self.name_by_dim:
            path = label.split()[1] if label.startswith("result ") else label.partition(":")[0]
            wish = f"n_{to_identifier(shortest_tail(path.partition('#')[0], ()))}"
            self.name_by_dim[label, dim] = make_unique(
                wish, self.taken_names | set(self.name_by_dim.values())
            )
        return self.name_by_dim[label, dim]

    def sizes_from_shapes(self, shapes: LabelledShapes) -> dict[str, int]:
        """The symbols of a recording; a tensor that it does not have has no rows."""
        return {
            name: shapes[label][dim] if label in shapes else 0
            for (label, dim), name in self.name_by_dim.items()
        }

    def plan_symbols(self) -> tuple[schema.Symbol, ...]:
        """The symbols as a plan declares them; `key` is the label of the tensor that a recording gives."""
        return tuple(
            schema.Symbol(name, "rows", label, dim) for (label, dim), name in self.name_by_dim.items()
        )


class OutlinedCaptures:
    """The outlines of one pattern's captures, with `loops` those of losses that are summed over samples. Make
    them before the captures are merged, which uses one up."""

    def __init__(self, observed: Sequence[ObservedRecording], loops: bool = False) -> None:
        self._make_outline = _outline_with_loops if loops else Outline.of_recording
        outlines = [self._make_outline(o.recording) for o in observed]
        if loops and not all(f"{schema.LOOP_LABEL_PREFIX}0" in o.labelled_tensors for o in outlines):
            raise GlueError("", "the loss has no loop over samples")
        self._sources_by_label = _union_sources(o.sources_by_label() for o in outlines)
        self._labelled_shapes = [o.known_shapes() for o in outlines]
        self._outlined = [
            replace(seen, recording=o.make_skeleton(self._sources_by_label))
            for seen, o in zip(observed, outlines, strict=True)
        ]

    def build_case(self, rows: RowSymbols, probe: BatchProbe) -> GenericGraph:
        """The one case of all captures. Raises GlueError where blocks or the loss differ in a way that no
        size explains."""
        groups = self._group_by_blocks()
        if len(groups) > 1:
            problem = find_first_difference(
                [[self._outlined[i] for i in g] for g in groups]
            ) or GlueDiagnostic("the blocks change with the batch", "")
            raise problem.to_error()
        return self._merge_group(groups[0], rows, probe)

    def build_cases_by_path(self, rows: RowSymbols, probe: BatchProbe) -> list[GenericGraph]:
        """A case for each way in which blocks are called, where enough captures took it."""
        found: list[GenericGraph] = []
        for group in self._group_by_blocks():
            with suppress(GlueError):
                found += [self._merge_group(group, rows, probe)] if len(group) >= MIN_CAPTURES else []
        return found

    def check_other_batches(
        self, found: GenericGraph, others: Iterable[ObservedRecording], rows: RowSymbols
    ) -> None:
        """Raise GlueError for other micro-batches that do not go the way of a case: of one sample, which a
        loop may leave as it is."""
        nodes = outline_nodes(found)
        for other in others:
            outline = self._make_outline(other.recording)
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
        found = merge_captures(
            [self._outlined[i] for i in group],
            _OutlineProbe(probe, self._sources_by_label, self._make_outline),
            rows,
        )
        nodes = outline_nodes(found)
        for i in group[1:]:  # the first is used up
            problem = find_outline_mismatch(
                self._outlined[i].recording,
                nodes,
                {**self._outlined[i].sizes, **rows.sizes_from_shapes(self._labelled_shapes[i])},
            )
            if problem is not None:
                raise GlueError("", problem.message, problem.where)
        return found


class _OutlineProbe:
    """Further captures as outlines."""

    def __init__(
        self, probe: BatchProbe, sources: Mapping[str, Sequence[str]], outline: Callable[[Recording], Outline]
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
            else replace(
                found, recording=self._make_outline(found.recording).make_skeleton(self._sources_by_label)
            )
        )

    def record_held_out(self) -> Iterator[ObservedRecording]:
        """As outlines too."""
        for found in self._probe.record_held_out():
            yield replace(
                found, recording=self._make_outline(found.recording).make_skeleton(self._sources_by_label)
            )

    def record_without_rows(self) -> Iterator[ObservedRecording]:
        """None: what is counted is recorded anew."""
        yield from ()


def _outline_with_loops(recording: Recording) -> Outline:
    """An outline in which what loops over samples add to the loss is recorded anew."""
    return Outline.of_recording(roll_loss_loops(recording))


def _union_sources(found: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """What each labelled tensor is made from in any capture."""
    union: dict[str, dict[str, None]] = {}
    for one in found:
        for label, sources in one.items():
            union.setdefault(label, {}).update(dict.fromkeys(sources))
    return {label: list(sources) for label, sources in union.items()}


def add_row_symbols(
    inputs: ModelInputs, rows: RowSymbols, survey: DatasetSurvey, alone: Callable[[Sample], LabelledShapes]
) -> ModelInputs:
    """The inputs with the symbols of rows that values decide. `alone` gives a sample's labelled shapes.

    Of samples that the survey did not keep, the mean of those with the same pattern stands for the number.
    """
    if not rows.name_by_dim:
        return inputs
    known = {
        i: rows.sizes_from_shapes(alone(d.sample))
        for i, d in enumerate(survey.drawn_samples)
        if d.sample is not None
    }
    sizes: list[Mapping[str, int]] = []
    for i, (d, own) in enumerate(zip(survey.drawn_samples, inputs.sample_sizes, strict=True)):
        alike = [
            known[j]
            for j, other in enumerate(survey.drawn_samples)
            if j in known and other.pattern == d.pattern
        ]
        mean = {n: round(sum(one[n] for one in alike) / len(alike)) for n in rows.name_by_dim.values()}
        sizes.append({**own, **known.get(i, mean)})
    return replace(inputs, symbols=(*inputs.symbols, *rows.plan_symbols()), sample_sizes=tuple(sizes))


def outline_nodes(generic: GenericGraph) -> tuple[dict[str, Any], ...]:
    """The outline of a case as plain data for `plan.json`, with sizes as expressions; see
    `secc.runtime.recorder.match_outline`."""
    number = {n: i for i, n in enumerate(generic.graph.nodes)}
    return tuple(_node_to_data(n, number, generic.data_symbols) for n in generic.graph.nodes)


def _node_to_data(node: fx.Node, number: Mapping[fx.Node, int], data: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": node_kind(node)}
    if node.op == "output":
        return found | {"args": _value_to_data(list(node.args), number), "kwargs": {}}
    if node.op in ("placeholder", "get_attr"):
        return found
    if "label" in node.meta:
        found["shape"] = [
            None if size_expr.symbol_names(d) & set(data) else size_expr.format_expr(d)
            for d in node.meta["shape"]
        ]
    if found["kind"][0] == "recorded":
        return found | {
            "sources": [number[a] for a in node.args[1:] if isinstance(a, fx.Node)],
            "where": node.meta["where"],
        }
    args = node.meta["args"][:1] if found["kind"][0] == "result" else node.meta["args"]
    made = {"made": True} if node.meta.get("made") else {}
    return (
        found
        | made
        | {"args": _value_to_data(list(args), number), "kwargs": _value_to_data(node.meta["kwargs"], number)}
    )


def _value_to_data(value: Any, number: Mapping[fx.Node, int]) -> Any:
    recurse: Callable[[Any], Any] = lambda v: _value_to_data(v, number)
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
        case _:
            return value
