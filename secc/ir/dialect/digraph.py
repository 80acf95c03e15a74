"""Directed graphs, as the passes need them: a typed front for the few algorithms of networkx that they
use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

import networkx as _networkx

_nx: Any = _networkx

T = TypeVar("T", bound=Hashable)
Arcs = Iterable[tuple[T, T]]


def _build_graph(nodes: Iterable[T], arcs: Arcs[T]) -> Any:
    graph = _nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((a, b) for a, b in arcs if a != b)
    return graph


def is_acyclic(nodes: Iterable[T], arcs: Arcs[T]) -> bool:
    """Whether a directed graph has no cycle but arcs from a node to itself."""
    return cast(bool, _nx.is_directed_acyclic_graph(_build_graph(nodes, arcs)))


def find_cycles(nodes: Iterable[T], arcs: Arcs[T]) -> list[set[T]]:
    """The strongly connected components of two or more nodes."""
    found = cast("list[set[T]]", list(_nx.strongly_connected_components(_build_graph(nodes, arcs))))
    return [component for component in found if len(component) > 1]


def find_components(arcs: Arcs[T]) -> list[set[T]]:
    """The sets of nodes that arcs connect, in either direction."""
    return cast("list[set[T]]", list(_nx.weakly_connected_components(_build_graph((), arcs))))


def topological_order(nodes: Iterable[T], arcs: Arcs[T], key: Callable[[T], Any]) -> list[T]:
    """Returns the nodes of an acyclic graph in topological order: each after all nodes that point to it; ties
    are broken by `key`."""
    return cast("list[T]", list(_nx.lexicographical_topological_sort(_build_graph(nodes, arcs), key=key)))


def nodes_between(arcs: Arcs[T], a: T, b: T) -> set[T]:
    """The nodes on paths from `a` to `b`, both included."""
    graph = _build_graph((a, b), arcs)
    return cast("set[T]", {a, b} | (_nx.descendants(graph, a) & _nx.ancestors(graph, b)))


class MinCutNetwork:
    """A flow network between a source and a sink; its minimum cut divides the nodes into two sides."""

    def __init__(self) -> None:
        self._graph: Any = _nx.DiGraph()
        self._graph.add_nodes_from((_SOURCE, _SINK))

    def add_arc(self, a: Hashable, b: Hashable, cost: float | None) -> None:
        """Adds the cost of `a` on the source's and `b` on the sink's side; None forbids it. Parallel arcs add
        up."""
        known = self._graph.get_edge_data(a, b)
        if known is not None and "capacity" not in known:
            return
        if cost is None:
            self._graph.add_edge(a, b)
            self._graph.edges[a, b].pop("capacity", None)
        else:
            self._graph.add_edge(a, b, capacity=round(cost) + (known["capacity"] if known else 0))

    def tie_to_source(self, node: Hashable, cost: float | None) -> None:
        """Adds the cost of `node` on the sink's side; None keeps it on the source's."""
        self.add_arc(_SOURCE, node, cost)

    def tie_to_sink(self, node: Hashable, cost: float | None) -> None:
        """Adds the cost of `node` on the source's side; None keeps it on the sink's."""
        self.add_arc(node, _SINK, cost)

    def min_cut_sink_side(self) -> set[Hashable] | None:
        """The nodes on the sink's side of a minimum cut, as few as possible; None if every cut is
        forbidden."""
        try:
            _, (_, sink) = _nx.minimum_cut(self._graph, _SOURCE, _SINK)
        except _nx.NetworkXUnbounded:
            return None
        return cast("set[Hashable]", sink - {_SINK})


_SOURCE, _SINK = "source", "sink"
