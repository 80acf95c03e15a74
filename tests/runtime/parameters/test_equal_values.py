"""Plain values that `on_step` sets on some ranks only, or to others on each, and that forward reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.parameters.equal_values import SetValues, UnequalValue, find_unequal_value

CODE = """
import torch
from torch import nn

WARMTH, LOG, STATE = 1.0, [], {"warmth": 1.0}


def read_state():
    return STATE["warmth"]


class Warm(nn.Module):
    shared = 1.0

    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)
        self.warmth, self.best, self.scales = 1.0, 0.0, [1.0, torch.ones(2)]

    def forward(self, x):
        x = self.drop(self.line(x)) * self.warmth * getattr(self, "shared") * WARMTH
        return (x * read_state() * self.scales[0] * self.scales[1]).sum()


def model():
    return Warm()


def dataset():
    return [{"x": torch.zeros(2)}]


def note(loss):
    LOG.append(loss)
"""

Setting = Callable[[nn.Module, UserModel, int], object]


def compare_ranks(
    folder: Path, on_step: Setting, failed: Sequence[bool] = (False, False)
) -> UnequalValue | None:
    """What two ranks, one after the other, find after their callbacks."""
    (folder / "warm.py").write_text(CODE)
    sides = list[SetValues]()
    for rank in (0, 1):
        user = load_model_file(folder / "warm.py")
        model = user.build_model()
        sides.append(SetValues(model, user))
        sides[rank].note_values()
        on_step(model, user, rank)
    changes = [side.digest_changes() for side in sides]

    def exchange(own: Sequence[float]) -> torch.Tensor:
        if len(own) == 2:
            rows = [
                [float(any(c == c for c in change)), float(f)]
                for change, f in zip(changes, failed, strict=True)
            ]
        elif own == changes[0]:
            rows = changes
        else:  # a name: that of the first rank
            rows = [list(own), list(own)]
        return torch.tensor(rows, dtype=torch.float64)

    return find_unequal_value(sides[0], failed[0], exchange)


def on_first(setting: Callable[[nn.Module, UserModel], object]) -> Setting:
    return lambda model, user, rank: setting(model, user) if rank == 0 else None


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (on_first(lambda model, _: setattr(model, "warmth", 2.0)), "self.warmth"),
        (on_first(lambda model, _: setattr(type(model), "shared", 2.0)), "Warm.shared"),
        (on_first(lambda model, _: setattr(model.drop, "p", 0.5)), "drop.p"),
        (on_first(lambda model, _: vars(model)["scales"][1].mul_(2)), r"self.scales[1]"),
        (on_first(lambda _, user: setattr(user.module, "WARMTH", 2.0)), "the global WARMTH"),
        (on_first(lambda _, user: user.module.STATE.update(warmth=2.0)), "the global STATE['warmth']"),
    ],
)
def test_a_value_that_one_rank_sets_and_forward_reads_is_found(
    setting: Setting, name: str, tmp_path: Path
) -> None:
    found = compare_ranks(tmp_path, setting)
    assert found is not None and found == UnequalValue(name, (0,))
    assert f"on_step sets {name}, which forward reads, on rank 0," in found.as_error("on_step").message


def test_a_value_that_differs_from_rank_to_rank_is_found_unless_a_callback_failed(tmp_path: Path) -> None:
    def set_rank(model: nn.Module, _user: UserModel, rank: int) -> None:
        vars(model)["warmth"] = float(rank + 2)

    assert compare_ranks(tmp_path, set_rank) == UnequalValue("self.warmth", (0, 1))
    assert compare_ranks(tmp_path, set_rank, (True, False)) is None


@pytest.mark.parametrize(
    "setting",
    [
        on_first(lambda model, _: setattr(model, "best", 2.0)),
        on_first(lambda _, user: user.module.note(2.0)),
        lambda model, _user, _rank: setattr(model, "warmth", 2.0),
        lambda _model, _user, _rank: None,
    ],
)
def test_equal_values_and_those_that_forward_does_not_read_are_accepted(
    setting: Setting, tmp_path: Path
) -> None:
    assert compare_ranks(tmp_path, setting) is None
