"""Size expressions on a rank: Python's integer arithmetic, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secc.runtime.plan.expr_eval import MIN_TENSOR_ROWS, evaluate_expr, evaluate_expr_columns

Sizes = dict[str, int]

leaves = st.one_of(st.integers(0, 50).map(str), st.sampled_from(["B", "S", "n_pixels"]))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.integers(1, 9)).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        inner.map(lambda t: f"-{t}"),
    ),
    max_leaves=8,
)
sizes = st.fixed_dictionaries({name: st.integers(0, 1000) for name in ("B", "S", "n_pixels")})


@given(expressions, sizes)
def test_values_equal_python(text: str, values: Sizes):
    assert evaluate_expr(text, values) == eval(text, {"min": min, "max": max}, dict(values))


@given(expressions, st.lists(sizes, max_size=4))
def test_columns_have_the_value_of_each_row(text: str, places: list[Sizes]):
    columns = {name: [place[name] for place in places] for name in ("B", "S", "n_pixels")}
    assert evaluate_expr_columns(text, columns, len(places)) == [
        evaluate_expr(text, place) for place in places
    ]


@given(
    expressions,
    st.lists(sizes, min_size=1, max_size=4),
    st.sampled_from([1, 10**9, 10**15]),
    st.booleans(),
)
def test_long_columns_have_the_value_of_each_row_at_any_magnitude(
    text: str, places: list[Sizes], factor: int, negative: bool
):
    scale = -factor if negative else factor
    rows = [{name: scale * size for name, size in place.items()} for place in places] * MIN_TENSOR_ROWS
    columns = {name: [row[name] for row in rows] for name in ("B", "S", "n_pixels")}
    expected = [evaluate_expr(text, row) for row in rows[: len(places)]] * MIN_TENSOR_ROWS
    assert evaluate_expr_columns(text, columns, len(rows)) == expected


def test_long_columns_beyond_int64_are_exact():
    sizes = [1 << 40, 3, 1 << 70] * MIN_TENSOR_ROWS
    assert evaluate_expr_columns("B*B % 7", {"B": sizes}, len(sizes)) == [size**2 % 7 for size in sizes]


def test_long_columns_divide_by_symbols_as_python_does():
    columns = {"B": [7] * MIN_TENSOR_ROWS, "S": [2, 0] * (MIN_TENSOR_ROWS // 2)}
    with pytest.raises(ZeroDivisionError):
        evaluate_expr_columns("B // S", columns, MIN_TENSOR_ROWS)


@given(
    st.sampled_from(
        [
            "B // max(1, S) * (S + 7)",
            "B % max(1, S)",
            "(B * n_pixels) // max(3, S)",
            "1000*(B*S - n_pixels)*109113//5120000",
            "B*4096//3 + B*4096",
            "B*4096 // -3",
        ]
    ),
    st.lists(sizes, min_size=1, max_size=4),
    st.sampled_from([1, 10**6, 10**12, 10**14]),
)
def test_long_columns_of_quotients_have_the_value_of_each_row(text: str, places: list[Sizes], factor: int):
    rows = [{**place, "B": factor * place["B"]} for place in places] * MIN_TENSOR_ROWS
    columns = {name: [row[name] for row in rows] for name in ("B", "S", "n_pixels")}
    expected = [evaluate_expr(text, row) for row in rows[: len(places)]] * MIN_TENSOR_ROWS
    assert evaluate_expr_columns(text, columns, len(rows)) == expected


def test_long_columns_with_large_values_in_different_rows_are_exact():
    columns = {"B": [1 << 40, 1] * MIN_TENSOR_ROWS, "S": [1, 1 << 40] * MIN_TENSOR_ROWS}
    assert evaluate_expr_columns("B*S*3", columns, 2 * MIN_TENSOR_ROWS) == [3 << 40] * (2 * MIN_TENSOR_ROWS)
    assert evaluate_expr_columns(f"B // {1 << 70}", columns, 2 * MIN_TENSOR_ROWS) == [0] * (
        2 * MIN_TENSOR_ROWS
    )


REFUSED = [
    "",
    "B +",
    "B / 2",
    "B ** 2",
    "2.5",
    "'a'",
    "S.real",
    "open('f')",
    "[B]",
    "B if S else 1",
    "max(B, key=S)",
]


@pytest.mark.parametrize("text", REFUSED)
def test_text_outside_the_grammar_is_rejected(text: str):
    with pytest.raises(ValueError, match="not a size expression"):
        evaluate_expr(text, {"B": 1, "S": 2})
    with pytest.raises(ValueError, match="not a size expression"):
        evaluate_expr_columns(text, {"B": [1], "S": [2]}, 1)


def test_an_unknown_symbol_is_named():
    with pytest.raises(ValueError, match="'T' in B\\*T"):
        evaluate_expr("B*T", {"B": 1})
    with pytest.raises(ValueError, match="'T' in B\\*T"):
        evaluate_expr_columns("B*T", {"B": [1]}, 1)
