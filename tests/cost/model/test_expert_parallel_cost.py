"""What a rank with part of the experts holds and takes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from secc.cluster import parse_cluster
from secc.cost.model.expert_parallel_cost import (
    busiest_part,
    busiest_part_of,
    cost_with_expert_parts,
    exchange_ns,
)
from secc.cost.model.grouped_products import grouped_backward_ns, grouped_forward_ns
from secc.cost.model.memory import rank_memory
from secc.cost.model.section_cost import SectionCost
from secc.runtime.plan.expr_eval import evaluate_expr

MIXTURE = SectionCost(
    flops="1200*B",
    backward_flops="2400*B",
    work="400*B",
    backward_work="800*B",
    saved="100*B",
    glue_bytes="0",
    ops=10,
    params=1000,
    trainable=1000,
    param_bytes=2000,
    trainable_bytes=2000,
    dtype="bf16",
    label="counted",
    layers=4,
    experts=8,
    expert_params=800,
    expert_trainable=800,
    expert_bytes=1600,
    expert_trainable_bytes=1600,
    routed_work="800*B",
    routed_backward_work="1600*B",
    routed_bytes="64*B",
    expert_row_work=1600,
    expert_layers=4,
    expert_load=0.0,
)


def test_even_loads_have_no_busiest_part() -> None:
    assert busiest_part(128, 8, 0.0) == 1 and busiest_part(128, 1, 0.5) == 1
    assert 1 < busiest_part(128, 8, 0.3) < busiest_part(128, 8, 0.6) < busiest_part(128, 64, 0.6)
    assert busiest_part(4, 4, 1.0) == pytest.approx(4 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.01)


@pytest.mark.parametrize(("tp", "ep", "params"), [(1, 1, 1000), (2, 2, 500), (1, 4, 400), (2, 8, 200)])
def test_experts_are_counted_once_in_a_group(tp: int, ep: int, params: int) -> None:
    """Above tp, a rank has 1/ep of the experts, and 1/tp of all else."""
    rank = cost_with_expert_parts(MIXTURE, tp, ep)
    assert (rank.params, rank.param_bytes, rank.expert_replicas) == (params, 2 * params, max(1, ep // tp))
    # even loads: every rank gets its share
    assert evaluate_expr(f"{rank.work} + {rank.routed_work}", {"B": 10}) == 12000 // tp
    assert rank.expert_row_work == 1600 // max(tp, ep)


def test_optimizer_states_of_experts_are_shared_by_the_replicas_that_hold_them() -> None:
    whole, parts = MIXTURE, cost_with_expert_parts(MIXTURE, 1, 4)
    alone, divided = (rank_memory(cost, 0, dp=8, sharding="zero1").optimizer for cost in (whole, parts))
    assert alone == 2 * 2000 // 8 and divided == 2 * (400 // 8 + 400 // 2)
    gathered = rank_memory(parts, 0, dp=8, sharding="zero3")
    assert gathered.parameters == 400 // 8 + 400


def test_an_uneven_load_slows_the_busiest_rank_and_rows_travel_by_the_slowest_link() -> None:
    cluster, uneven = parse_cluster("2x8xH100"), replace(MIXTURE, expert_load=1.0)
    rank = cost_with_expert_parts(uneven, 1, 4)
    factor = float(busiest_part(8, 4, 1.0))
    assert evaluate_expr(rank.routed_work, {"B": 1000}) == pytest.approx(1000 * 800 * factor, rel=1e-3)
    near, far = (
        evaluate_expr(exchange_ns(cost_with_expert_parts(uneven, 1, ep), 1, ep, cluster), {"B": 10**9})
        for ep in (4, 8)
    )
    across = cost_with_expert_parts(replace(uneven, experts=16), 1, 16)
    assert exchange_ns(MIXTURE, 1, 1, cluster) == "0" and 0 < near < far
    assert evaluate_expr(exchange_ns(across, 1, 16, cluster), {"B": 10**9}) > 2 * far


def test_rows_to_other_nodes_travel_while_rows_inside_the_node_do() -> None:
    """16 ranks on two nodes: half of the rows cross nodes at a ninth of the rate, and nothing else counts."""
    cluster = parse_cluster("2x8xH100")
    rank = cost_with_expert_parts(replace(MIXTURE, experts=16), 1, 16)
    ns = evaluate_expr(exchange_ns(rank, 1, 16, cluster), {"B": 10**9})
    moved = evaluate_expr(rank.routed_bytes, {"B": 10**9})
    latency = 3 * 4 * 4 * cluster.between.latency_ns  # 3 exchanges of 4 mixtures; log2 of 9 is above 3
    assert ns == pytest.approx(latency + 2 * moved / 2 / cluster.between.bytes_per_s * 1e9, rel=1e-3)


def test_products_of_few_rows_take_as_long_as_reading_all_experts() -> None:
    """The time rises with lost rows, but with the number of rows only where they take longer than reading."""
    device = replace(parse_cluster("1x8xH100").device, expert_lost_rows=64)
    large = replace(MIXTURE, expert_bytes=3350 * 10**6, expert_trainable_bytes=3350 * 10**6)
    assert evaluate_expr(grouped_forward_ns(large, device), {"B": 1}) == 10**6  # 3.35 GB at 3.35 TB/s
    busy = replace(large, routed_work="593400000000*B")  # a ms a sample at 60% of 989 TFLOP/s
    assert evaluate_expr(grouped_forward_ns(busy, device), {"B": 10}) == pytest.approx(10 * 10**6, rel=1e-3)
    lossy = replace(busy, expert_row_work=593_400_000_000)
    assert evaluate_expr(grouped_forward_ns(lossy, device), {"B": 10}) == pytest.approx(74 * 10**6, rel=1e-3)
    # A backward reads weights, writes gradients, and adds them in three more passes.
    assert evaluate_expr(grouped_backward_ns(large, device), {"B": 1}) == 5 * 10**6
    frozen = replace(large, expert_trainable=0, expert_trainable_bytes=0)
    assert evaluate_expr(grouped_backward_ns(frozen, device), {"B": 1}) == 10**6


def test_counted_loads_replace_the_assumed_ones() -> None:
    counted = replace(MIXTURE, expert_load=1.0, expert_parts=((4, 1250),))
    assert busiest_part_of(counted, 4) == Fraction(5, 4)
    assert busiest_part_of(counted, 2) == busiest_part(8, 2, 1.0)
    rank = cost_with_expert_parts(counted, 1, 4)
    assert evaluate_expr(rank.routed_work, {"B": 1000}) == 1000 * 800 * 5 // 4
