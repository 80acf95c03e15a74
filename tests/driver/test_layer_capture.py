"""Blocks that stay whole rule out the stages that they were opened for, and no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.layer_capture import LayerCapturePlan, check_opened_blocks
from secc.errors import ImpossibleChoice

CUT = {"model.vision": "vision.pp", "model.lm": "lm.pp", "model.lm.more": "lm.pp"}


def staging() -> LayerCapturePlan:
    return LayerCapturePlan(tuple(CUT), (), (), CUT, (), (), {})


def captured(*blocks: str) -> Any:
    notes = [SimpleNamespace(path=b, reason="one block", where="model.py:7") for b in blocks]
    return SimpleNamespace(blocks=dict.fromkeys(blocks), notes=notes)


def test_stages_of_opened_blocks_are_not_refused() -> None:
    check_opened_blocks(staging(), captured("model.vision.layers.0", "model.lm.layers.0"))


@pytest.mark.parametrize(
    ("blocks", "choices"),
    [
        (("model.vision", "model.lm.layers.0"), ("vision.pp",)),
        (("model.lm",), ("lm.pp",)),
        (("model",), ("lm.pp", "vision.pp")),
    ],
)
def test_stages_of_a_block_that_stays_whole_are_refused(
    blocks: tuple[str, ...], choices: tuple[str, ...]
) -> None:
    with pytest.raises(ImpossibleChoice, match="cannot be cut into stages") as error:
        check_opened_blocks(staging(), captured(*blocks))
    assert error.value.choices == choices and error.value.where == "model.py:7"


def test_sections_leave_out_what_is_glue_of_the_second_capture() -> None:
    first = LayerCapturePlan(
        (), ("lm=model+model.rotary", "tables=model.table", "head=head"), (), {}, (), (), {}
    )
    assert first.sections_of_blocks(["model.layers.0", "head"]) == ("lm=model", "head=head")


SHARED_TABLE = """
import torch
import torch.nn.functional as F
from torch import nn


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rate", torch.logspace(0, -2, 8), persistent=False)

    def forward(self, places):
        return (places[..., None] * self.rate).cos()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x, angles):
        return x + torch.tanh(self.mix(x)) * angles


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.angles = nn.Embedding(20, 8), Angles()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids):
        x, angles = self.embed(ids), self.angles(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, angles)
        return x


class TwoAhead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.ahead, self.head = Body(), Layer(), nn.Linear(8, 20)

    def forward(self, ids):
        x = self.body(ids)
        y = self.ahead(x[:, :-1], self.body.angles(torch.arange(ids.shape[1] - 1)))
        first = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        return first + F.cross_entropy(self.head(y[:, :-1]).flatten(0, 1), ids[:, 2:].flatten())


def model():
    return TwoAhead()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(0, 20, (7,), generator=g)} for _ in range(24)]
"""


def test_a_table_that_forward_calls_once_more_leaves_stages_possible(tmp_path: Path) -> None:
    path = tmp_path / "two_ahead.py"
    path.write_text(SHARED_TABLE)
    options = CompileOptions(cluster="local:2", global_batch=8, set=("model.pp=2",))
    compiled = check_exactness(compile_model(path, options), required=True)
    assert [len(stages) for stages in compiled.plan.pipelines.values()] == [2]
