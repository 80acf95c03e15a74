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
    Diagnostic,
    GlueError,
    Observed,
    Shapes,
    difference,
    signature,
)
from secc.frontend.capture.generalize import FEWEST, Generic, Probe, merged
from secc.frontend.dataset.input_symbols import Inputs
from secc.frontend.dataset.survey import Sample, Survey
from secc.ir.dialect import size_expr
from secc.ir.dialect.readable_names import identifier, tail, unique
from secc.runtime.plan import schema
from secc.runtime.recorder.loss_loops import rolled
from secc.runtime.recorder.match_outline import kind, mismatch
from secc.runtime.recorder.outline import Outline
from secc.runtime.recorder.recording import Recording


@dataclass
class Rows:
    """The symbols of numbers of rows that values decide, in all cases: (label of the tensor, dim) of each
    name."""

    taken: set[str]
    names: dict[tuple[str, int], str] = field(default_factory=dict)

    def name(self, label: str, dim: int) -> str:
        """The symbol of a dim of a labelled tensor."""
        if (label, dim) not in self.names:
            path = label.split()[1] if label.startswith("result ") else label.partition(":")[0]
            wish = f"n_{identifier(tail(path.partition('#')[0], ()))}"
            self.names[label, dim] = unique(wish, self.taken | set(self.names.values()))
        return self.names[label, dim]

    def of(self, shapes: Shapes) -> dict[str, int]:
        """The symbols of a recording; a tensor that it does not have has no rows."""
        return {
            name: shapes[label][dim] if label in shapes else 0 for (label, dim), name in self.names.items()
        }

    def symbols(self) -> tuple[schema.Symbol, ...]:
        """The symbols as a plan declares them; `key` is the label of the tensor that a recording gives."""
        return tuple(schema.Symbol(name, "rows", label, dim) for (label, dim), name in self.names.items())


class Outlines:
    """The outlines of one pattern's captures, with `loops` those of losses that are summed over samples. Make
    them before the captures are merged, which uses one up."""

    def __init__(self, observed: Sequence[Observed], loops: bool = False) -> None:
        self._outline = _with_loops if loops else Outline.of
        outlines = [self._outline(o.recording) for o in observed]
        if loops and not all(f"{schema.LOOP}0" in o.made for o in outlines):
            raise GlueError("", "the loss has no loop over samples")
        self._sources = _union(o.sources() for o in outlines)
        self._shapes = [o.shapes() for o in outlines]
        self._seen = [
            replace(seen, recording=o.skeleton(self._sources))
            for seen, o in zip(observed, outlines, strict=True)
        ]

    def case(self, rows: Rows, probe: Probe) -> Generic:
        """The one case of all captures. Raises GlueError where blocks or the loss differ in a way that no
        size explains."""
        groups = self._groups()
        if len(groups) > 1:
            problem = difference([[self._seen[i] for i in g] for g in groups]) or Diagnostic(
                "the blocks change with the batch", ""
            )
            raise problem.error()
        return self._merged(groups[0], rows, probe)

    def cases(self, rows: Rows, probe: Probe) -> list[Generic]:
        """A case for each way in which blocks are called, where enough captures took it."""
        found: list[Generic] = []
        for group in self._groups():
            with suppress(GlueError):
                found += [self._merged(group, rows, probe)] if len(group) >= FEWEST else []
        return found

    def check(self, found: Generic, others: Iterable[Observed], rows: Rows) -> None:
        """Raise GlueError for other micro-batches that do not go the way of a case: of one sample, which a
        loop may leave as it is."""
        nodes = outline_nodes(found)
        for other in others:
            outline = self._outline(other.recording)
            sizes = {**other.sizes, **rows.of(outline.shapes())}
            problem = mismatch(outline.skeleton(self._sources), nodes, sizes)
            if problem is not None:
                raise GlueError("", problem.message, problem.where)

    def _groups(self) -> list[list[int]]:
        groups: dict[Any, list[int]] = {}
        for i, o in enumerate(self._seen):
            groups.setdefault(signature(o.recording.graph), []).append(i)
        return sorted(groups.values(), key=len, reverse=True)

    def _merged(self, group: Sequence[int], rows: Rows, probe: Probe) -> Generic:
        found = merged([self._seen[i] for i in group], _Outlined(probe, self._sources, self._outline), rows)
        nodes = outline_nodes(found)
        for i in group[1:]:  # the first is used up
            problem = mismatch(
                self._seen[i].recording, nodes, {**self._seen[i].sizes, **rows.of(self._shapes[i])}
            )
            if problem is not None:
                raise GlueError("", problem.message, problem.where)
        return found


