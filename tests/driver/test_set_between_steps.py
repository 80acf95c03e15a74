"""Values that code between steps sets and forward reads between modules are refused when a plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

NET, HEAT, STATE, LOG = [], 1.0, {"heat": 1.0}, []


class Scaled(nn.Linear):
    heat = 1.0

    def forward(self, x):
        return super().forward(x) / self.heat


class Cooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = Scaled(8, 8), nn.Linear(8, 5)
        self.heat, self.unread, self.options = 1.0, 1.0, SimpleNamespace(heat=1.0)
        self.register_buffer("cold", torch.tensor(1.0))

    def set_heat(self, value):
        self.heat = value

    def forward(self, x, y):
        scores = self.head(self.first(x)) / (self.heat * HEAT * STATE["heat"] * self.options.heat * self.cold)
        return F.cross_entropy(scores, y)


def model():
    torch.manual_seed(0)
    NET[:] = [Cooled()]
    return NET[0]


def dataset():
    g = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=g), "y": torch.randint(0, 5, (), generator=g)} for _ in range(16)]
"""


def check_model(folder: Path, code: str) -> None:
    path = folder / "cooled.py"
    path.write_text(MODEL + code)
    check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=8)), required=True)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("NET[0].heat = result.loss", "self.heat"),
        ("setattr(NET[0], 'heat', result.loss)", "self.heat"),
        ("NET[0].set_heat(result.loss)", "self.heat"),
        ("NET[0].options.heat += 1", "self.options.heat"),
        ("STATE['heat'] *= 0.9", r"the global STATE\['heat'\]"),
        ("STATE.update(heat=result.loss)", r"the global STATE\['heat'\]"),
        ("global HEAT; HEAT = result.loss", "the global HEAT"),
    ],
)
def test_what_on_step_sets_for_statements_between_modules_is_refused(
    line: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"on_step\(\) sets {name}, which forward reads between") as refused:
        check_model(tmp_path, f"\ndef on_step(result):\n    {line}\n")
    assert "cooled.py:" in refused.value.where and "buffer" in refused.value.remedy


@pytest.mark.parametrize(
    "place", ["register_step_post_hook(lambda *_: cool())", "register_step_pre_hook(lambda *_: cool())"]
)
def test_what_a_hook_of_the_optimizer_sets_is_refused(place: str, tmp_path: Path) -> None:
    code = f"""
def cool():
    NET[0].heat *= 0.9


def optimizer(params):
    made = torch.optim.SGD(params, lr=0.1)
    made.{place}
    return made
"""
    with pytest.raises(UserError, match=r"optimizer\(\) sets self.heat"):
        check_model(tmp_path, code)


@pytest.mark.parametrize(
    "line",
    ["NET[0].first.heat = 2.0", "NET[0].unread = 2.0", "LOG.append(HEAT)", "NET[0].cold.fill_(2.0)"],
)
def test_what_modules_and_buffers_follow_or_nothing_reads_is_accepted(line: str, tmp_path: Path) -> None:
    check_model(tmp_path, f"\ndef on_step(result):\n    {line}\n")
