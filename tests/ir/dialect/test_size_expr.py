"""Size expressions: the compiler's sympy and a rank's plain integers agree on every text, and texts survive
being read and printed."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from secc.ir.dialect import size_expr
from secc.runtime.plan import expr_eval as rank

SYMBOLS = ("B", "S", "N", "I", "n_pixel_values")
# A micro-batch may have no image; the other sizes are at least one.
sizes = st.fixed_dictionaries({name: st.integers(0 if name.startswith("n_") else 1, 40) for name in SYMBOLS})


def texts() -> st.SearchStrategy[str]:
    """Expressions in the grammar that both sides read."""
    leaves = st.one_of(st.integers(0, 40).map(str), st.sampled_from(SYMBOLS))

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pair = st.tuples(inner, inner)
        divisor = st.integers(1, 9)
        return st.one_of(
            st.builds(lambda op, p: f"({p[0]} {op} {p[1]})", st.sampled_from("+-*"), pair),
            st.builds(lambda a, d: f"({a})//{d}", inner, divisor),
            st.builds(lambda a, d: f"({a}) % {d}", inner, divisor),
            st.builds(lambda f, p: f"{f}({p[0]}, {p[1]})", st.sampled_from(["min", "max"]), pair),
            inner.map(lambda a: f"-({a})"),
        )

    return st.recursive(leaves, grow, max_leaves=6)


@given(texts(), sizes)
@settings(max_examples=300, deadline=None)
def test_sympy_and_ranks_agree(text: str, at: dict[str, int]) -> None:
    assert size_expr.evaluate_size(size_expr.parse_expr(text), at) == rank.evaluate_expr(text, at)


@example("(B % 4 * B) % 3", dict.fromkeys(SYMBOLS, 2))
@given(texts(), sizes)
@settings(max_examples=300, deadline=None)
def test_a_printed_expression_has_the_same_value_on_a_rank(text: str, at: dict[str, int]) -> None:
    printed = size_expr.format_expr(size_expr.parse_expr(text))
    assert rank.evaluate_expr(printed, at) == rank.evaluate_expr(text, at)
    assert size_expr.evaluate_size(size_expr.parse_expr(printed), at) == rank.evaluate_expr(text, at)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("S + B*(S - 1) + 1", "B*(S - 1) + S + 1"),
        ("2*n_pixel_values*288", "576*n_pixel_values"),
        ("(S + 3)//4", "(S + 3)//4"),
        ("(4*S)//4", "S"),
        ("max(n_pixel_values, 1)", "max(1, n_pixel_values)"),
        ("N - I", "-I + N"),
    ],
)
def test_expressions_are_simplified(text: str, printed: str) -> None:
    assert size_expr.format_expr(size_expr.parse_expr(text)) == printed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B +",
        "B.real",
        "__import__('os')",
        "open('x')",
        "[B]",
        "B if S else 1",
        "'B'",
        "True",
        "lambda: 1",
    ],
)
def test_text_outside_the_grammar_is_refused_by_both_readers(text: str) -> None:
    with pytest.raises(ValueError):
        size_expr.parse_expr(text)
    with pytest.raises(ValueError):
        rank.evaluate_expr(text, {"B": 1, "S": 1})


def test_a_fractional_mean_evaluates_to_the_nearest_float() -> None:
    """Sizes are whole, shares of them need not be, and means may be given as sizes."""
    share = size_expr.parse_expr("B*S") / 7 + size_expr.parse_expr("S//4")
    assert (
        size_expr.evaluate_size(share, {"B": 3, "S": 5}) == 15 / 7 + 1
        and size_expr.evaluate_size(share, {"B": 7, "S": 5}) == 6
    )
    assert size_expr.evaluate_size(size_expr.parse_expr("2*S + 1"), {"S": 2.25}) == 5.5  # pyright: ignore[reportArgumentType]
    assert isinstance(size_expr.evaluate_size(share, {"B": 7, "S": 5}), int)


def test_floats_keep_all_their_digits() -> None:
    assert size_expr.format_expr(size_expr.parse_expr("0.30000000000000004*B")) == "0.30000000000000004*B"


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="S"):
        size_expr.evaluate_size(size_expr.parse_expr("B*S"), {"B": 2})
    with pytest.raises(ValueError, match="S"):
        rank.evaluate_expr("B*S", {"B": 2})
