"""Which sample each random number belongs to is found from shapes in several captures; ambiguous ops are
refused with their line."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import fx

from secc.errors import UserError
from secc.frontend.capture.generalize import ObservedRecording
from secc.frontend.capture.random_op_rows import find_random_ops
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.ir.analysis import random_ops as texts
from secc.runtime.plan.schema import RandomOp, Symbol
from secc.runtime.recorder import Recording
from secc.runtime.recorder.recording import RandomOpCall

SYMBOLS = (Symbol("B", "rows", "x", 0), Symbol("S", "width", "x", 1), Symbol("images", "rows", "pixels", 0))
SIZES = [(2, 29, 3), (3, 43, 4), (4, 23, 9), (5, 37, 6), (7, 31, 8), (2, 20, 2)]


def found(
    *shapes: Sequence[int],
    op: str = "aten.bernoulli_.float",
    known: bool = True,
    repeat: Sequence[int] = (1,) * 6,
) -> list[RandomOp]:
    """The rule for an op whose result had these shapes in the captures, and was drawn `repeat` times in
    each."""
    observed: list[ObservedRecording] = []
    for shape, times, (b, s, n) in zip(shapes, repeat, SIZES, strict=True):
        drawn = [
            RandomOpCall("drop", ("model.py:7",), op, "model.py:7", tuple(shape), known, i)
            for i in range(times)
        ]
        placeholders = {"x": fx.Graph().placeholder("x")}
        observed.append(
            ObservedRecording(
                Recording(fx.Graph(), placeholders, {}, [], drawn), {"B": b, "S": s, "images": n}
            )
        )
    return find_random_ops(observed, ModelInputs(SYMBOLS, (), "", (), ()))


CASES = [
    ([(b, s, 16) for b, s, _ in SIZES], (0,), "B"),
    ([(s, b, 16) for b, s, _ in SIZES], (1,), "B"),
    ([(4 * b, s, s) for b, s, _ in SIZES], (0,), "4*B"),
    ([(b * s, 16) for b, s, _ in SIZES], (0,), "B*S"),
    ([(b * (s - 1), 16) for b, s, _ in SIZES], (0,), "B*S - B"),
    ([(n, 16) for _, _, n in SIZES], (0,), "images"),
    ([(1, 2, n, n) for _, _, n in SIZES], (2, 3), "images"),
    ([(s, 16) for _, s, _ in SIZES], (), "0"),
    ([() for _ in SIZES], (), "0"),
]


@pytest.mark.parametrize(("shapes", "dims", "rows"), CASES, ids=[rows + str(dims) for _, dims, rows in CASES])
def test_the_dim_of_the_samples(shapes: list[tuple[int, ...]], dims: tuple[int, ...], rows: str) -> None:
    draw = RandomOp("drop@model.py:7#0", dims, rows, "model.py:7")
    assert found(*shapes) == [draw]
    assert texts.parse_random_op(texts.format_random_op(draw)) == draw


REFUSED = [
    ([(b + 1, 3) for b, _, _ in SIZES], {}, "its shapes do not tell which of them belong to which sample"),
    ([(b + n, 3) for b, _, n in SIZES], {}, "its shapes do not tell which of them belong to which sample"),
    ([(i**3 + 2, 3) for i in (1, 5, 2, 9, 4, 8)], {}, "its shapes do not tell"),
    (
        [(2, 3)] * 6,
        {"known": False, "op": "aten.poisson.default"},
        "aten.poisson.default draws random numbers, which cannot be tied",
    ),
    ([(2, 3)] * 6, {"repeat": (2, 3, 5, 5, 7, 2)}, "in a loop with a length that differs between batches"),
    ([(b,) for b, _, _ in SIZES], {"op": "aten.randperm.default"}, "mixes the samples"),
]


@pytest.mark.parametrize(("shapes", "options", "message"), REFUSED)
def test_random_ops_without_a_sample_dim_are_refused_with_their_line(
    shapes: list[tuple[int, ...]], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        found(*shapes, **options)  # type: ignore[arg-type]
    assert error.value.where == "model.py:7" and error.value.remedy


def test_a_module_skipped_in_some_batches_keeps_its_random_numbers() -> None:
    assert found(*[(b, 3) for b, _, _ in SIZES], repeat=(1, 0, 1, 1, 0, 1)) == [
        RandomOp("drop@model.py:7#0", (0,), "B", "model.py:7")
    ]


def loop_draws(*runs_by_batch: Sequence[tuple[str, ...]]) -> list[RandomOp]:
    """The rule for a place that drew in these runs of functions, innermost first, in each capture."""
    observed: list[ObservedRecording] = []
    for runs, (b, s, n) in zip(runs_by_batch, SIZES, strict=True):
        drawn = [
            RandomOpCall(
                "match", ("model.py:7", "model.py:9"), "aten.rand.default", "model.py:7", (1, 5), True, i, run
            )
            for i, run in enumerate(runs)
        ]
        inputs = {"x": fx.Graph().placeholder("x")}
        observed.append(
            ObservedRecording(Recording(fx.Graph(), inputs, {}, [], drawn), {"B": b, "S": s, "images": n})
        )
    return find_random_ops(observed, ModelInputs(SYMBOLS, (), "", (), ()))


LOOPS = [
    ([[("f", "g")] * b for b, _, _ in SIZES], "B"),
    ([[("f", "g")] * 3 * n for _, _, n in SIZES], "3*images"),
    # Two layers are matched, one after the other, and each sample is drawn for in a function of its own.
    ([[(f"f{i}", f"g{layer}") for layer in (0, 1) for i in range(b)] for b, _, _ in SIZES], "B"),
    # Each sample is drawn for twice in a function of its own.
    ([[(f"f{i}", "g") for i in range(b) for _ in (0, 1)] for b, _, _ in SIZES], "2*B"),
    ([[("f", "g")] * (s - 1) for _, s, _ in SIZES], "0"),  # rounds that all samples share
]


@pytest.mark.parametrize(("runs", "rows"), LOOPS, ids=[rows for _, rows in LOOPS])
def test_a_loop_over_rows_draws_for_each_of_them(runs: list[list[tuple[str, ...]]], rows: str) -> None:
    draw = RandomOp("match@model.py:7<model.py:9#*", (), rows, "model.py:7")
    assert loop_draws(*runs) == [draw] and draw.has_call_per_row == (rows != "0")
    assert texts.parse_random_op(texts.format_random_op(draw)) == draw
