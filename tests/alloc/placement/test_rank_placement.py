"""Placements of ranks on nodes: the search against all placements of small problems, and the cost against
hand-made numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.placement.rank_placement import (
    EdgeTraffic,
    GradientSum,
    PipelineTraffic,
    PlacementCost,
    PlacementGroup,
    PlacementProblem,
    place_consecutively,
    place_units,
    placement_cost,
    search_placement,
)
from secc.cluster import parse_cluster

MB = 10**6
NODES = parse_cluster("2x4xH100")


def all_costs(problem: PlacementProblem) -> Iterator[PlacementCost]:
    units = [g.name for g in problem.groups for _ in range(g.units)]
    free = [g.name for g in problem.groups if g.stages > 1]
    for order in set(permutations(units)):
        for chosen in product((False, True), repeat=len(free)):
            found = place_units(
                problem, order, frozenset(n for n, yes in zip(free, chosen, strict=True) if yes)
            )
            if found is not None:
                yield placement_cost(problem, found)


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """Two or three groups on two to four nodes of two ranks, one of them perhaps a pipeline."""
    nodes = draw(st.integers(2, 4))
    left, groups = 2 * nodes, list[PlacementGroup]()
    for name in "abc":
        most = left if name == "c" else left - (2 - len(groups))
        units = most if name == "c" else draw(st.integers(1, max(1, most)))
        if units:
            stages = draw(st.sampled_from([n for n in (1, 2, 3) if units % n == 0]))
            groups.append(PlacementGroup(name, units, 1, stages))
        left -= units
    size = st.integers(0, 2000).map(lambda n: n * MB)
    names = [g.name for g in groups]
    return PlacementProblem(
        parse_cluster(f"{nodes}x2xH100"),
        tuple(groups),
        tuple(GradientSum(g.name, draw(size), g.stages, 1, draw(st.booleans())) for g in groups),
        tuple(EdgeTraffic(a, b, draw(size), draw(size)) for i, a in enumerate(names) for b in names[i + 1 :]),
        tuple(PipelineTraffic(g.name, g.stages, 1, draw(size), draw(size)) for g in groups if g.stages > 1),
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_search_finds_the_best_of_all_placements(problem: PlacementProblem) -> None:
    placed, found = search_placement(problem)
    assert placement_cost(problem, placed) == found
    assert sorted(r for ranks in placed.values() for r in ranks) == list(range(problem.world_size))
    best = min(all_costs(problem))
    assert found.time_ns <= 1.02 * best.time_ns
    assert found <= placement_cost(
        problem, place_consecutively(problem, [g.name for g in problem.groups], frozenset())
    )


def test_bytes_that_cross_nodes() -> None:
    """Four ranks of 4 GB sent: in a row all of it crosses, with half of each group on a node half of it."""
    problem = PlacementProblem(
        NODES, (PlacementGroup("a", 4), PlacementGroup("b", 4)), flows=(EdgeTraffic("a", "b", 4000 * MB),)
    )
    row = placement_cost(problem, place_consecutively(problem, ["a", "b"], frozenset()))
    assert (row.between, row.inside, row.time_ns) == (4000 * MB, 0, 20_000_000)  # a GB each at 50 GB/s
    placed, found = search_placement(problem)
    assert (found.between, found.inside) == (2000 * MB, 2000 * MB)
    assert {r // 4 for r in placed["a"]} == {0, 1}


def test_replicas_or_stages_as_neighbours() -> None:
    """Large gradients want a stage's replicas on a node, large activations a replica's stages."""
    group = (PlacementGroup("lm", 8, 1, 4),)
    gradients = PlacementProblem(
        NODES, group, sums=(GradientSum("lm", 8000 * MB, 4),), chains=(PipelineTraffic("lm", 4, 1, MB, MB),)
    )
    assert search_placement(gradients)[0]["lm"] == (0, 2, 4, 6, 1, 3, 5, 7)
    activations = PlacementProblem(
        NODES,
        group,
        sums=(GradientSum("lm", MB, 4),),
        chains=(PipelineTraffic("lm", 4, 1, 8000 * MB, 8000 * MB),),
    )
    placed, found = search_placement(activations)
    assert placed["lm"] == tuple(range(8)) and found.between == 0


def test_replicas_of_several_ranks_stay_on_a_node() -> None:
    problem = PlacementProblem(
        NODES,
        (PlacementGroup("wide", 1, 4), PlacementGroup("narrow", 4)),
        flows=(EdgeTraffic("wide", "narrow", MB),),
    )
    placed, _ = search_placement(problem)
    assert len({r // 4 for r in placed["wide"]}) == 1
