"""Collectives: which ranks span what, and which way is the fastest."""

from __future__ import annotations

import pytest

from secc.cluster import parse
from secc.cost.collectives import Span, all_reduce_ns, half_reduce_ns, in_a_row, of_ranks

GPUS, CPUS = parse("4x8xH100"), parse("4x8xcpu")
GIB = 1 << 30


@pytest.mark.parametrize(("ranks", "stride", "span"), [(8, 1, (8, 1)), (16, 1, (8, 2)), (4, 8, (1, 4)), (8, 4, (2, 4)), (1, 1, (1, 1))])
def test_ranks_in_a_row(ranks: int, stride: int, span: tuple[int, int]) -> None:
    assert in_a_row(ranks, GPUS, stride) == of_ranks(range(0, ranks * stride, stride), GPUS) == Span(*span)


def test_large_sums_take_rings_and_small_ones_over_many_nodes_trees() -> None:
    many = parse("64x8xH100")
    wide = Span(1, 64)
    ring = 2 * 63 * many.between.message_ns(8 * GIB // 64)
    assert all_reduce_ns(8 * GIB, wide, many) == ring
    assert all_reduce_ns(1024, wide, many) < 2 * 63 * many.between.latency_ns / 5


def test_nodes_sum_their_parts_at_the_same_time() -> None:
    """Eight links between nodes carry an eighth each; one ring through all ranks would carry all on each link."""
    two_levels = all_reduce_ns(GIB, Span(8, 4), GPUS)
    assert two_levels < 0.5 * 2 * 31 * GPUS.between.message_ns(GIB // 32)
    assert two_levels > all_reduce_ns(GIB, Span(8, 1), GPUS)


def test_gloo_has_rings_alone() -> None:
    assert all_reduce_ns(GIB, Span(8, 4), CPUS) == 2 * 31 * CPUS.between.message_ns(GIB // 32)


def test_halves_make_a_whole() -> None:
    assert 2 * half_reduce_ns(GIB, Span(8, 1), GPUS) == all_reduce_ns(GIB, Span(8, 1), GPUS)
    assert half_reduce_ns(GIB, Span(1, 1), GPUS) == all_reduce_ns(0, Span(8, 4), GPUS) == 0
