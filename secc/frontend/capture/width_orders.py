"""Lets Python's comparisons of two input widths decide between captured paths.

`pad(x, n) if x.shape[1] < n else x` compares plain numbers, which no op records. Where the wider of two
widths decides which ops forward runs, every recording gets a read of `width < other width`, made from the
inputs, so that a case has it as a guard and a rank takes the case of its micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import fx

from secc.frontend.capture.control_flow_paths import ObservedRecording, graph_signature
from secc.runtime.plan.schema import Symbol

aten = torch.ops.aten
WidthPair = tuple[Symbol, Symbol]


def find_deciding_pairs(
    recordings: Sequence[ObservedRecording], pairs: Iterable[WidthPair]
) -> list[WidthPair]:
    """Returns the pairs of widths with an order that separates paths which no value read tells apart."""
    orders_of_path = dict[tuple[Any, Any], list[ObservedRecording]]()
    for o in recordings:
        conditions = tuple(r.value for r in o.recording.reads if isinstance(r.value, bool))
        orders_of_path.setdefault((conditions, graph_signature(o.recording.graph)), []).append(o)
    paths_of_conditions = defaultdict[Any, list[list[ObservedRecording]]](list)
    for (conditions, _), group in orders_of_path.items():
        paths_of_conditions[conditions].append(group)

    def orders(group: Sequence[ObservedRecording], pair: WidthPair) -> set[int]:
        a, b = (symbol.name for symbol in pair)
        return {(o.sizes[a] > o.sizes[b]) - (o.sizes[a] < o.sizes[b]) for o in group}

    return [
        pair
        for pair in pairs
        if any(
            orders(first, pair).isdisjoint(orders(second, pair))
            for paths in paths_of_conditions.values()
            for first, second in combinations(paths, 2)
        )
    ]


def read_orders(observed: ObservedRecording, pairs: Iterable[WidthPair]) -> ObservedRecording:
    """Returns the recording with reads of `a < b` and `b < a` for each pair of widths, ahead of its ops."""
    recording = observed.recording
    present = [p for p in pairs if all(s.key in recording.inputs for s in p)]
    if not present:
        return observed
    copied = recording.copy()
    graph, inputs = copied.graph, copied.inputs
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for pair in present:
        for a, b in (pair, pair[::-1]):
            with graph.inserting_before(first):
                _add_read(graph, inputs, a, b)
    return replace(observed, recording=copied)


def _add_read(graph: fx.Graph, inputs: dict[str, fx.Node], a: Symbol, b: Symbol) -> None:
    """Adds a read of `a < b`. Widths are counted as entries: as numbers, two that are equal in all recordings
    of a path would be explained by one symbol."""

    def add(target: Any, args: tuple[Any, ...], dtype: torch.dtype, shape: Sequence[int] = ()) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {"where": "", "module": "", "grad": False, "autocast": "", "requires_grad": False}
        node.meta |= {"shape": tuple(shape), "dtype": dtype}
        return node

    def count_entries(symbol: Symbol) -> fx.Node:
        line = inputs[symbol.key]
        dtype, shape = line.meta["dtype"], list(line.meta["shape"])
        for dim in reversed([d for d in range(len(shape)) if d != symbol.dim]):
            del shape[dim]
            line = add(aten.select.int, (line, dim, 0), dtype, shape)
        ones = add(aten.ones_like.default, (line,), torch.int64, shape)
        ones.kwargs = {"dtype": torch.int64}
        return add(aten.sum.default, (ones,), torch.int64)

    less = add(aten.lt.Tensor, (count_entries(a), count_entries(b)), torch.bool)
    first, second = (inputs[s.key].meta["shape"][s.dim] for s in (a, b))
    read = graph.call_function(aten._local_scalar_dense.default, (less,))
    read.meta = {"where": "", "module": "", "grad": False, "autocast": "", "read": ("item", first < second)}
