"""Floor divisions are found among the many that fit a few lengths, by asking for lengths that tell them
apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from secc.frontend.capture.size_fit import SizeFitter
from secc.frontend.capture.stride_sizes import find_strides, find_telling_length
from secc.ir.dialect.size_expr import evaluate_size, format_expr
from secc.runtime.model.user_file import UserModel
from tests.frontend.generic_replay import capture_user_model

LENGTHS = (911, 1310, 1204, 1750, 1033)
ROWS = [{"B": b, "S": s} for b, s in zip((2, 3, 4, 5, 7), LENGTHS, strict=True)]


def probed(value: Callable[[dict[str, int]], int]) -> SizeFitter:
    """A fitter that has asked for all the observations it wanted."""
    rows = list(ROWS)
    for _ in range(24):
        fitter = SizeFitter(rows, free={"S"}, is_probing=True)
        fitter.fit_integer([value(r) for r in rows])
        if not fitter.doubts:
            return fitter
        name, size = fitter.doubts[0]
        rows.append({**min(ROWS, key=lambda r: r["S"]), name: size})
    raise AssertionError("too many observations")


@given(st.integers(2, 400), st.integers(-500, 20))
@example(285, 0)
@settings(max_examples=25)
def test_a_chain_of_convolutions_is_one_division(divisor: int, offset: int) -> None:
    def value(row: dict[str, int]) -> int:
        return (row["S"] + offset) // divisor

    fitter = probed(value)
    found = fitter.fit_integer([value(r) for r in fitter.size_rows])
    assert found is not None
    for length in range(911, 3000, 37):
        assert evaluate_size(found, {"B": 2, "S": length}) == value({"S": length})


@given(st.integers(2, 96), st.integers(-3, 3), st.booleans())
@settings(max_examples=25)
def test_what_a_length_lacks_to_a_multiple_is_found(divisor: int, offset: int, lacks: bool) -> None:
    def value(row: dict[str, int]) -> int:
        return (-row["S"] + offset) % divisor if lacks else (row["S"] + offset) % divisor

    fitter = probed(value)
    found = fitter.fit_integer([value(r) for r in fitter.size_rows])
    assert found is not None
    for length in range(911, 3000, 37):
        assert evaluate_size(found, {"B": 2, "S": length}) == value({"S": length})


def test_a_stride_may_be_scaled_by_other_sizes() -> None:
    def value(row: dict[str, int]) -> int:
        return row["B"] * (2 * ((row["S"] + 3) // 4) + 1)

    fitter = probed(value)
    found = fitter.fit_integer([value(r) for r in fitter.size_rows])
    assert found is not None and format_expr(found) in {"B*(2*((S + 3)//4) + 1)", "2*B*((S + 3)//4) + B"}


def test_lengths_that_cannot_be_chosen_have_natural_divisors_only() -> None:
    wanted = [(s - 511) // 384 for s in LENGTHS]
    assert {s.divisor for s in find_strides(ROWS, wanted, ["S"], free=())} == set()
    assert find_strides(ROWS, wanted, ["S"], free={"S"})
    found = find_strides(ROWS, [s // 16 for s in LENGTHS], ["S"], free=())
    assert found[0].divisor == 16 and find_telling_length(found, ROWS, free=()) is None


class Listener(nn.Module):
    """Two strided convolutions as blocks of their own, and their length in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Conv1d(1, 4, 11, stride=7),
            nn.Conv1d(4, 4, 5, stride=3),
            nn.Linear(4, 2),
        )

    def forward(self, sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(sound[:, None])).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x + torch.arange(x.shape[1])[:, None]).sum(1), labels)


def test_a_capture_probes_the_widths_it_needs(user_of: Callable[..., UserModel]) -> None:
    samples = [{"sound": torch.randn(120 + 37 * i % 211), "labels": torch.tensor(i % 2)} for i in range(40)]
    found = capture_user_model(user_of(samples, model=Listener))
    lengths = [n.meta["args"] for n in found.cases[0].generic.graph.nodes if "arange" in str(n.target)]
    assert [format_expr(args[-1]) for args in lengths] == ["(S_sound - 18)//21"]