class _Outlined:
    """Further captures as outlines."""

    def __init__(
        self, probe: Probe, sources: Mapping[str, Sequence[str]], outline: Callable[[Recording], Outline]
    ) -> None:
        self._probe, self._sources, self._outline, self.free, self.known = (
            probe,
            sources,
            outline,
            probe.free,
            probe.known,
        )

    def __call__(self, name: str, size: int) -> Observed | None:
        found = self._probe(name, size)
        return (
            None
            if found is None
            else replace(found, recording=self._outline(found.recording).skeleton(self._sources))
        )

    def held_out(self) -> Iterator[Observed]:
        """As outlines too."""
        for found in self._probe.held_out():
            yield replace(found, recording=self._outline(found.recording).skeleton(self._sources))

    def empty(self) -> Iterator[Observed]:
        """None: what is counted is recorded anew."""
        yield from ()


def _with_loops(recording: Recording) -> Outline:
    """An outline in which what loops over samples add to the loss is recorded anew."""
    return Outline.of(rolled(recording))


def _union(found: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """What each labelled tensor is made from in any capture."""
    union: dict[str, dict[str, None]] = {}
    for one in found:
        for label, sources in one.items():
            union.setdefault(label, {}).update(dict.fromkeys(sources))
    return {label: list(sources) for label, sources in union.items()}


def counted(inputs: Inputs, rows: Rows, survey: Survey, alone: Callable[[Sample], Shapes]) -> Inputs:
    """The inputs with the symbols of rows that values decide. `alone` gives a sample's labelled shapes.

    Of samples that the survey did not keep, the mean of those with the same pattern stands for the number.
    """
    if not rows.names:
        return inputs
    known = {i: rows.of(alone(d.sample)) for i, d in enumerate(survey.drawn) if d.sample is not None}
    sizes: list[Mapping[str, int]] = []
    for i, (d, own) in enumerate(zip(survey.drawn, inputs.sizes, strict=True)):
        alike = [
            known[j] for j, other in enumerate(survey.drawn) if j in known and other.pattern == d.pattern
        ]
        mean = {n: round(sum(one[n] for one in alike) / len(alike)) for n in rows.names.values()}
        sizes.append({**own, **known.get(i, mean)})
    return replace(inputs, symbols=(*inputs.symbols, *rows.symbols()), sizes=tuple(sizes))


def outline_nodes(generic: Generic) -> tuple[dict[str, Any], ...]:
    """The outline of a case as plain data for `plan.json`, with sizes as expressions; see
    `secc.runtime.recorder.match_outline`."""
    number = {n: i for i, n in enumerate(generic.graph.nodes)}
    return tuple(_node(n, number, generic.data) for n in generic.graph.nodes)


def _node(node: fx.Node, number: Mapping[fx.Node, int], data: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind(node)}
    if node.op == "output":
        return found | {"args": _data(list(node.args), number), "kwargs": {}}
    if node.op in ("placeholder", "get_attr"):
        return found
    if "label" in node.meta:
        found["shape"] = [
            None if size_expr.symbols(d) & set(data) else size_expr.text(d) for d in node.meta["shape"]
        ]
    if found["kind"][0] == "recorded":
        return found | {
            "sources": [number[a] for a in node.args[1:] if isinstance(a, fx.Node)],
            "where": node.meta["where"],
        }
    args = node.meta["args"][:1] if found["kind"][0] == "result" else node.meta["args"]
    made = {"made": True} if node.meta.get("made") else {}
    return found | made | {"args": _data(list(args), number), "kwargs": _data(node.meta["kwargs"], number)}


def _data(value: Any, number: Mapping[fx.Node, int]) -> Any:
    recurse: Callable[[Any], Any] = lambda v: _data(v, number)  # noqa: E731
    match value:
        case fx.Node():
            return {"node": number[value]}
        case sympy.Expr():
            whole, over = sympy.fraction(value) if not value.has(sympy.floor) else (value, sympy.Integer(1))
            return {"size": size_expr.text(whole)} | ({"over": size_expr.text(over)} if over != 1 else {})
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
