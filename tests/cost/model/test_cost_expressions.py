"""Estimates for data-dependent symbols in cost expressions."""

from __future__ import annotations

import sympy

from secc.cost.model.cost_expressions import substitute_estimates
from secc.ir.dialect import size_expr
from secc.runtime.plan.expr_eval import evaluate_expr

B, S, N = map(size_expr.size_symbol, "BSN")


def test_maximum_as_estimate_is_rounded_in_each_branch():
    """Two control-flow paths count rows differently, both as fractions of a sample's sizes."""
    rows = sympy.Max(sympy.Rational(3, 4) * B * S, sympy.Rational(9, 10) * N)
    text = substitute_estimates("max(5*B*S + 100*rows, 2*N)", {"rows": rows})
    assert text == "max(2*N, 5*B*S + 100*max((3*B*S)//4, (9*N)//10))"
    assert evaluate_expr(text, {"B": 2, "S": 5, "N": 4}) == 50 + 100 * 7


def test_coefficients_are_rounded():
    assert substitute_estimates("100*rows", {"rows": sympy.Rational(3, 4) * B}) == "75*B"
