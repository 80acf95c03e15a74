"""Places the groups of an allocation on nodes: which ranks each group takes, and in which order.

Groups are sets of sections that share ranks. A group is a row of units; a unit has as many ranks as the
group's widest tensor parallelism. The slots are the cluster's ranks, node by node. A placement is an order of
all groups' units on the slots, such that no unit spans two nodes, and for each group whether replicas or
stages are the outer axis: with stages outside, the replicas of a stage are neighbours and reduce gradients
nearby; with replicas outside, the stages of a replica are neighbours.

The cost (`placement_cost`) of a group is its gradient reductions, which nothing hides, plus the time of the
busiest in- or outgoing link of its devices for the bytes of a step; the slowest group counts. Among equals,
fewer bytes between nodes are better. Samples of an edge between groups may go from any replica to any other,
so its bytes spread evenly over all pairs of their ranks.

`search_placement` tries the groups one after the other in every order, groups interleaved node by node, and
both axis orders; the best of these are improved by swapping units as long as that helps, within
`MAX_SWAP_EVALUATIONS`. Everything is deterministic.
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
IMPROVED_STARTS = 8  # best start placements that are improved by swaps
MAX_PERMUTED_GROUPS = 4  # up to this number of groups every order of them is tried


@dataclass(frozen=True)
class PlacementGroup:
    """A group of `units` units with `ranks_per_unit` ranks each. `stages` units make a replica where
    stages may be the outer axis, else 1. `nodes` are the nodes it may use (empty: any)."""

    name: str
    units: int
    ranks_per_unit: int = 1
    stages: int = 1
    nodes: range = range(0)


@dataclass(frozen=True)
class GradientSum:
    """Gradient reduction of a section: `size` bytes on each rank, summed over dp and cp for each stage and
    tp rank. Ranks are ordered (dp, pp, cp, tp)."""

    group: str
    size: int
    pp: int = 1
    tp: int = 1
    sharded: bool = False
    cp: int = 1


@dataclass(frozen=True)
class EdgeTraffic:
    """Bytes that an edge between groups moves in a step, forward and back, over all ranks."""

    src: str
    dst: str
    forward: int
    back: int = 0


@dataclass(frozen=True)
class PipelineTraffic:
    """Bytes that each pipeline stage sends to the next in a step, forward and back, over all replicas."""

    group: str
    pp: int
    tp: int
    forward: int
    back: int = 0


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes of tokens' rows that a rank sends to the ranks of the `replicas` replicas among which a section's
    experts are divided, in a step. Ranks are ordered (dp, pp, cp, tp)."""

    group: str
    pp: int
    tp: int
    replicas: int
    size: int


