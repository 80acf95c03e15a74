"""Refusals of models that draw from generators which are not torch's name these."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.python_draws import extreme_draws
from secc.errors import UserError

MODEL = """
import random
import numpy as np
import torch
from torch import nn

OWN = np.random.default_rng(0)
draw_one = np.random.default_rng(1).random

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.legacy = random.Random(0), np.random.RandomState(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if {drawn} < {share}:
                x = x + layer(x).tanh()
        return x

class Model(Layers):
    def __init__(self):
        super().__init__()
        self.stack, self.head = Layers(), nn.Linear(8, 2)

    def forward(self, x, y):
        x = {stack}
        return nn.functional.cross_entropy(self.head(x), y)

def model():
    return Model()

def dataset():
    generator = torch.Generator().manual_seed(0)
    return [{{"x": torch.randn(8, generator=generator), "y": torch.tensor(i % 2)}} for i in range(32)]
"""


def check_model(folder: Path, drawn: str, share: float, stack: str = "self.stack(x)") -> None:
    path = folder / "model.py"
    path.write_text(MODEL.format(drawn=drawn, share=share, stack=stack))
    check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=8)), required=True)


@pytest.mark.parametrize("drawn", ["random.random()", "np.random.rand()"])
@pytest.mark.parametrize("stack", ["self.stack(x)", "super().forward(x)"])
def test_layers_that_are_left_out_by_chance_are_refused_with_the_generator(
    drawn: str, stack: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        check_model(tmp_path, drawn, 0.5, stack)
    source = "Python's random" if drawn.startswith("random") else "NumPy"
    assert f"forward draws random numbers from {source}" in refused.value.message
    assert (refused.value.remedy or "").startswith("draw with torch")


@pytest.mark.parametrize(
    "drawn",
    [
        "random.random() - 0.999",
        "random.uniform(0, 1) - 0.999",
        "random.randrange(1000) - 998.5",
        "0.5 - random.choice(range(1000))",
        "np.random.rand() - 0.999",
        "np.random.randint(1000) - 998.5",
        "np.random.uniform(2, 3) - 2.999",
    ],
)
def test_what_rare_draws_change_is_refused_although_two_forwards_agree(drawn: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="forward draws random numbers from"):
        check_model(tmp_path, f"-({drawn})", 0.0)


def test_draws_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    check_model(tmp_path, "random.random()", 1.5)


@pytest.mark.parametrize(
    ("drawn", "source"),
    [
        ("OWN.random() - 0.999", "the generator OWN"),
        ("-OWN.normal() - 5", "the generator OWN"),
        ("draw_one() - 0.999", "the generator draw_one"),
        ("self.own.random() - 0.999", "the generator stack.own"),
        ("998.5 - self.own.randrange(1000)", "the generator stack.own"),
        ("self.legacy.rand() - 0.999", "the generator stack.legacy"),
        ("np.random.default_rng().random() - 0.999", "a generator without a seed"),
        ("random.Random().random() - 0.999", "a generator without a seed"),
    ],
)
def test_rare_draws_of_generators_that_code_keeps_or_makes_are_refused(
    drawn: str, source: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"forward draws random numbers from {source}"):
        check_model(tmp_path, f"-({drawn})", 0.0)


@pytest.mark.parametrize("drawn", ["OWN.random()", "self.own.random()", "np.random.default_rng().random()"])
def test_draws_of_own_generators_that_change_nothing_are_accepted(drawn: str, tmp_path: Path) -> None:
    check_model(tmp_path, drawn, 1.5)


@pytest.mark.parametrize("high", [False, True])
def test_a_loop_that_waits_for_a_draw_ends_where_all_draws_are_extreme(high: bool) -> None:
    with extreme_draws(high, []):
        while (random.random() < 0.5) is not high:
            pass
        assert abs(random.normalvariate()) > 0 and 0 <= random.betavariate(2, 2) <= 1
