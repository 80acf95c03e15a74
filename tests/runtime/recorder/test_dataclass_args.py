"""Dataclasses as arguments of blocks: sections rebuild those of libraries; those that a rank cannot import
are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from tests.e2e.harness import compile_and_write

MODEL = """
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput


@dataclass
class Own:
    last_hidden_state: torch.Tensor


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, given):
        return self.map(given.last_hidden_state)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), Decoder()

    def forward(self, x):
        return self.decoder(CLASS(last_hidden_state=self.encoder(x))).square().mean()


def model():
    return Model()


def dataset():
    return [dict(x=torch.randn(8)) for _ in range(12)]
"""


def written(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("CLASS(", f"{name}("))
    return path


def test_a_section_rebuilds_a_dataclass_from_its_fields(tmp_path: Path) -> None:
    sections = ("encoder=encoder", "decoder=decoder")
    plan = tmp_path / "plan"
    compiled = compile_and_write(
        written(tmp_path, "BaseModelOutput"),
        plan,
        cluster="local:2",
        global_batch=4,
        strategy="apart",
        sections=sections,
    )
    assert [p["exact"] for p in compiled.plan.checks["patterns"]] == [True]
    text = (plan / "sections" / "decoder.py").read_text()
    assert (
        "self.decoder(built('transformers.modeling_outputs:BaseModelOutput', {'last_hidden_state': encoder}))"
        in text
    )


def test_a_dataclass_of_the_model_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="called with a value of type Own, which cannot be written into a plan"
    ) as refused:
        compile_model(written(tmp_path, "Own"), CompileOptions())
    assert "in an imported module" in refused.value.remedy
