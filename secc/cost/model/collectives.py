"""Collective times by an alpha-beta model on two levels: the ranks inside a node, and the nodes.

A ring over n ranks sends 2(n - 1) messages of 1/n of the bytes for an all-reduce, (n - 1) for a
reduce-scatter or all-gather. A tree sends the bytes up and down, pipelined, with 2 log2(n) latencies
(Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
NCCL's double binary trees). Over two levels, each node first reduce-scatters among its ranks, then the k-th
ranks of all nodes all-reduce the k-th shards at the same time, each over its own link, and the nodes
all-gather. NCCL picks the fastest of these. gloo has only rings, and its reduce-scatter takes about twice as
long as its all-reduce.

Collectives that were measured on a link (`secc profile --links`) are stored as the time of one message of a
ring; the measurement with the nearest number of ranks is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2

from secc.cluster import Cluster, Link


@dataclass(frozen=True)
class RankSpan:
    """Placement of a group of ranks: `ranks_per_node` on each of `nodes` nodes."""

    ranks_per_node: int
    nodes: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.ranks_per_node * self.nodes


def span_of_consecutive_ranks(ranks: int, cluster: Cluster, stride: int = 1) -> RankSpan:
    """The placement of `ranks` ranks at distance `stride`."""
    per_node = max(1, min(ranks, cluster.per_node // stride))
    return RankSpan(per_node, ceil(ranks / per_node))


def span_of_ranks(ranks: Iterable[int], cluster: Cluster) -> RankSpan:
    """The placement of these ranks. If nodes hold different numbers of them, all count as holding the
    largest."""
    nodes = [r // cluster.per_node for r in ranks]
    per_node = max(nodes.count(n) for n in set(nodes))
    return RankSpan(per_node, ceil(len(nodes) / per_node))


def all_reduce_ns(size: int, span: RankSpan, cluster: Cluster) -> int:
    """Nanoseconds of an all-reduce of `size` bytes."""
    if span.ranks < 2 or not size:
        return 0
    if span.nodes == 1:
        return _single_level_all_reduce_ns(size, span.ranks, cluster.inside, cluster)
    single_ring = _ring_ns("all_reduce", size, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return single_ring
    between_nodes = _single_level_all_reduce_ns(
        -(-size // span.ranks_per_node), span.nodes, cluster.between, cluster
    )
    return min(
        single_ring,
        _ring_ns("all_reduce", size, span.ranks_per_node, cluster.inside, cluster) + between_nodes,
    )


def reduce_scatter_ns(size: int, span: RankSpan, cluster: Cluster) -> int:
    """Nanoseconds of a reduce-scatter of `size` bytes; each rank gets one shard of the sum."""
    return _half_all_reduce_ns("reduce_scatter", size, span, cluster)


def all_gather_ns(size: int, span: RankSpan, cluster: Cluster) -> int:
    """Nanoseconds of an all-gather, after which each rank has `size` bytes."""
    return _half_all_reduce_ns("all_gather", size, span, cluster)


@dataclass(frozen=True)
class AllToAllLink:
    """What an all-to-all moves over one kind of link: `share` of a rank's bytes, at its rate."""

    share: Fraction
    latency_ns: int
    bytes_per_s: int


def all_to_all_links(span: RankSpan, cluster: Cluster) -> list[AllToAllLink]:
    """The links that an all-to-all over these ranks uses at the same time: inside nodes, between them.

    A rank keeps its own part. Its messages to all others start together, so latencies do not add up one by
    one but grow with the logarithm of their number. Measured all-to-alls (`secc profile --links`) are the
    times of a message to each of the others.
    """
    links: list[AllToAllLink] = []
    for link, others in (
        (cluster.inside, span.ranks_per_node - 1),
        (cluster.between, span.ranks - span.ranks_per_node),
    ):
        if not others:
            continue
        measured = link.measured_link("all_to_all", span.ranks)
        latency = others * measured.latency_ns if measured else ceil(log2(others + 1)) * link.latency_ns
        rate = (measured or link).bytes_per_s
        links.append(AllToAllLink(Fraction(others, span.ranks), latency, rate))
    return links


def all_reduce_messages(ranks: int, cluster: Cluster) -> tuple[int, Link]:
    """(messages of 1/n of the bytes in a ring all-reduce over n consecutive ranks, link with the time of
    one)."""
    link = cluster.slowest_link(ranks)
    return 2 * (ranks - 1), link.measured_link("all_reduce", ranks) or link


def half_all_reduce_rate(collective: str, span: RankSpan, cluster: Cluster) -> tuple[int, Fraction]:
    """(latency in ns, ns per byte) of an "all_gather" or "reduce_scatter" of a number of bytes that is known
    later; bytes are those of the whole. Over nodes, the way that is faster for many bytes."""
    if span.ranks < 2:
        return 0, Fraction(0)
    if span.nodes == 1:
        return _ring_rate(collective, span.ranks, cluster.inside, cluster)
    single = _ring_rate(collective, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return single
    inside = _ring_rate(collective, span.ranks_per_node, cluster.inside, cluster)
    between = _ring_rate(collective, span.nodes, cluster.between, cluster)
    levels = inside[0] + between[0], inside[1] + between[1] / span.ranks_per_node
    return min(single, levels, key=lambda way: (way[1], way[0]))


def _half_all_reduce_ns(collective: str, size: int, span: RankSpan, cluster: Cluster) -> int:
    if span.ranks < 2 or not size:
        return 0
    if span.nodes == 1:
        return _ring_ns(collective, size, span.ranks, cluster.inside, cluster)
    single_ring = _ring_ns(collective, size, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return single_ring
    between_nodes = _ring_ns(
        collective, -(-size // span.ranks_per_node), span.nodes, cluster.between, cluster
    )
    return min(
        single_ring, _ring_ns(collective, size, span.ranks_per_node, cluster.inside, cluster) + between_nodes
    )


def _single_level_all_reduce_ns(size: int, ranks: int, link: Link, cluster: Cluster) -> int:
    ring = _ring_ns("all_reduce", size, ranks, link, cluster)
    if cluster.device.backend == "cpu" or link.measured_link("all_reduce", ranks):
        return ring
    return min(ring, _tree_ns(size, ranks, link))


def _ring_ns(collective: str, size: int, ranks: int, link: Link, cluster: Cluster) -> int:
    if ranks < 2:
        return 0
    messages, link = _ring_messages(collective, ranks, link, cluster)
    return messages * link.message_ns(size // ranks)


def _ring_rate(collective: str, ranks: int, link: Link, cluster: Cluster) -> tuple[int, Fraction]:
    """(latency in ns, ns per byte of the whole) of a ring."""
    messages, link = _ring_messages(collective, ranks, link, cluster)
    return messages * link.latency_ns, Fraction(messages * 10**9, ranks * max(1, link.bytes_per_s))


def _ring_messages(collective: str, ranks: int, link: Link, cluster: Cluster) -> tuple[int, Link]:
    """(messages of 1/n of the bytes, link with the time of one)."""
    measured = link.measured_link(collective, ranks)
    rounds = 2 if collective == "all_reduce" else 1
    if collective == "reduce_scatter" and cluster.device.backend == "cpu" and measured is None:
        rounds = 4  # gloo: twice its all-reduce
    return rounds * (ranks - 1), measured or link


def _tree_ns(size: int, ranks: int, link: Link) -> int:
    if ranks < 2:
        return 0
    return 2 * ceil(log2(ranks)) * link.latency_ns + 2 * (link.message_ns(size) - link.latency_ns)
