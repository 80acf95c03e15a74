"""Placements of ranks on nodes: the search against all placements of small problems, and the cost against
hand-made numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.placement.rank_placement import (
    Chain,
    Cost,
    Flow,
    Group,
    Places,
    Sum,
    cost,
    in_a_row,
    placement,
    search,
)
from secc.cluster import parse

MB = 10**6
NODES = parse("2x4xH100")


def all_costs(problem: Places) -> Iterator[Cost]:
    units = [g.name for g in problem.groups for _ in range(g.units)]
    free = [g.name for g in problem.groups if g.stages > 1]
    for order in set(permutations(units)):
        for chosen in product((False, True), repeat=len(free)):
            found = placement(
                problem, order, frozenset(n for n, yes in zip(free, chosen, strict=True) if yes)
            )
            if found is not None:
                yield cost(problem, found)


@st.composite
def problems(draw: st.DrawFn) -> Places:
    """Two or three groups on two to four nodes of two ranks, one of them perhaps a pipeline."""
    nodes = draw(st.integers(2, 4))
    left, groups = 2 * nodes, list[Group]()
    for name in "abc":
        most = left if name == "c" else left - (2 - len(groups))
        units = most if name == "c" else draw(st.integers(1, max(1, most)))
        if units:
            stages = draw(st.sampled_from([n for n in (1, 2, 3) if units % n == 0]))
            groups.append(Group(name, units, 1, stages))
        left -= units
    size = st.integers(0, 2000).map(lambda n: n * MB)
    names = [g.name for g in groups]
    return Places(
        parse(f"{nodes}x2xH100"),
        tuple(groups),
        tuple(Sum(g.name, draw(size), g.stages, 1, draw(st.booleans())) for g in groups),
        tuple(Flow(a, b, draw(size), draw(size)) for i, a in enumerate(names) for b in names[i + 1 :]),
        tuple(Chain(g.name, g.stages, 1, draw(size), draw(size)) for g in groups if g.stages > 1),
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_search_finds_what_trying_all_placements_finds(problem: Places) -> None:
    placed, found = search(problem)
    assert cost(problem, placed) == found
    assert sorted(r for ranks in placed.values() for r in ranks) == list(range(problem.world))
    best = min(all_costs(problem))
    assert found.time_ns <= 1.02 * best.time_ns
    assert found <= cost(problem, in_a_row(problem, [g.name for g in problem.groups], frozenset()))


def test_bytes_that_cross_nodes() -> None:
    """Four ranks of 4 GB sent: in a row all of it crosses, with half of each group on a node half of it."""
    problem = Places(NODES, (Group("a", 4), Group("b", 4)), flows=(Flow("a", "b", 4000 * MB),))
    row = cost(problem, in_a_row(problem, ["a", "b"], frozenset()))
    assert (row.between, row.inside, row.time_ns) == (4000 * MB, 0, 20_000_000)  # a GB each at 50 GB/s
    placed, found = search(problem)
    assert (found.between, found.inside) == (2000 * MB, 2000 * MB)
    assert {r // 4 for r in placed["a"]} == {0, 1}


def test_replicas_or_stages_as_neighbours() -> None:
    """Large gradients want a stage's replicas on a node, large activations a replica's stages."""
    group = (Group("lm", 8, 1, 4),)
    gradients = Places(NODES, group, sums=(Sum("lm", 8000 * MB, 4),), chains=(Chain("lm", 4, 1, MB, MB),))
    assert search(gradients)[0]["lm"] == (0, 2, 4, 6, 1, 3, 5, 7)
    activations = Places(
        NODES, group, sums=(Sum("lm", MB, 4),), chains=(Chain("lm", 4, 1, 8000 * MB, 8000 * MB),)
    )
    placed, found = search(activations)
    assert placed["lm"] == tuple(range(8)) and found.between == 0


def test_replicas_of_several_ranks_stay_on_a_node() -> None:
    problem = Places(NODES, (Group("wide", 1, 4), Group("narrow", 4)), flows=(Flow("wide", "narrow", MB),))
    placed, _ = search(problem)
    assert len({r // 4 for r in placed["wide"]}) == 1
