"""Exact polynomials through integer counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from secc.cost.counting.polynomial_fit import fit_polynomials
from secc.ir.dialect import size_expr
from secc.runtime.plan.expr_eval import evaluate_expr

KINDS = {"B": "rows", "n": "rows", "S": "width"}
MONOMIALS = ("1", "B", "n", "S", "S*S", "B*S", "B*S*S", "n*S", "n*S*S")


@given(st.lists(st.integers(0, 10**9), min_size=len(MONOMIALS), max_size=len(MONOMIALS)))
def test_recovers_any_polynomial_of_its_basis(coefficients: list[int]) -> None:
    wanted = size_expr.parse_expr(
        " + ".join(f"{c}*{m}" for c, m in zip(coefficients, MONOMIALS, strict=True))
    )
    assert fit_polynomials(lambda sizes: [int(size_expr.evaluate_size(wanted, sizes)), 7], KINDS) == (
        wanted,
        size_expr.parse_expr("7"),
    )


def test_packed_attention_is_quadratic_in_rows() -> None:
    wanted = size_expr.parse_expr("3*T*T + 5*T")
    assert fit_polynomials(lambda sizes: [int(size_expr.evaluate_size(wanted, sizes))], {"T": "rows"}) == (
        wanted,
    )


def test_floor_divisions_are_fitted_at_multiples() -> None:
    found = fit_polynomials(
        lambda sizes: [3 * sizes["B"] * ((sizes["S"] + 3) // 4)], {"B": "rows", "S": "width"}
    )
    assert found is not None and size_expr.format_expr(found[0]) == "(3*B*S)//4"


def test_powers_are_printed_as_products() -> None:
    """`secc.runtime.plan.expr_eval` has no power operator."""
    assert size_expr.format_expr(size_expr.parse_expr("B*S**2 - (S + 1)**2")) == "B*S*S - (S + 1)*(S + 1)"
    assert evaluate_expr(size_expr.format_expr(size_expr.parse_expr("5*B*S**2//2")), {"B": 3, "S": 7}) == 367


def test_constants_need_no_symbols() -> None:
    assert fit_polynomials(lambda sizes: [11], {}) == (size_expr.parse_expr("11"),)


def test_returns_none_for_non_polynomials() -> None:
    assert fit_polynomials(lambda sizes: [2 ** sizes["S"]], {"S": "width"}) is None


def test_measures_each_size_once() -> None:
    seen: list[tuple[int, ...]] = []

    def measure(sizes: dict[str, int]) -> list[int]:
        seen.append(tuple(sizes.values()))
        return [sizes["B"] * sizes["S"]]

    fit_polynomials(measure, {"B": "rows", "S": "width"})
    assert len(seen) == len(set(seen)) == 7


def test_many_symbols_are_not_fitted() -> None:
    """A call that takes tensors of four tasks has a dozen sizes, and each monomial would cost a run."""
    kinds = {f"n{i}": "rows" for i in range(4)} | {f"S{i}": "width" for i in range(7)}

    def refuse_to_run(sizes: dict[str, int]) -> list[int]:
        raise AssertionError("it was run")

    assert fit_polynomials(refuse_to_run, kinds) is None
