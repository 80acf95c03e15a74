"""Collectives: placement of groups of ranks, and the fastest algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.cluster import Link, MeasuredRing, parse_cluster
from secc.cost.model.collectives import (
    RankSpan,
    all_gather_ns,
    all_reduce_ns,
    reduce_scatter_ns,
    span_of_consecutive_ranks,
    span_of_ranks,
)
from secc.profile.time_collectives import COLLECTIVE_SIZES, fit_rings

GPUS, CPUS = parse_cluster("4x8xH100"), parse_cluster("4x8xcpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("ranks", "stride", "span"),
    [(8, 1, (8, 1)), (16, 1, (8, 2)), (4, 8, (1, 4)), (8, 4, (2, 4)), (1, 1, (1, 1))],
)
def test_span_of_consecutive_ranks(ranks: int, stride: int, span: tuple[int, int]) -> None:
    assert (
        span_of_consecutive_ranks(ranks, GPUS, stride)
        == span_of_ranks(range(0, ranks * stride, stride), GPUS)
        == RankSpan(*span)
    )


def test_large_sums_use_rings_and_small_ones_over_many_nodes_use_trees() -> None:
    many = parse_cluster("64x8xH100")
    wide = RankSpan(1, 64)
    ring = 2 * 63 * many.between.message_ns(8 * GIB // 64)
    assert all_reduce_ns(8 * GIB, wide, many) == ring
    assert all_reduce_ns(1024, wide, many) < 2 * 63 * many.between.latency_ns / 5


def test_shards_are_reduced_between_nodes_in_parallel() -> None:
    """Eight links between nodes carry an eighth each; a single ring through all ranks would carry
    everything on each link."""
    two_levels = all_reduce_ns(GIB, RankSpan(8, 4), GPUS)
    assert two_levels < 0.5 * 2 * 31 * GPUS.between.message_ns(GIB // 32)
    assert two_levels > all_reduce_ns(GIB, RankSpan(8, 1), GPUS)


def test_gloo_uses_only_rings() -> None:
    assert all_reduce_ns(GIB, RankSpan(8, 4), CPUS) == 2 * 31 * CPUS.between.message_ns(GIB // 32)


def test_reduce_scatter_and_all_gather_take_as_long_as_an_all_reduce() -> None:
    span = RankSpan(8, 1)
    assert reduce_scatter_ns(GIB, span, GPUS) + all_gather_ns(GIB, span, GPUS) == all_reduce_ns(
        GIB, span, GPUS
    )
    assert all_gather_ns(GIB, RankSpan(1, 1), GPUS) == all_reduce_ns(0, RankSpan(8, 4), GPUS) == 0


def test_measured_collectives_replace_the_model() -> None:
    """A ring uses the measurement of its collective at the nearest number of ranks; without one, the
    link's message time."""
    measured = (
        MeasuredRing("all_reduce", 2, 1000, 10**9),
        MeasuredRing("all_reduce", 8, 3000, 10**9),
        MeasuredRing("all_gather", 2, 500, 2 * 10**9),
    )
    cluster = replace(parse_cluster("local:8"), inside=Link(10, 10**12, measured))
    assert all_reduce_ns(1 << 20, RankSpan(2, 1), cluster) == 2 * (1000 + (1 << 19))
    assert all_reduce_ns(1 << 20, RankSpan(6, 1), cluster) == 10 * (3000 + (1 << 20) // 6)
    assert all_gather_ns(1 << 20, RankSpan(2, 1), cluster) == 500 + (1 << 18)
    assert reduce_scatter_ns(1 << 20, RankSpan(2, 1), cluster) == 4 * cluster.inside.message_ns(1 << 19)


def test_measured_times_are_fitted_as_ring_messages() -> None:
    times = {
        size: 6 * (20_000 + size / 4 * 0.5) for size in COLLECTIVE_SIZES
    }  # four ranks send six messages of a fourth of the bytes
    assert fit_rings(4, {"all_reduce": times}) == [MeasuredRing("all_reduce", 4, 20_000, 2 * 10**9)]
