"""Directed graphs: the few algorithms that the passes need."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)
Arcs = Iterable[tuple[T, T]]
Successors = dict[T, list[T]]


def _list_successors(nodes: Iterable[T], arcs: Arcs[T]) -> Successors[T]:
    """Returns the nodes that each node points to, each once, in the order in which they are met."""
    found: dict[T, dict[T, None]] = {node: {} for node in nodes}
    for a, b in arcs:
        if a != b:
            found.setdefault(a, {})[b] = None
            found.setdefault(b, {})
    return {node: [*successors] for node, successors in found.items()}


def _reverse(graph: Successors[T]) -> Successors[T]:
    return _list_successors(graph, ((b, a) for a, successors in graph.items() for b in successors))


def _find_reachable(graph: Mapping[T, Iterable[T]], start: T) -> set[T]:
    """Returns a node and all nodes on paths from it."""
    found, queue = {start}, [start]
    for node in queue:
        new = [n for n in graph.get(node, ()) if n not in found]
        found.update(new)
        queue += dict.fromkeys(new)
    return found


def is_acyclic(nodes: Iterable[T], arcs: Arcs[T]) -> bool:
    """Whether a directed graph has no cycle but arcs from a node to itself."""
    graph = _list_successors(nodes, arcs)
    return len(_sort_topologically(graph, lambda _: 0)) == len(graph)


def find_cycles(nodes: Iterable[T], arcs: Arcs[T]) -> list[set[T]]:
    """The strongly connected components of two or more nodes, in the order of their first nodes."""
    graph = _list_successors(nodes, arcs)
    known = set(_sort_topologically(graph, lambda _: 0))  # on no cycle
    back, found = _reverse(graph), list[set[T]]()
    for node in graph:
        if node not in known:
            component = _find_reachable(graph, node) & _find_reachable(back, node)
            known |= component
            found += [component] if len(component) > 1 else []
    return found


def find_components(arcs: Arcs[T]) -> list[set[T]]:
    """The sets of several nodes that arcs connect, in either direction, in the order of their first nodes."""
    either: Successors[T] = _list_successors((), (pair for a, b in arcs for pair in ((a, b), (b, a))))
    known: set[T] = set()
    found: list[set[T]] = []
    for node in either:
        if node not in known:
            component = _find_reachable(either, node)
            known |= component
            found.append(component)
    return found


def topological_order(nodes: Iterable[T], arcs: Arcs[T], key: Callable[[T], Any]) -> list[T]:
    """Returns the nodes of an acyclic graph in topological order: each after all nodes that point to it; ties
    are broken by `key`, then by the order of `nodes`."""
    graph = _list_successors(nodes, arcs)
    found = _sort_topologically(graph, key)
    if len(found) < len(graph):
        raise ValueError("the graph has a cycle")
    return found


def _sort_topologically(graph: Successors[T], key: Callable[[T], Any]) -> list[T]:
    """Returns the nodes that are on no cycle, and behind none, in topological order."""
    place = {node: i for i, node in enumerate(graph)}
    waits_for = dict.fromkeys(graph, 0)
    for successors in graph.values():
        for node in successors:
            waits_for[node] += 1
    ready = [(key(node), place[node], node) for node, count in waits_for.items() if not count]
    heapq.heapify(ready)
    found = list[T]()
    while ready:
        node = heapq.heappop(ready)[2]
        found.append(node)
        for successor in graph[node]:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                heapq.heappush(ready, (key(successor), place[successor], successor))
    return found


def nodes_between(arcs: Arcs[T], a: T, b: T) -> set[T]:
    """The nodes on paths from `a` to `b`, both included."""
    graph = _list_successors((a, b), arcs)
    return {a, b} | (_find_reachable(graph, a) & _find_reachable(_reverse(graph), b))


class MinCutNetwork:
    """A flow network between a source and a sink; its minimum cut divides the nodes into two sides."""

    def __init__(self) -> None:
        self._costs: dict[Hashable, dict[Hashable, float]] = {_SOURCE: {}, _SINK: {}}

    def add_arc(self, a: Hashable, b: Hashable, cost: float | None) -> None:
        """Adds the cost of `a` on the source's and `b` on the sink's side; None forbids it. Parallel arcs add
        up."""
        costs = self._costs.setdefault(a, {})
        self._costs.setdefault(b, {})
        costs[b] = costs.get(b, 0) + (math.inf if cost is None else round(cost))

    def tie_to_source(self, node: Hashable, cost: float | None) -> None:
        """Adds the cost of `node` on the sink's side; None keeps it on the source's."""
        self.add_arc(_SOURCE, node, cost)

    def tie_to_sink(self, node: Hashable, cost: float | None) -> None:
        """Adds the cost of `node` on the source's side; None keeps it on the sink's."""
        self.add_arc(node, _SINK, cost)

    def min_cut_sink_side(self) -> set[Hashable] | None:
        """The nodes on the sink's side of a minimum cut, as few as possible; None if every cut is
        forbidden."""
        forbidden = {
            a: [b for b, cost in costs.items() if cost == math.inf] for a, costs in self._costs.items()
        }
        if _SINK in _find_reachable(forbidden, _SOURCE):
            return None
        left = {a: dict(costs) for a, costs in self._costs.items()}  # of each arc, what flow may still take
        for a, costs in self._costs.items():
            for b in costs:
                left[b].setdefault(a, 0)
        while (level := _number_levels(left)).get(_SINK) is not None:
            _send_flow(left, level)
        back = {
            b: [a for a in neighbours if left[a][b] > 0] for b, neighbours in left.items()
        }  # an arc each way joins neighbours
        return _find_reachable(back, _SINK) - {_SINK}


_SOURCE, _SINK = "source", "sink"
Residual = dict[Hashable, dict[Hashable, float]]


def _number_levels(left: Residual) -> dict[Hashable, int]:
    """Returns the number of arcs that flow takes at least from the source to each node that it reaches."""
    level, queue = dict[Hashable, int]({_SOURCE: 0}), list[Hashable]([_SOURCE])
    for a in queue:
        for b, amount in left[a].items():
            if amount > 0 and b not in level:
                level[b] = level[a] + 1
                queue.append(b)
    return level


def _send_flow(left: Residual, level: Mapping[Hashable, int]) -> None:
    """Sends flow along shortest paths until none is left (the algorithm of Dinic)."""
    ways = {
        a: [b for b, amount in left[a].items() if amount > 0 and level.get(b) == level[a] + 1] for a in level
    }
    path = list[Hashable]([_SOURCE])
    while path:
        a = path[-1]
        if a == _SINK:
            arcs = list(pairwise(path))
            amount = min(left[x][y] for x, y in arcs)
            for x, y in arcs:
                left[x][y] -= amount
                left[y][x] += amount
            full = next(i for i, (x, y) in enumerate(arcs) if not left[x][y])
            del path[full + 1 :]
        elif ways[a] and left[a][ways[a][-1]] > 0:
            path.append(ways[a][-1])
        elif ways[a]:
            ways[a].pop()
        else:
            path.pop()
            if path:
                ways[path[-1]].pop()
