"""What ranks exchange under context parallelism, inside a node and between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.cluster import parse_cluster
from secc.cost.model.collectives import all_gather_ns, reduce_scatter_ns, span_of_consecutive_ranks
from secc.cost.model.cp_scaling import price_row_exchange
from secc.cost.model.section_cost import SectionCost
from secc.cost.model.tp_pp_scaling import cost_on_rank
from secc.runtime.plan.expr_eval import evaluate_expr

LAYERS = SectionCost(
    flops="0", backward_flops="0", work="0", backward_work="0", saved="0", glue_bytes="0", ops=0, params=0,
    trainable=0, param_bytes=0, trainable_bytes=0, dtype="bf16", label="counted", layers=4,
    exchanged_bytes="4096*S",
)  # fmt: skip
SIZES = {"S": 10**6}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("cp", [2, 8, 16])
def test_an_exchange_is_priced_as_collectives_of_each_layer(cp: int, tp: int) -> None:
    cluster = parse_cluster("16x8xH100")
    found, span = price_row_exchange(LAYERS, tp, cp, cluster), span_of_consecutive_ranks(cp, cluster, tp)
    size = 4096 * 10**6 // LAYERS.layers
    gather = LAYERS.layers * all_gather_ns(size, span, cluster)
    scatter = LAYERS.layers * reduce_scatter_ns(2 * size, span, cluster)  # in float32
    assert evaluate_expr(found.forward_ns, SIZES) == pytest.approx(gather, rel=0.01)
    assert evaluate_expr(found.backward_ns("none"), SIZES) == pytest.approx(scatter, rel=0.01)
    assert evaluate_expr(found.backward_ns("full"), SIZES) == pytest.approx(gather + scatter, rel=0.01)


def test_tensor_parallelism_divides_heads_and_float32_is_not_widened() -> None:
    cluster = parse_cluster("1x8xH100")

    def forward_ns(tp: int) -> int:
        exchange = price_row_exchange(cost_on_rank(LAYERS, tp), tp, 2, cluster)
        return evaluate_expr(exchange.forward_ns, SIZES)

    assert forward_ns(4) < 0.3 * forward_ns(1)
    full = price_row_exchange(replace(LAYERS, dtype="f32"), 1, 2, cluster)
    assert full.forward_ns == full.scatter_ns
    assert price_row_exchange(replace(LAYERS, exchanged_bytes="0"), 1, 2, cluster).forward_ns == "0"
