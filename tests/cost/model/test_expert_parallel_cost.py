"""What a rank with part of the experts holds and takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.cluster import parse_cluster
from secc.cost.model.expert_parallel_cost import busiest_part, cost_with_expert_parts, exchange_ns
from secc.cost.model.memory import rank_memory
from secc.cost.model.section_cost import SectionCost
from secc.runtime.plan.expr_eval import evaluate_expr

MIXTURE = SectionCost(
    flops="1200*B",
    backward_flops="2400*B",
    work="1200*B",
    backward_work="2400*B",
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
    rank = cost_with_expert_parts(MIXTURE, tp, 1, ep)
    assert (rank.params, rank.param_bytes, rank.expert_replicas) == (params, 2 * params, max(1, ep // tp))
    assert evaluate_expr(rank.work, {"B": 10}) == 12000 // tp  # even loads: every rank gets its share


def test_optimizer_states_of_experts_are_shared_by_the_replicas_that_hold_them() -> None:
    whole, parts = MIXTURE, cost_with_expert_parts(MIXTURE, 1, 1, 4)
    alone, divided = (rank_memory(cost, 0, dp=8, sharding="zero1").optimizer for cost in (whole, parts))
    assert alone == 2 * 2000 // 8 and divided == 2 * (400 // 8 + 400 // 2)
    gathered = rank_memory(parts, 0, dp=8, sharding="zero3")
    assert gathered.parameters == 400 // 8 + 400


def test_an_uneven_load_slows_the_busiest_rank_and_rows_travel_by_the_slowest_link() -> None:
    cluster, uneven = parse_cluster("2x8xH100"), replace(MIXTURE, expert_load=1.0)
    rank = cost_with_expert_parts(uneven, 1, 1, 4)
    factor = float(busiest_part(8, 4, 1.0))
    assert evaluate_expr(rank.work, {"B": 1000}) == pytest.approx(1000 * (400 + 800 * factor), rel=1e-3)
    near, far = (
        evaluate_expr(exchange_ns(cost_with_expert_parts(uneven, 1, 1, ep), 1, 1, ep, cluster), {"B": 10**9})
        for ep in (4, 8)
    )
    across = cost_with_expert_parts(replace(uneven, experts=16), 1, 1, 16)
    assert exchange_ns(MIXTURE, 1, 1, 1, cluster) == "0" and 0 < near < far
    assert evaluate_expr(exchange_ns(across, 1, 1, 16, cluster), {"B": 10**9}) > 2 * far