class Folded(nn.Module):
    """Folds sounds to whole patches of 4, and does something else with those that are whole already."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.head, self.branches = nn.Linear(4, 2), branches

    def forward(self, sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        missing = -sound.shape[1] % 4
        if self.branches and not missing:
            sound = torch.cat([2 * sound, sound], 1)
        sound = nn.functional.pad(sound, (0, missing))
        return nn.functional.cross_entropy(self.head(sound.unflatten(1, (-1, 4))).sum(1), labels)


@pytest.mark.parametrize("branches", [False, True])
def test_a_remainder_explains_if_forward_does_the_same_where_it_is_0(
    branches: bool, user_of: Callable[..., UserModel]
) -> None:
    lengths = [21 + 4 * (5 * i % 9) + 7 * i % 11 % 3 for i in range(40)]  # no multiple of 4
    samples = [{"sound": torch.randn(n), "labels": torch.tensor(n % 2)} for n in lengths]
    (case,) = capture_user_model(user_of(samples, model=lambda: Folded(branches))).cases
    assert (case.rerecord_reason is not None) == branches
    if branches:
        return
    (pad,) = (n for n in case.generic.graph.nodes if "constant_pad" in str(n.target))
    for length in range(20, 60):
        assert evaluate_size(pad.meta["args"][1][1], {"S_sound": length, "B": 2}) == -length % 4


class Padded(nn.Module):
    """Pads sounds to 16 entries, or to a multiple of 8, in one of several ways."""

    def __init__(self, missing: Callable[[int], int]) -> None:
        super().__init__()
        self.head, self.missing = nn.Linear(1, 2), missing

    def forward(self, sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sound = nn.functional.pad(sound, (0, self.missing(sound.shape[1])))
        return nn.functional.cross_entropy(self.head(sound[..., None]).sum(1), labels)


@pytest.mark.parametrize(
    "missing",
    [lambda n: 16 - n, lambda n: max(16 - n, 0), lambda n: -n % 8],
    ids=["to 16", "to 16 at least", "to multiples of 8"],
)
def test_lengths_of_one_window_do_not_hide_what_longer_ones_lack(
    missing: Callable[[int], int], user_of: Callable[..., UserModel]
) -> None:
    samples = [{"sound": torch.randn(9 + i % 7), "labels": torch.tensor(i % 2)} for i in range(40)]
    (case,) = capture_user_model(user_of(samples, model=lambda: Padded(missing))).cases
    (pad,) = (n for n in case.generic.graph.nodes if "constant_pad" in str(n.target))
    for length in range(9, 40):
        assert evaluate_size(pad.meta["args"][1][1], {"S_sound": length, "B": 2}) == missing(length)


@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=6),
    divisor=st.integers(2, 20),
    offset=st.integers(-9, 9),
    other=st.lists(st.integers(-3, 9), min_size=6, max_size=6),
    is_quotient=st.booleans(),
)
def test_divisors_are_those_that_fit_all_observations(
    lengths: list[int], divisor: int, offset: int, other: list[int], is_quotient: bool
) -> None:
    counts = [(x + offset) // divisor for x in lengths] if is_quotient else other[: len(lengths)]
    assume(len(set(counts)) > 1)
    first, rows = lengths[0], [{"S": x} for x in lengths]
    fitting = {
        d
        for d in range(2, 65)
        for a in range(d * counts[0] - first, d * counts[0] - first + d)
        if all((x + a) // d == c for x, c in zip(lengths, counts, strict=True))
    }
    found = find_strides(rows, counts, ["S"], {"S"})
    plain = {s.divisor for s in found if s.multiplier == 1 and not s.factors and s.divisor < 65}
    assert plain == fitting
