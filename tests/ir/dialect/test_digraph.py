"""Algorithms on directed graphs, against definitions and all cuts of small networks."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from secc.ir.dialect import digraph
from secc.ir.dialect.digraph import MinCutNetwork

NODES = range(7)
ARCS = st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)), max_size=16)
COSTS = st.none() | st.integers(0, 5)


def reaches(arcs: list[tuple[int, int]], a: int, b: int) -> bool:
    met = {a}
    for _ in NODES:
        met |= {y for x, y in arcs if x in met}
    return b in met


@given(ARCS)
def test_cycles_are_sets_of_nodes_that_reach_each_other(arcs: list[tuple[int, int]]) -> None:
    alike = {frozenset(b for b in NODES if reaches(arcs, a, b) and reaches(arcs, b, a)) for a in NODES}
    found = digraph.find_cycles(NODES, arcs)
    assert {*map(frozenset, found)} == {c for c in alike if len(c) > 1}
    assert digraph.is_acyclic(NODES, arcs) == (not found)


@given(ARCS)
def test_components_are_connected_in_either_direction(arcs: list[tuple[int, int]]) -> None:
    both = arcs + [(b, a) for a, b in arcs]
    alike = {
        frozenset(b for b in NODES if reaches(both, a, b)) for pair in arcs for a in pair if len({*pair}) > 1
    }
    found = digraph.find_components(arcs)
    assert {*map(frozenset, found)} == alike and len(found) == len(alike)


@given(ARCS, st.permutations(NODES))
def test_topological_order_breaks_ties_by_key(arcs: list[tuple[int, int]], keys: list[int]) -> None:
    forward = [(min(a, b), max(a, b)) for a, b in arcs]
    order = digraph.topological_order(NODES, forward, keys.__getitem__)
    left, expected = {*NODES}, list[int]()
    while left:
        ready = [n for n in left if not any(b == n and a in left and a != b for a, b in forward)]
        expected.append(min(ready, key=keys.__getitem__))
        left.remove(expected[-1])
    assert order == expected


@given(ARCS, st.sampled_from(NODES), st.sampled_from(NODES))
def test_nodes_between_are_on_paths(arcs: list[tuple[int, int]], a: int, b: int) -> None:
    on_paths = {n for n in NODES if reaches(arcs, a, n) and reaches(arcs, n, b)}
    assert digraph.nodes_between(arcs, a, b) == {a, b} | on_paths


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), COSTS), max_size=12),
    st.lists(st.tuples(st.integers(0, 4), COSTS), max_size=5),
    st.lists(st.tuples(st.integers(0, 4), COSTS), max_size=5),
)
def test_minimum_cuts_are_the_cheapest_with_the_smallest_sink_side(
    arcs: list[tuple[int, int, int | None]],
    sources: list[tuple[int, int | None]],
    sinks: list[tuple[int, int | None]],
) -> None:
    network = MinCutNetwork()
    for a, b, cost in arcs:
        network.add_arc(a, b, cost)
    for node, cost in sources:
        network.tie_to_source(node, cost)
    for node, cost in sinks:
        network.tie_to_sink(node, cost)

    def price(sink_side: set[int]) -> float:
        across = [c for a, b, c in arcs if a not in sink_side and b in sink_side]
        across += [c for n, c in sources if n in sink_side] + [c for n, c in sinks if n not in sink_side]
        return float("inf") if None in across else sum(c or 0 for c in across)

    sides = [{n for n, at_sink in enumerate(chosen) if at_sink} for chosen in product((0, 1), repeat=5)]
    least = min(map(price, sides))
    cheapest = set.intersection(*(s for s in sides if price(s) == least))
    assert network.min_cut_sink_side() == (None if least == float("inf") else cheapest)
