"""Texts of costs in which the values of inputs are estimated from sizes."""

from __future__ import annotations

import sympy

from secc.cost.model.cost_expressions import substitute_estimates
from secc.ir.dialect import size_expr
from secc.runtime.plan.expr_eval import evaluate_expr

B, S, N = map(size_expr.size_symbol, "BSN")


def test_an_estimate_may_be_the_largest_of_several_in_parts():
    """Two ways through the glue count rows in two ways, neither of them whole numbers of a sample's sizes."""
    rows = sympy.Max(sympy.Rational(3, 4) * B * S, sympy.Rational(9, 10) * N)
    text = substitute_estimates("max(5*B*S + 100*rows, 2*N)", {"rows": rows})
    assert text == "max(2*N, 5*B*S + 100*max((3*B*S)//4, (9*N)//10))"
    assert evaluate_expr(text, {"B": 2, "S": 5, "N": 4}) == 50 + 100 * 7


def test_an_estimate_in_a_sum_is_rounded():
    assert substitute_estimates("100*rows", {"rows": sympy.Rational(3, 4) * B}) == "75*B"