@dataclass(frozen=True)
class PlacementProblem:
    """The groups, in the order in which they take ranks by default, and what they move."""

    cluster: Cluster
    groups: tuple[PlacementGroup, ...]
    sums: tuple[GradientSum, ...] = ()
    flows: tuple[EdgeTraffic, ...] = ()
    chains: tuple[PipelineTraffic, ...] = ()
    exchanges: tuple[ExpertTraffic, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks of all groups."""
        return sum(g.units * g.ranks_per_unit for g in self.groups)


@dataclass(frozen=True, order=True)
class PlacementCost:
    """Ns of the slowest group, bytes of a step between nodes and inside nodes, and ns of the longest
    reductions. Ordered: less is better."""

    time_ns: int
    between: int
    inside: int
    sums_ns: int


Placement = Mapping[str, tuple[int, ...]]  # the ranks of each group, ordered (dp, pp, tp)
UnitOrder = tuple[str, ...]  # the group of each unit, in the order of slots
BytesByWay = dict[bool, list[int]]  # between nodes (True) and inside of them: bytes of each rank


def search_placement(problem: PlacementProblem) -> tuple[Placement, PlacementCost]:
    """Returns the best placement found and its cost; never worse than the groups one after the other."""
    row = place_consecutively(problem, [g.name for g in problem.groups], frozenset())
    starts = {(order, outer): None for order in _start_orders(problem) for outer in _axis_choices(problem)}
    starts_by_cost = [
        (placement_cost(problem, placed), *start)
        for start in starts
        if (placed := place_units(problem, *start)) is not None
    ]
    budget = _SwapBudget(MAX_SWAP_EVALUATIONS)
    improved = [
        _improve_by_swaps(problem, *start, budget)
        for start in sorted(starts_by_cost, key=lambda f: f[0])[:IMPROVED_STARTS]
    ]
    best_cost, order, outer = min(
        improved, key=lambda f: f[0], default=(placement_cost(problem, row), (), frozenset[str]())
    )
    placed = place_units(problem, order, outer) if best_cost < placement_cost(problem, row) else None
    return (placed, best_cost) if placed is not None else (row, placement_cost(problem, row))


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
    """Swaps units of different groups on different nodes while that reduces the cost and the budget lasts."""
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
    """Yields the unit orders to start from."""
    names = [g.name for g in problem.groups]
    for row in permutations(names) if len(names) <= MAX_PERMUTED_GROUPS else [names]:
        yield _consecutive_order(problem, row)
        yield _interleaved_order(problem, row)


def _axis_choices(problem: PlacementProblem) -> Iterator[frozenset[str]]:
    """Yields every choice of the groups that get their stages as the outer axis of their ranks."""
    choosable = [g.name for g in problem.groups if 1 < g.stages < g.units]
    for chosen in product((False, True), repeat=len(choosable)):
        yield frozenset(name for name, is_outer in zip(choosable, chosen, strict=True) if is_outer)


def _consecutive_order(problem: PlacementProblem, names: Iterable[str]) -> UnitOrder:
    units = {g.name: g.units for g in problem.groups}
    return tuple(name for name in names for _ in range(units[name]))


def _interleaved_order(problem: PlacementProblem, names: Sequence[str]) -> UnitOrder:
    """Unit order in which each node has its share of every group."""
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
    """Yields orders with two units of different groups on different nodes swapped."""
    nodes = _unit_nodes(problem, order)
    for i, j in combinations(range(len(order)), 2):
        if order[i] != order[j] and nodes[i] != nodes[j]:
            swapped = list(order)
            swapped[i], swapped[j] = order[j], order[i]
            yield tuple(swapped)


def _unit_nodes(problem: PlacementProblem, order: UnitOrder) -> list[int]:
    """Node on which each unit begins."""
    sizes = {g.name: g.ranks_per_unit for g in problem.groups}
    start, nodes = 0, list[int]()
    for name in order:
        nodes.append(start // problem.cluster.per_node)
        start += sizes[name]
    return nodes


def place_consecutively(problem: PlacementProblem, names: Iterable[str], outer: frozenset[str]) -> Placement:
    """Ranks of the groups placed one after the other, even where units then span nodes."""
    return _ranks_of_order(problem, _consecutive_order(problem, names), outer)


def place_units(problem: PlacementProblem, order: UnitOrder, outer: frozenset[str]) -> Placement | None:
    """Ranks of each group for a unit order; groups in `outer` have stages as outer axis.

    None if a unit spans nodes, or is on a node that its group may not use.
    """
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
    ranks_by_group: dict[str, tuple[int, ...]] = {}
    for g in problem.groups:
        ordered_units, dp = units[g.name], g.units // g.stages
        if g.name in outer:
            ordered_units = [ordered_units[p * dp + d] for d in range(dp) for p in range(g.stages)]
        ranks_by_group[g.name] = tuple(rank for unit in ordered_units for rank in unit)
    return ranks_by_group


# -- what a placement costs


def placement_cost(problem: PlacementProblem, placed: Placement) -> PlacementCost:
    """Cost of a placement."""
    ways = _LinkTraffic(problem.cluster, placed)
    for flow in problem.flows:
        ways.add_edge_traffic(flow)
    for chain in problem.chains:
        ways.add_pipeline_traffic(chain)
    for exchange in problem.exchanges:
        ways.add_expert_traffic(exchange)
    sums = dict.fromkeys(placed, 0)
    for s in problem.sums:
        sums[s.group] += _gradient_sum_ns(problem.cluster, placed[s.group], s)
    slowest = max(sums[name] + ways.busiest_link_ns(ranks) for name, ranks in placed.items())
    return PlacementCost(slowest, sum(ways.outgoing[True]), sum(ways.outgoing[False]), max(sums.values()))


def _gradient_sum_ns(cluster: Cluster, ranks: Sequence[int], s: GradientSum) -> int:
    """Ns of the longest reduction of any stage; the tp ranks reduce in parallel."""
    stage_size = s.tp * s.cp
    spans = {
        span_of_ranks(
            [r for k, r in enumerate(ranks) if k // stage_size % s.pp == stage and k % s.tp == 0], cluster
        )
        for stage in range(s.pp)
    }
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
        ranks = 1 + max(max(of_group) for of_group in placed.values())
        self.outgoing: BytesByWay = {True: [0] * ranks, False: [0] * ranks}
        self.incoming: BytesByWay = {True: [0] * ranks, False: [0] * ranks}
        self.ranks_per_node = {
            name: Counter(self._node_of(r) for r in ranks) for name, ranks in placed.items()
        }

    def _node_of(self, rank: int) -> int:
        return rank // self.cluster.per_node

    def add_edge_traffic(self, flow: EdgeTraffic) -> None:
        """Adds bytes from any rank of one group to any of another, and back."""
        for src, dst, size in ((flow.src, flow.dst, flow.forward), (flow.dst, flow.src, flow.back)):
            self._spread_bytes(src, dst, size, self.outgoing)
            self._spread_bytes(dst, src, size, self.incoming)

    def _spread_bytes(self, here: str, there: str, size: int, ways: BytesByWay) -> None:
        """Adds to each rank of `here` its share of the bytes; those to or from its own node stay inside."""
        ranks, rank_count_there, per_node = self.placed[here], len(self.placed[there]), self.cluster.per_node
        each = size // len(ranks)
        bytes_to_node = {
            node: each * count // rank_count_there for node, count in self.ranks_per_node[there].items()
        }
        inside, between = ways[False], ways[True]
        for rank in ranks:
            local_bytes = bytes_to_node.get(rank // per_node, 0)
            inside[rank] += local_bytes
            between[rank] += each - local_bytes

    def add_pipeline_traffic(self, chain: PipelineTraffic) -> None:
        """Adds bytes from each stage to the next of its replica, and back."""
        ranks, step = self.placed[chain.group], chain.pp * chain.tp
        for i, rank in enumerate(ranks):
            if i % step < step - chain.tp:
                next_rank = ranks[i + chain.tp]
                self._add_message(rank, next_rank, chain.forward * chain.pp // len(ranks))
                self._add_message(next_rank, rank, chain.back * chain.pp // len(ranks))

    def add_expert_traffic(self, exchange: ExpertTraffic) -> None:
        """Adds bytes from each rank to those at its place in the replicas of its group, and back."""
        ranks, replica = self.placed[exchange.group], exchange.pp * exchange.tp
        for first in range(0, len(ranks), replica * exchange.replicas):
            for place in range(replica):
                members = ranks[first + place : first + replica * exchange.replicas : replica]
                members_on_node = Counter(map(self._node_of, members))
                for rank in members:
                    near = members_on_node[self._node_of(rank)]
                    for ways in (self.outgoing, self.incoming):
                        ways[False][rank] += exchange.size * (near - 1) // len(members)
                        ways[True][rank] += exchange.size * (len(members) - near) // len(members)

    def _add_message(self, src: int, dst: int, size: int) -> None:
        crosses = self._node_of(src) != self._node_of(dst)
        self.outgoing[crosses][src] += size
        self.incoming[crosses][dst] += size

    def busiest_link_ns(self, ranks: Sequence[int]) -> int:
        """Time of the busier direction, for its bytes, of the busiest of some ranks."""
        between, inside = self.cluster.between.bytes_per_s, self.cluster.inside.bytes_per_s
        sizes = {  # equal for most ranks of a group
            (way[True][rank], way[False][rank]) for way in (self.outgoing, self.incoming) for rank in ranks
        }
        return max(10**9 * b // between + 10**9 * i // inside for b, i in sizes)
