"""Directed graphs, as the passes need them: a typed front for the few algorithms of networkx that they use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

import networkx as _networkx

_nx: Any = _networkx

T = TypeVar("T", bound=Hashable)
Arcs = Iterable[tuple[T, T]]


def _graph(nodes: Iterable[T], arcs: Arcs[T]) -> Any:
    graph = _nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((a, b) for a, b in arcs if a != b)
    return graph


def acyclic(nodes: Iterable[T], arcs: Arcs[T]) -> bool:
    """Whether no node reaches itself through another."""
    return cast(bool, _nx.is_directed_acyclic_graph(_graph(nodes, arcs)))


def cycles(nodes: Iterable[T], arcs: Arcs[T]) -> list[set[T]]:
    """The sets of two or more nodes that reach each other."""
    found = cast("list[set[T]]", list(_nx.strongly_connected_components(_graph(nodes, arcs))))
    return [component for component in found if len(component) > 1]


def order(nodes: Iterable[T], arcs: Arcs[T], key: Callable[[T], Any]) -> list[T]:
    """The nodes of an acyclic graph, each behind those that point to it; free choices go by `key`."""
    return cast("list[T]", list(_nx.lexicographical_topological_sort(_graph(nodes, arcs), key=key)))
