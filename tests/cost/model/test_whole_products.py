"""Products that `tp` leaves whole keep their parameters and their work on every rank."""

from __future__ import annotations

from dataclasses import replace

from secc.cost.model.tp_pp_scaling import cost_on_rank
from secc.runtime.plan.expr_eval import evaluate_expr
from tests.cost.model.test_tensor_sums import COST, SIZES


def test_whole_products_are_on_every_rank() -> None:
    even, uneven = (cost_on_rank(replace(COST, whole_permille=n), 4) for n in (0, 400))
    assert even.params == COST.params // 4
    assert uneven.params == -(-COST.params * 55 // 100)  # 400 whole, and a fourth of 600
    work = evaluate_expr(even.work, SIZES), evaluate_expr(uneven.work, SIZES)
    assert 2 * work[0] < work[1] < 2.3 * work[0]
