"""Random graphs, compared with networkx."""

from __future__ import annotations

import random
from typing import Any

import networkx as nx
import pytest

from secc.ir.dialect import digraph

SEEDS = range(200)


def _draw_graph(rng: random.Random) -> tuple[range, list[tuple[int, int]], Any]:
    nodes = range(rng.randrange(2, 9))
    arcs = [(rng.choice(nodes), rng.choice(nodes)) for _ in range(rng.randrange(2 * len(nodes)))]
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((a, b) for a, b in arcs if a != b)
    return nodes, arcs, graph


@pytest.mark.parametrize("seed", SEEDS)
def test_order_cycles_and_paths(seed: int) -> None:
    nodes, arcs, graph = _draw_graph(random.Random(seed))
    cycles = [c for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert sorted(map(sorted, digraph.find_cycles(nodes, arcs))) == sorted(map(sorted, cycles))
    assert digraph.is_acyclic(nodes, arcs) == (not cycles)
    if not cycles:
        key = (2, 0, 1, 1, 0, 2, 2, 1).__getitem__
        expected = list(nx.lexicographical_topological_sort(graph, key=key))
        assert digraph.topological_order(nodes, arcs, key) == expected
    first, last = nodes[0], nodes[-1]
    between = nx.descendants(graph, first) & nx.ancestors(graph, last)
    assert digraph.nodes_between(arcs, first, last) == {first, last} | between


@pytest.mark.parametrize("seed", SEEDS)
def test_minimum_cut(seed: int) -> None:
    rng = random.Random(seed)
    inner = range(rng.randrange(1, 9))
    network, graph = digraph.MinCutNetwork(), nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for _ in range(rng.randrange(4 * len(inner))):
        a, b = rng.choice(["source", *inner]), rng.choice(["sink", *inner])
        cost = rng.choice([None, 0, 1, 1, 2, 3, 7])
        if a == b or graph.has_edge(a, b):
            continue
        network.add_arc(a, b, cost)
        graph.add_edge(a, b, **({} if cost is None else {"capacity": cost}))
    try:
        expected = nx.minimum_cut(graph, "source", "sink")[1][1] - {"sink"}
    except nx.NetworkXUnbounded:
        expected = None
    assert network.min_cut_sink_side() == expected


def test_parallel_arcs_add_up_and_a_forbidden_one_stays_forbidden() -> None:
    network = digraph.MinCutNetwork()
    network.tie_to_source("a", 3)
    network.tie_to_source("a", 3)
    network.tie_to_sink("a", 5)
    assert network.min_cut_sink_side() == set()
    network.tie_to_sink("a", 2)
    assert network.min_cut_sink_side() == {"a"}
    network.tie_to_source("a", None)
    network.tie_to_source("a", 1)
    assert network.min_cut_sink_side() == set()
    network.tie_to_sink("a", None)
    assert network.min_cut_sink_side() is None
