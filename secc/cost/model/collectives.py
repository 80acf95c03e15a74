"""Collectives by an α-β model on a cluster's levels: the ranks inside a node, and the nodes.

A ring over n ranks sends 2(n - 1) messages of an n-th of the bytes for a sum, (n - 1) for half of one (a
reduce-scatter, an all-gather). A tree sends the bytes up and down, pipelined, with 2 log2(n) latencies
(Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
NCCL's double binary trees). Over two levels each node first shares out its sum, then the k-th ranks of all
nodes sum their k-th parts at the same time, each over its own link, and the nodes gather. NCCL takes what is
fastest; gloo has rings alone, and its reduce-scatter takes about twice the time of its all-reduce.

A link on which collectives were measured (`secc profile --links`) has each as the messages of a ring, at the
nearest number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2

from secc.cluster import Cluster, Link


@dataclass(frozen=True)
class RankSpan:
    """Where a group's ranks are: `inside` of them on each node, on `nodes` nodes."""

    ranks_per_node: int
    nodes: int

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes


def span_of_consecutive_ranks(ranks: int, cluster: Cluster, stride: int = 1) -> RankSpan:
    """The span of `ranks` ranks, every `stride`-th one."""
    inside = max(1, min(ranks, cluster.per_node // stride))
    return RankSpan(inside, ceil(ranks / inside))


def span_of_ranks(ranks: Iterable[int], cluster: Cluster) -> RankSpan:
    """The span of these ranks; where nodes hold unequally many, as if all held as many as the fullest."""
    nodes = [r // cluster.per_node for r in ranks]
    inside = max(nodes.count(n) for n in set(nodes))
    return RankSpan(inside, ceil(len(nodes) / inside))


def all_reduce_ns(size: int, span: RankSpan, cluster: Cluster) -> int:
    """A sum of `size` bytes over a span."""
    if span.ranks < 2 or not size:
        return 0
    if span.nodes == 1:
        return _single_level_all_reduce_ns(size, span.ranks, cluster.inside, cluster)
    flat = _ring_ns("all_reduce", size, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return flat
    parts = _single_level_all_reduce_ns(-(-size // span.ranks_per_node), span.nodes, cluster.between, cluster)
    return min(flat, _ring_ns("all_reduce", size, span.ranks_per_node, cluster.inside, cluster) + parts)


def reduce_scatter_ns(size: int, span: RankSpan, cluster: Cluster) -> int:
    """A reduce-scatter of `size` bytes over a span, of which each rank gets its part."""
    return _half_all_reduce_ns("reduce_scatter", size, span, cluster)


def all_gather_ns(size: int, span: RankSpan, cluster: Cluster) -> int:
    """An all-gather over a span, after which each rank has `size` bytes."""
    return _half_all_reduce_ns("all_gather", size, span, cluster)


def all_reduce_messages(ranks: int, cluster: Cluster) -> tuple[int, Link]:
    """How many messages of an n-th of the bytes a sum over n ranks in a row sends, and what one of them
    takes."""
    link = cluster.slowest_link(ranks)
    return 2 * (ranks - 1), link.measured_link("all_reduce", ranks) or link


def _half_all_reduce_ns(collective: str, size: int, span: RankSpan, cluster: Cluster) -> int:
    if span.ranks < 2 or not size:
        return 0
    if span.nodes == 1:
        return _ring_ns(collective, size, span.ranks, cluster.inside, cluster)
    flat = _ring_ns(collective, size, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return flat
    parts = _ring_ns(collective, -(-size // span.ranks_per_node), span.nodes, cluster.between, cluster)
    return min(flat, _ring_ns(collective, size, span.ranks_per_node, cluster.inside, cluster) + parts)


def _single_level_all_reduce_ns(size: int, ranks: int, link: Link, cluster: Cluster) -> int:
    ring = _ring_ns("all_reduce", size, ranks, link, cluster)
    return (
        ring
        if cluster.device.backend == "cpu" or link.measured_link("all_reduce", ranks)
        else min(ring, _tree_ns(size, ranks, link))
    )


def _ring_ns(collective: str, size: int, ranks: int, link: Link, cluster: Cluster) -> int:
    if ranks < 2:
        return 0
    measured = link.measured_link(collective, ranks)
    rounds = 2 if collective == "all_reduce" else 1
    if collective == "reduce_scatter" and cluster.device.backend == "cpu" and measured is None:
        rounds = 4
    return rounds * (ranks - 1) * (measured or link).message_ns(size // ranks)


def _tree_ns(size: int, ranks: int, link: Link) -> int:
    return (
        2 * ceil(log2(ranks)) * link.latency_ns + 2 * (link.message_ns(size) - link.latency_ns)
        if ranks > 1
        else 0
    )
