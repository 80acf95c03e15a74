"""Blocks of torch's own classes keep samples apart at some dims only."""

from __future__ import annotations

import pytest
from torch import nn

from secc.errors import UserError
from secc.frontend.capture.block_layouts import annotate_block_layouts
from secc.ir.text_io.module_text import parse_module
from secc.pass_pipeline import parse_pipeline, run_passes

TEXT = """
sec.graph "g" {{
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "{name}" params 10 trainable 10
  sec.case "all" when [] {{
    %x = sec.input "x" : !sec.tensor<[{dims}], f32>
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[{dims}], f32, grad>
    %loss = sec.glue "aten.sum.default" (%y) args "$0" at "model.py:10" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }}
}}
"""


def normalize(layer: nn.Module, dims: str) -> None:
    module, model = parse_module(TEXT.format(dims=dims, name=type(layer).__name__)), nn.Module()
    model.net = layer
    annotate_block_layouts(module, model)
    run_passes(module, parse_pipeline("normalize-loss"))


ENCODER = nn.TransformerEncoderLayer(8, 2, batch_first=True)
TAKEN = [
    (nn.GRU(8, 8, batch_first=True), "B, 8, 8"),
    (nn.LSTM(8, 8), "8, B, 8"),
    (ENCODER, "B, 8, 8"),
    (nn.TransformerEncoder(ENCODER, 2), "B, 8, 8"),
    (nn.ConvTranspose1d(8, 8, 1), "B, 8, 8"),
    (nn.GroupNorm(2, 8), "B, 8, 8"),
    (nn.ConstantPad1d((1, -1), 1.0), "8, B, 8"),
    (nn.Linear(8, 8), "8, B, 8"),
]
MIXED = [
    (nn.GRU(8, 8), "B, 8, 8"),
    (nn.LSTM(8, 8, batch_first=True), "8, B, 8"),
    (nn.RNN(8, 8), "B, 8"),
    (ENCODER, "8, B, 8"),
    (nn.ConvTranspose1d(8, 8, 1), "B, 8"),
    (nn.GroupNorm(2, 8), "8, 8, B"),
    (nn.ConstantPad1d((1, -1), 1.0), "8, 8, B"),
]


@pytest.mark.parametrize(("layer", "dims"), TAKEN, ids=[f"{type(m).__name__} {d}" for m, d in TAKEN])
def test_samples_where_the_class_expects_them_are_kept_apart(layer: nn.Module, dims: str) -> None:
    normalize(layer, dims)


@pytest.mark.parametrize(("layer", "dims"), MIXED, ids=[f"{type(m).__name__} {d}" for m, d in MIXED])
def test_samples_at_another_dim_are_refused(layer: nn.Module, dims: str) -> None:
    place = dims.split(", ").index("B")
    with pytest.raises(UserError, match=f"is a {type(layer).__name__}, which mixes dim {place}"):
        normalize(layer, dims)
