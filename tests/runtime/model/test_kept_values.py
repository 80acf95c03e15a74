"""Values that the user's files keep, by names that tell files apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.runtime.model.kept_values import iter_values
from secc.runtime.model.user_file import load_model_file

HELPER = "SIZE = 27\n\n\ndef scale(x):\n    return x * SIZE\n"
MODEL = """
from torch import nn
from size_helper import scale

SIZE = 4


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return scale(self.line(x)).sum()


def model():
    return Sized()


def dataset():
    return [{"x": __import__("torch").zeros(SIZE)}]
"""


def test_globals_of_one_name_in_two_files_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "size_helper.py").write_text(HELPER)
    (tmp_path / "sized.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    user = load_model_file(tmp_path / "sized.py")
    found = {value.name: value.read() for value in iter_values(user.build_model(), user)}
    assert {name: n for name, n in found.items() if "SIZE" in name} == {
        "the global SIZE": 4,
        "the global SIZE of size_helper": 27,
    }


FUNCTIONS = """
import torch
from torch import nn


class Wide(nn.Module):
    def forward(self, x, scale=2.0):
        return x * scale


class Narrow(nn.Module):
    def forward(self, x, scale=0.5):
        return x * scale


def make_weigh(weight):
    return lambda x: x * weight


weigh_more, weigh_less = make_weigh(3.0), make_weigh(0.25)


def model():
    return nn.Sequential(Wide(), Narrow())


def dataset():
    return [{"x": torch.zeros(4)}]
"""


def test_values_of_functions_have_names_of_their_own(tmp_path: Path) -> None:
    """Where two values had one name, an unchanged one looked changed, and was refused if forward reads it."""
    path = tmp_path / "scaled_twice.py"
    path.write_text(FUNCTIONS)
    user = load_model_file(path)
    values = [(value.name, value.read()) for value in iter_values(user.build_model(), user)]
    assert len(dict(values)) == len(values)
    assert {
        ("Wide.forward.__defaults__[0]", 2.0),
        ("Narrow.forward.__defaults__[0]", 0.5),
        ("make_weigh.<lambda>.weight", 3.0),
        ("make_weigh.<lambda>.weight (2)", 0.25),
    } <= set(values)
