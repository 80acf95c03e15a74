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
class Span:
    """Where a group's ranks are: `inside` of them on each node, on `nodes` nodes."""

    inside: int
    nodes: int

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes


def in_a_row(ranks: int, cluster: Cluster, stride: int = 1) -> Span:
    """The span of `ranks` ranks, every `stride`-th one."""
    inside = max(1, min(ranks, cluster.per_node // stride))
    return Span(inside, ceil(ranks / inside))


def of_ranks(ranks: Iterable[int], cluster: Cluster) -> Span:
    """The span of these ranks; where nodes hold unequally many, as if all held as many as the fullest."""
    nodes = [r // cluster.per_node for r in ranks]
    inside = max(nodes.count(n) for n in set(nodes))
    return Span(inside, ceil(len(nodes) / inside))


def all_reduce_ns(size: int, span: Span, cluster: Cluster) -> int:
    """A sum of `size` bytes over a span."""
    if span.ranks < 2 or not size:
        return 0
    if span.nodes == 1:
        return _sum(size, span.ranks, cluster.inside, cluster)
    flat = _ring("all_reduce", size, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return flat
    parts = _sum(-(-size // span.inside), span.nodes, cluster.between, cluster)
    return min(flat, _ring("all_reduce", size, span.inside, cluster.inside, cluster) + parts)


def reduce_scatter_ns(size: int, span: Span, cluster: Cluster) -> int:
    """A reduce-scatter of `size` bytes over a span, of which each rank gets its part."""
    return _half("reduce_scatter", size, span, cluster)


def all_gather_ns(size: int, span: Span, cluster: Cluster) -> int:
    """An all-gather over a span, after which each rank has `size` bytes."""
    return _half("all_gather", size, span, cluster)


def all_reduce_ring(ranks: int, cluster: Cluster) -> tuple[int, Link]:
    """How many messages of an n-th of the bytes a sum over n ranks in a row sends, and what one of them
    takes."""
    link = cluster.link(ranks)
    return 2 * (ranks - 1), link.ring("all_reduce", ranks) or link


def _half(collective: str, size: int, span: Span, cluster: Cluster) -> int:
    if span.ranks < 2 or not size:
        return 0
    if span.nodes == 1:
        return _ring(collective, size, span.ranks, cluster.inside, cluster)
    flat = _ring(collective, size, span.ranks, cluster.between, cluster)
    if cluster.device.backend == "cpu":
        return flat
    parts = _ring(collective, -(-size // span.inside), span.nodes, cluster.between, cluster)
    return min(flat, _ring(collective, size, span.inside, cluster.inside, cluster) + parts)


def _sum(size: int, ranks: int, link: Link, cluster: Cluster) -> int:
    ring = _ring("all_reduce", size, ranks, link, cluster)
    return (
        ring
        if cluster.device.backend == "cpu" or link.ring("all_reduce", ranks)
        else min(ring, _tree(size, ranks, link))
    )


def _ring(collective: str, size: int, ranks: int, link: Link, cluster: Cluster) -> int:
    if ranks < 2:
        return 0
    measured = link.ring(collective, ranks)
    rounds = 2 if collective == "all_reduce" else 1
    if collective == "reduce_scatter" and cluster.device.backend == "cpu" and measured is None:
        rounds = 4
    return rounds * (ranks - 1) * (measured or link).message_ns(size // ranks)


def _tree(size: int, ranks: int, link: Link) -> int:
    return (
        2 * ceil(log2(ranks)) * link.latency_ns + 2 * (link.message_ns(size) - link.latency_ns)
        if ranks > 1
        else 0
    )
