"""Coefficients of sums that give the observed sizes are found by elimination."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from secc.frontend.capture import size_fit


def _draw_columns(random: Random, count: int, rows: int) -> list[tuple[int, ...]]:
    return [tuple(random.randrange(1, 3000) for _ in range(rows)) for _ in range(count)]


def test_coefficients_are_found_from_any_number_of_observations() -> None:
    random = Random(0)
    for _ in range(200):
        columns = _draw_columns(random, random.randrange(1, 4), rows := random.randrange(5, 40))
        known = [random.choice([-3, -1, 1, 2, 7]) for _ in columns]
        values = tuple(sum(k * c[i] for k, c in zip(known, columns, strict=True)) for i in range(rows))
        # Observations that were met before tell nothing: few equations may not have one solution.
        repeated = [tuple([c[0]] * 30 + [*c]) for c in columns]
        for some, given in ((columns, values), (repeated, tuple([values[0]] * 30 + [*values]))):
            assert size_fit.solve_exactly(some, given) == [*map(Fraction, known)]


def test_one_observation_refutes_coefficients() -> None:
    random = Random(1)
    for _ in range(200):
        columns = _draw_columns(random, random.randrange(1, 4), rows := random.randrange(5, 40))
        values = [sum(column[i] for column in columns) for i in range(rows)]
        values[random.randrange(rows)] += 1
        assert size_fit.solve_exactly(columns, tuple(values)) is None


def test_wider_of_two_widths_comes_before_a_least_width() -> None:
    """Where `T` is wider it is 10: the values fit Max(S, 10), too, and a wider `T` tells them apart."""
    rows = [{"S": s, "T": t} for s, t in ((8, 10), (9, 10), (12, 7))]
    fitter = size_fit.SizeFitter(rows, ["S", "T"], is_probing=True)
    assert str(fitter.fit_integer([10, 10, 12])) == "Max(S, T)"
    assert fitter.doubts == [("T", 20)]
    wider = size_fit.SizeFitter([*rows, {"S": 8, "T": 20}], ["S", "T"], is_probing=True)
    assert str(wider.fit_integer([10, 10, 12, 10])) == "Max(10, S)"
