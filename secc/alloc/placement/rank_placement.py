"""Ranks onto nodes: which devices the groups of an allocation take, and in which order their ranks stand.

Sets
    G        groups of sections that share ranks; a group is a row of units, each of as many ranks as its
    widest tensor parallelism slots    the cluster's ranks in a row, node by node

A placement is an order of all groups' units on the slots, none across two nodes, and for each group whether
replicas or stages are the outer axis: with stages outside, a stage's replicas are neighbours and sum their
gradients nearby; with replicas outside, its stages are.

What a placement costs is `cost`: each group's sums of gradients (which nothing hides) and the busiest of its
devices' ways in and out, moving every byte of a step; the slowest group counts. Among equals few bytes cross
nodes. Samples of an edge between groups may go from any replica to any other, so its bytes spread evenly over
all pairs of their ranks.

`search` tries the groups one after the other in every order, interleaved node by node, and both orders of
axes; the best of these are improved by swapping two units, as long as that helps and within `TRIES`.
Everything is deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from secc.cluster import Cluster
from secc.cost.model.collectives import all_gather_ns, all_reduce_ns, reduce_scatter_ns, span_of_ranks

MAX_SWAP_EVALUATIONS = (
    600  # placements that swaps may look at; a thousand ranks take about a millisecond each
)
IMPROVED_STARTS = 8  # of which swaps begin
MAX_PERMUTED_GROUPS = 4  # groups, up to which every order of them is tried


@dataclass(frozen=True)
class PlacementGroup:
    """`units` units of `unit` ranks; `stages` of them make a replica where stages may be the outer axis, else
    1. `nodes` are those it may be on, any if empty."""

    name: str
    units: int
    ranks_per_unit: int = 1
    stages: int = 1
    nodes: range = range(0)


@dataclass(frozen=True)
class GradientSum:
    """Gradients of a section: `size` bytes on each rank, summed over dp for each stage and place of tp. Ranks
    stand as (dp, pp, tp)."""

    group: str
    size: int
    pp: int = 1
    tp: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class EdgeTraffic:
    """What an edge between groups moves in a step: bytes forward and back, over all ranks."""

    src: str
    dst: str
    forward: int
    back: int = 0


@dataclass(frozen=True)
class PipelineTraffic:
    """What each stage of a pipeline hands to the next in a step, over all replicas: bytes forward and
    back."""

    group: str
    pp: int
    tp: int
    forward: int
    back: int = 0


@dataclass(frozen=True)
class PlacementProblem:
    """The groups, in the order in which they take ranks by default, and what they move."""

    cluster: Cluster
    groups: tuple[PlacementGroup, ...]
    sums: tuple[GradientSum, ...] = ()
    flows: tuple[EdgeTraffic, ...] = ()
    chains: tuple[PipelineTraffic, ...] = ()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(g.units * g.ranks_per_unit for g in self.groups)


@dataclass(frozen=True, order=True)
class PlacementCost:
    """Nanoseconds of the slowest group (its sums, and its busiest device's bytes one after the other), bytes
    of a step between nodes and inside them, nanoseconds of the longest sums."""

    time_ns: int
    between: int
    inside: int
    sums_ns: int


Placement = Mapping[str, tuple[int, ...]]  # the ranks of each group, ordered (dp, pp, tp)
UnitOrder = tuple[str, ...]  # the group of each unit, in the order of slots


def search_placement(problem: PlacementProblem) -> tuple[Placement, PlacementCost]:
    """The best placement found, never worse than the groups one after the other."""
    row = place_consecutively(problem, [g.name for g in problem.groups], frozenset())
    starts = {(order, outer): None for order in _start_orders(problem) for outer in _axis_choices(problem)}
    found = [
        (placement_cost(problem, placed), *start)
        for start in starts
        if (placed := place_units(problem, *start)) is not None
    ]
    budget = _SwapBudget(MAX_SWAP_EVALUATIONS)
    improved = [
        _improve_by_swaps(problem, *start, budget)
        for start in sorted(found, key=lambda f: f[0])[:IMPROVED_STARTS]
    ]
    value, order, outer = min(
        improved, key=lambda f: f[0], default=(placement_cost(problem, row), (), frozenset[str]())
    )
    placed = place_units(problem, order, outer) if value < placement_cost(problem, row) else None
    return (placed, value) if placed is not None else (row, placement_cost(problem, row))


@dataclass
class _SwapBudget:
    left: int


def _improve_by_swaps(
    problem: PlacementProblem,
    value: PlacementCost,
    order: UnitOrder,
    outer: frozenset[str],
    budget: _SwapBudget,
) -> tuple[PlacementCost, UnitOrder, frozenset[str]]:
    """Swap units of different groups on different nodes while that helps."""
    better = True
    while better:
        better = False
        for swapped in _swapped_orders(problem, order):
            placed = place_units(problem, swapped, outer)
            if placed is None:
                continue
            budget.left -= 1
            if budget.left < 0:
                return value, order, outer
            if (new := placement_cost(problem, placed)) < value:
                order, value, better = swapped, new, True
                break
    return value, order, outer


def _start_orders(problem: PlacementProblem) -> Iterator[UnitOrder]:
    names = [g.name for g in problem.groups]
    for row in permutations(names) if len(names) <= MAX_PERMUTED_GROUPS else [names]:
        yield _consecutive_order(problem, row)
        yield _interleaved_order(problem, row)


def _axis_choices(problem: PlacementProblem) -> Iterator[frozenset[str]]:
    """Every choice of groups whose stages are the outer axis."""
    free = [g.name for g in problem.groups if 1 < g.stages < g.units]
    for chosen in product((False, True), repeat=len(free)):
        yield frozenset(name for name, yes in zip(free, chosen, strict=True) if yes)


def _consecutive_order(problem: PlacementProblem, names: Iterable[str]) -> UnitOrder:
    units = {g.name: g.units for g in problem.groups}
    return tuple(name for name in names for _ in range(units[name]))


def _interleaved_order(problem: PlacementProblem, names: Sequence[str]) -> UnitOrder:
    """Each node with its share of every group, groups side by side within it."""
    groups = {g.name: g for g in problem.groups}
    nodes = -(-problem.world_size // problem.cluster.per_node)
    taken = dict.fromkeys(names, 0)
    order: list[str] = []
    for node in range(1, nodes + 1):
        for name in names:
            upto = groups[name].units * node // nodes
            order += [name] * (upto - taken[name])
            taken[name] = upto
    return tuple(order)


def _swapped_orders(problem: PlacementProblem, order: UnitOrder) -> Iterator[UnitOrder]:
    nodes = _unit_nodes(problem, order)
    for i, j in combinations(range(len(order)), 2):
        if order[i] != order[j] and nodes[i] != nodes[j]:
            swapped = list(order)
            swapped[i], swapped[j] = order[j], order[i]
            yield tuple(swapped)


def _unit_nodes(problem: PlacementProblem, order: UnitOrder) -> list[int]:
    """The node on which each unit begins."""
    sizes = {g.name: g.ranks_per_unit for g in problem.groups}
    start, found = 0, list[int]()
    for name in order:
        found.append(start // problem.cluster.per_node)
        start += sizes[name]
    return found


def place_consecutively(problem: PlacementProblem, names: Iterable[str], outer: frozenset[str]) -> Placement:
    """The groups one after the other, even where units then lie across nodes."""
    return _ranks_of_order(problem, _consecutive_order(problem, names), outer)


def place_units(problem: PlacementProblem, order: UnitOrder, outer: frozenset[str]) -> Placement | None:
    """The ranks of each group for an order of units; `outer` groups have stages as their outer axis. None if
    a unit lies across nodes, or on one where its group may not be."""
    groups, per_node, start = {g.name: g for g in problem.groups}, problem.cluster.per_node, 0
    for name in order:
        group, node = groups[name], start // per_node
        start += group.ranks_per_unit
        if node != (start - 1) // per_node or (group.nodes and node not in group.nodes):
            return None
    return _ranks_of_order(problem, order, outer)


def _ranks_of_order(problem: PlacementProblem, order: UnitOrder, outer: frozenset[str]) -> Placement:
    units: dict[str, list[range]] = {g.name: [] for g in problem.groups}
    sizes, start = {g.name: g.ranks_per_unit for g in problem.groups}, 0
    for name in order:
        units[name].append(range(start, start + sizes[name]))
        start += sizes[name]
    found: dict[str, tuple[int, ...]] = {}
    for g in problem.groups:
        row, dp = units[g.name], g.units // g.stages
        if g.name in outer:
            row = [row[p * dp + d] for d in range(dp) for p in range(g.stages)]
        found[g.name] = tuple(rank for unit in row for rank in unit)
    return found


# -- what a placement costs
# ------------------------------------------------------------------------------------------------------------


def placement_cost(problem: PlacementProblem, placed: Placement) -> PlacementCost:
    """What a placement costs."""
    ways = _LinkTraffic(problem.cluster, placed)
    for flow in problem.flows:
        ways.add_edge_traffic(flow)
    for chain in problem.chains:
        ways.add_pipeline_traffic(chain)
    sums = dict.fromkeys(placed, 0)
    for s in problem.sums:
        sums[s.group] += _gradient_sum_ns(problem.cluster, placed[s.group], s)
    slowest = max(sums[name] + max(ways.busiest_link_ns(r) for r in ranks) for name, ranks in placed.items())
    return PlacementCost(
        slowest, sum(ways.outgoing[True].values()), sum(ways.outgoing[False].values()), max(sums.values())
    )


def _gradient_sum_ns(cluster: Cluster, ranks: Sequence[int], s: GradientSum) -> int:
    """The longest of the stages' sums; the places of tp sum side by side."""
    step = s.pp * s.tp
    spans = {span_of_ranks(ranks[stage * s.tp :: step], cluster) for stage in range(s.pp)}
    if s.sharded:
        return max(
            reduce_scatter_ns(s.size, span, cluster) + all_gather_ns(s.size, span, cluster) for span in spans
        )
    return max(all_reduce_ns(s.size, span, cluster) for span in spans)


class _LinkTraffic:
    """Bytes that leave and enter each rank in a step, by whether they cross nodes (True) or stay inside
    one."""

    def __init__(self, cluster: Cluster, placed: Placement) -> None:
        self.cluster, self.placed = cluster, placed
        self.outgoing: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self.incoming: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self.ranks_per_node = {
            name: Counter(self._node_of(r) for r in ranks) for name, ranks in placed.items()
        }

    def _node_of(self, rank: int) -> int:
        return rank // self.cluster.per_node

    def add_edge_traffic(self, flow: EdgeTraffic) -> None:
        """Bytes from any rank of one group to any of another, and back."""
        for src, dst, size in ((flow.src, flow.dst, flow.forward), (flow.dst, flow.src, flow.back)):
            self._spread_bytes(src, dst, size, self.outgoing)
            self._spread_bytes(dst, src, size, self.incoming)

    def _spread_bytes(self, here: str, there: str, size: int, ways: dict[bool, Counter[int]]) -> None:
        """A rank's share of the bytes, of which those to or from its own node stay inside."""
        ranks, every, per_node = self.placed[here], len(self.placed[there]), self.cluster.per_node
        each = size // len(ranks)
        near = {node: each * count // every for node, count in self.ranks_per_node[there].items()}
        inside, between = ways[False], ways[True]
        for rank in ranks:
            stay = near.get(rank // per_node, 0)
            inside[rank] += stay
            between[rank] += each - stay

    def add_pipeline_traffic(self, chain: PipelineTraffic) -> None:
        """Bytes from each stage to the next of its replica, and back."""
        ranks, step = self.placed[chain.group], chain.pp * chain.tp
        for i, rank in enumerate(ranks):
            if i % step < step - chain.tp:
                behind = ranks[i + chain.tp]
                self._add_message(rank, behind, chain.forward * chain.pp // len(ranks))
                self._add_message(behind, rank, chain.back * chain.pp // len(ranks))

    def _add_message(self, src: int, dst: int, size: int) -> None:
        crosses = self._node_of(src) != self._node_of(dst)
        self.outgoing[crosses][src] += size
        self.incoming[crosses][dst] += size

    def busiest_link_ns(self, rank: int) -> int:
        """How long a rank's busier way takes for its bytes."""
        between, inside = self.cluster.between.bytes_per_s, self.cluster.inside.bytes_per_s
        return max(
            10**9 * way[True][rank] // between + 10**9 * way[False][rank] // inside
            for way in (self.outgoing, self.incoming)
        )
