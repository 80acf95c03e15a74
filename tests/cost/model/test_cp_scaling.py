"""What ranks exchange under context parallelism, inside a node and between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.cluster import parse_cluster
from secc.cost.model.collectives import all_gather_ns, reduce_scatter_ns, span_of_consecutive_ranks
from secc.cost.model.cp_scaling import choose_row_attention, cost_on_rows, price_row_exchange
from secc.cost.model.recompute_cost import RecomputeCost
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


def test_heads_are_exchanged_where_that_is_faster_and_ranks_divide_them() -> None:
    cluster = parse_cluster("1x8xH100")

    def chosen(queries: int, heads: int, cp: int, tp: int = 1, pinned: str = "") -> str:
        section = replace(LAYERS, query_bytes=f"{4096 * queries}*S", key_heads=heads)
        rank = cost_on_rank(section, tp)
        return choose_row_attention(section, rank, tp, cp, cluster, pinned)

    assert chosen(1, 32, 8) == "ulysses"  # as many heads of keys as of queries
    assert (
        chosen(8, 8, 2) == "gather" and chosen(8, 8, 8) == "ulysses"
    )  # eight times as many heads of queries
    assert chosen(8, 8, 2, pinned="ulysses") == "ulysses"
    assert [chosen(1, heads, 4, 2) for heads in (0, 4, 8)] == ["gather", "gather", "ulysses"]


@pytest.mark.parametrize("cp", [2, 8])
def test_an_exchange_of_heads_is_two_all_to_alls_of_each_layer(cp: int) -> None:
    cluster = parse_cluster("1x8xH100")
    section = replace(LAYERS, query_bytes="8192*S", key_heads=8)
    found = price_row_exchange(section, 1, cp, cluster, "ulysses")
    size = (4096 + 8192) * 10**6 // cp * (cp - 1) // cp  # that a rank sends
    assert evaluate_expr(found.forward_ns, SIZES) == pytest.approx(
        size * 10**9 / cluster.inside.bytes_per_s, rel=0.03
    )
    assert found.backward_ns("full") == f"{found.forward_ns} + ({found.forward_ns})"


def test_gathered_keys_and_values_are_kept_and_exchanged_heads_are_not() -> None:
    kinds = {"full": "100*S", "selective": "300*S"}
    again = {kind: RecomputeCost(kept, "10*S", "0", 0) for kind, kept in kinds.items()}
    section = replace(LAYERS, saved="20000*S", recompute=again)

    def saved(attention: str, recompute: str, part: str = "saved") -> float:
        cost = cost_on_rows(section, 4, attention)
        text = cost.saved if recompute == "none" else getattr(cost.recompute[recompute], part)
        return evaluate_expr(text, SIZES) / SIZES["S"]

    assert saved("ulysses", "none") == 20000 / 4
    assert saved("gather", "none") == 20000 / 4 + 4096 * 3 / 4
    assert saved("gather", "selective") == 300 / 4 + 4096 * 3 / 8
    assert saved("gather", "full") == 100 / 4
    assert saved("gather", "full", "working") == 10 / 4 + 1024 * 3 / 4  # of one layer that runs again


def test_ranks_with_whole_frames_exchange_nothing() -> None:
    cluster, sizes = parse_cluster("1x8xH100"), {"n": 10}
    section = replace(
        LAYERS, saved="100*n", unshared_bytes="20*n", exchanged_bytes="4096*n", batch_entries="n",
        entries_per_sample=4,
    )  # fmt: skip

    def chosen(cp: int, pinned: str = "") -> str:
        return choose_row_attention(section, section, 1, cp, cluster, pinned)

    assert [chosen(cp) for cp in (1, 2, 4, 8)] == ["gather", "frames", "frames", "gather"]
    assert chosen(8, "frames") == "frames" and chosen(2, "gather") == "gather"
    assert price_row_exchange(section, 1, 4, cluster, "frames").forward_ns == "0"
    fullest = cost_on_rows(section, 4, "frames").saved  # three of ten frames, and inputs of all
    assert evaluate_expr(fullest, sizes) == 20 * 10 + 80 * 3


def test_tensor_parallelism_divides_heads_and_float32_is_not_widened() -> None:
    cluster = parse_cluster("1x8xH100")

    def forward_ns(tp: int) -> int:
        exchange = price_row_exchange(cost_on_rank(LAYERS, tp), tp, 2, cluster)
        return evaluate_expr(exchange.forward_ns, SIZES)

    assert forward_ns(4) < 0.3 * forward_ns(1)
    full = price_row_exchange(replace(LAYERS, dtype="f32"), 1, 2, cluster)
    assert full.forward_ns == full.scatter_ns
    assert price_row_exchange(replace(LAYERS, exchanged_bytes="0"), 1, 2, cluster).forward_ns == "0"
