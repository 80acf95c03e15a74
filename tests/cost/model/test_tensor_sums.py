"""Prices of sums over tp, in the open and behind products."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from secc.cluster import parse_cluster
from secc.cost.model.section_cost import SectionCost
from secc.cost.model.tp_pp_scaling import (
    HIDDEN_PERCENT,
    choose_overlap,
    cost_on_rank,
    price_tensor_sums,
)
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.tensor_parallel.overlapped_products import PRODUCT_CHUNKS

HIDDEN, LAYERS, TP = 8192, 4, 8
PARAMS = 12 * HIDDEN**2 * LAYERS
CLUSTER = parse_cluster("1x8xH100")
COST = SectionCost(
    flops=f"{2 * PARAMS}*B*S",
    backward_flops=f"{4 * PARAMS}*B*S",
    work=f"{2 * PARAMS}*B*S",
    backward_work=f"{4 * PARAMS}*B*S",
    layer_work=f"{2 * PARAMS}*B*S",
    saved="0",
    glue_bytes="0",
    ops=0,
    params=PARAMS,
    trainable=PARAMS,
    param_bytes=2 * PARAMS,
    trainable_bytes=2 * PARAMS,
    dtype="bf16",
    label="counted",
    layers=LAYERS,
    layer_input_bytes=f"{2 * LAYERS * HIDDEN}*B*S",
)
SIZES = {"B": 1, "S": 8192}


def price_in_seconds(cost: SectionCost, overlap: str, splits: bool = False) -> tuple[float, float, float]:
    """(forward, backward, backward with full recomputation) of the sums of a rank."""
    sums = price_tensor_sums(cost_on_rank(cost, TP), TP, CLUSTER, overlap, SIZES, splits)
    texts = (sums.forward_ns, sums.backward_ns("none"), sums.backward_ns("full"))
    forward, backward, again = (evaluate_expr(text, SIZES) / 1e9 for text in texts)
    return forward, backward, again


def test_hidden_sums_leave_what_no_product_hides() -> None:
    opened, hidden = price_in_seconds(COST, "none"), price_in_seconds(COST, "both")
    assert opened[0] == opened[1]
    assert opened[2] == pytest.approx(1.5 * opened[0], rel=1e-6)  # one of a layer's two sums runs again
    least = 1 - Fraction(HIDDEN_PERCENT, 100)
    assert float(least) * opened[1] < hidden[1] < opened[1]
    assert opened[0] / PRODUCT_CHUNKS < hidden[0] < opened[0]  # the last chunk's sum is behind no product
    assert hidden[2] == pytest.approx(hidden[0] / 2 + hidden[1], rel=1e-6)
    assert price_in_seconds(COST, "backward")[:2] == (opened[0], hidden[1])


def test_only_weight_gradients_hide_sums_of_a_backward() -> None:
    opened = price_in_seconds(COST, "none")
    frozen = replace(COST, trainable=0, trainable_bytes=0)
    for cost, splits in ((frozen, False), (COST, True)):
        forward, backward, _ = price_in_seconds(cost, "both", splits)
        assert backward == opened[1] and forward < opened[0]


def test_only_reduce_scatters_of_sequence_parallelism_are_hidden() -> None:
    cut = replace(COST, sequence_parallel=True)
    opened, hidden = price_in_seconds(cut, "none"), price_in_seconds(cut, "both")
    # Of five halves of an all-reduce for each of two sums, two are reduce-scatters.
    assert opened[1] * 0.6 < hidden[1] < opened[1] and opened[0] * 0.6 < hidden[0] < opened[0]


def test_sums_of_experts_are_in_the_open() -> None:
    with_experts = replace(COST, expert_layers=LAYERS)
    assert (
        price_in_seconds(COST, "both")[1]
        < price_in_seconds(with_experts, "both")[1]
        < price_in_seconds(COST, "none")[1]
    )


def test_the_shortest_way_is_chosen() -> None:
    rank = cost_on_rank(COST, TP)

    def choose_for(cost: SectionCost = rank, samples: int = 1, length: int = 8192, pinned: str = "") -> str:
        sizes = {"B": samples, "S": length}
        return choose_overlap(cost, TP, CLUSTER, "train", sizes, pinned)

    assert (choose_for(), choose_for(length=16), choose_for(pinned="none")) == ("both", "backward", "none")
    assert choose_for(replace(rank, trainable=0), length=16) == "none"  # nothing behind which to hide
    assert choose_for(replace(rank, sequence_parallel=True)) == "both"
    assert choose_overlap(rank, 1, CLUSTER, "train", SIZES) == "none"
    assert choose_overlap(rank, 2, parse_cluster("local:2"), "train", SIZES) == "none"
    assert choose_overlap(rank, 2, parse_cluster("local:2"), "train", SIZES, "both") == "both"
