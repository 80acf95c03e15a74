"""Directed graphs, as the passes need them: order, cycles, paths and minimum cuts.

networkx has all of these, but importing it takes longer than anything that is computed here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)
Arcs = Iterable[tuple[T, T]]


def _make_sorter(nodes: Iterable[T], arcs: Arcs[T]) -> TopologicalSorter[T]:
    sorter = TopologicalSorter[T]()
    for node in nodes:
        sorter.add(node)
    for a, b in arcs:
        if a != b:
            sorter.add(b, a)
    return sorter


def is_acyclic(nodes: Iterable[T], arcs: Arcs[T]) -> bool:
    """Whether a directed graph has no cycle but arcs from a node to itself."""
    try:
        _make_sorter(nodes, arcs).prepare()
    except CycleError:
        return False
    return True


def find_cycles(nodes: Iterable[T], arcs: Arcs[T]) -> list[set[T]]:
    """The strongly connected components of two or more nodes."""
    nodes, arcs = list(nodes), list(arcs)
    if is_acyclic(nodes, arcs):
        return []
    after, before = _make_links(arcs), _make_links((b, a) for a, b in arcs)
    found, seen = list[set[T]](), set[T]()
    for node in nodes:
        if node not in seen:
            component = _find_reachable(after, node) & _find_reachable(before, node)
            seen |= component
            found += [component] if len(component) > 1 else []
    return found


def topological_order(nodes: Iterable[T], arcs: Arcs[T], key: Callable[[T], Any]) -> list[T]:
    """Returns the nodes of an acyclic graph in topological order: each after all nodes that point to it; of
    those that may come next, the one with the least `key` does, or of equal ones the first in `nodes`."""
    nodes = list(nodes)
    place = {node: i for i, node in enumerate(nodes)}
    sorter = _make_sorter(nodes, arcs)
    sorter.prepare()
    order, ready = list[T](), list[tuple[Any, int, T]]()
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(ready, (key(node), place[node], node))
        *_, node = heappop(ready)
        order.append(node)
        sorter.done(node)
    return order


def nodes_between(arcs: Arcs[T], a: T, b: T) -> set[T]:
    """The nodes on paths from `a` to `b`, both included."""
    arcs = list(arcs)
    after, before = _make_links(arcs), _make_links((y, x) for x, y in arcs)
    return {a, b} | (_find_reachable(after, a) & _find_reachable(before, b))


def _make_links(arcs: Arcs[T]) -> Mapping[T, list[T]]:
    """Returns the nodes that arcs lead to from each node."""
    links = defaultdict[T, list[T]](list)
    for a, b in arcs:
        links[a].append(b)
    return links


def _find_reachable(links: Mapping[T, Iterable[T]], start: T) -> set[T]:
    """Returns the nodes that can be reached from `start`, which is one of them."""
    found, left = {start}, [start]
    while left:
        new = set(links.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


class MinCutNetwork:
    """A flow network between a source and a sink; its minimum cut divides the nodes into two sides."""

    def __init__(self) -> None:
        self._costs = dict[tuple[Hashable, Hashable], int | None]()

    def add_arc(self, a: Hashable, b: Hashable, cost: float | None) -> None:
        """Adds the cost of `a` on the source's and `b` on the sink's side; None forbids it. Parallel arcs add
        up."""
        known = self._costs.get((a, b), 0)
        self._costs[a, b] = None if cost is None or known is None else known + round(cost)

    def tie_to_source(self, node: Hashable, cost: float | None) -> None:
        """Adds the cost of `node` on the sink's side; None keeps it on the source's."""
        self.add_arc(_SOURCE, node, cost)

    def tie_to_sink(self, node: Hashable, cost: float | None) -> None:
        """Adds the cost of `node` on the source's side; None keeps it on the sink's."""
        self.add_arc(node, _SINK, cost)

    def min_cut_sink_side(self) -> set[Hashable] | None:
        """The nodes on the sink's side of a minimum cut, as few as possible; None if every cut is
        forbidden."""
        forbidden = 1 + sum(cost for cost in self._costs.values() if cost is not None)
        left = defaultdict[Hashable, dict[Hashable, int]](dict)  # capacity that flow leaves, by tail and head
        for (a, b), cost in self._costs.items():
            if a != b:
                left[a][b] = left[a].get(b, 0) + (forbidden if cost is None else cost)
                left[b].setdefault(a, 0)
        flow = 0
        while (depth := _find_depths(left)) and _SOURCE in depth:
            for amount in _push_along_shortest(left, depth):
                flow += amount
                if flow >= forbidden:
                    return None
        return set(_find_depths(left)) - {_SINK}


_SOURCE, _SINK = "source", "sink"


def _find_depths(left: Mapping[Hashable, Mapping[Hashable, int]]) -> dict[Hashable, int]:
    """Returns the number of arcs with capacity left from each node to the sink, where there is a path."""
    depth, queue = dict[Hashable, int]({_SINK: 0}), deque[Hashable]([_SINK])
    while queue:
        node = queue.popleft()
        for other in left.get(node, ()):
            if other not in depth and left[other][node] > 0:
                depth[other] = depth[node] + 1
                queue.append(other)
    return depth


def _push_along_shortest(
    left: Mapping[Hashable, dict[Hashable, int]], depth: Mapping[Hashable, int]
) -> Iterator[int]:
    """Pushes flow along all paths of the least number of arcs, and yields the amount on each (Dinic's
    blocking flow)."""
    untried = {node: list(left[node]) for node in depth if node in left}
    path: list[Hashable] = [_SOURCE]
    while path:
        node = path[-1]
        if node == _SINK:
            arcs = list(pairwise(path))
            amount = min(left[a][b] for a, b in arcs)
            for a, b in arcs:
                left[a][b] -= amount
                left[b][a] += amount
            yield amount
            del path[1 + next(i for i, (a, b) in enumerate(arcs) if left[a][b] == 0) :]
            continue
        others = untried[node]
        while others and not (left[node][others[-1]] > 0 and depth.get(others[-1]) == depth[node] - 1):
            others.pop()
        if others:
            path.append(others[-1])
        else:
            path.pop()
            if path:
                untried[path[-1]].pop()  # nothing more gets through here
