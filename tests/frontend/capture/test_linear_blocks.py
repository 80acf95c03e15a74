"""Only layers that are exactly `nn.Linear` may be replaced by an operator on their weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from xdsl.dialects.builtin import ModuleOp

from secc.frontend.capture.linear_blocks import annotate_linear_blocks
from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.tensor_type import TensorType
from secc.ir.text_io.module_text import parse_module

TEXT = 'sec.graph "g" { sec.block "head" class "Linear" params 6 trainable 6 }'


class Linear(nn.Linear):
    """A subclass of the same name, as adapters are."""


def hooked() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def wrapped() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def noted(layer: nn.Module) -> ModuleOp:
    module, model = parse_module(TEXT), nn.Module()
    model.head = layer
    annotate_linear_blocks(module, model)
    return module


def test_a_plain_linear_layer_is_annotated_with_its_parameter_types() -> None:
    attributes = graph_of(noted(nn.Linear(2, 3, dtype=torch.bfloat16))).blocks["head"].attributes
    assert attributes == {
        "weight": TensorType.from_dims([3, 2], "bf16", True),
        "bias": TensorType.from_dims([3], "bf16", True),
    }


@pytest.mark.parametrize(
    "layer", [Linear(2, 3), hooked(), wrapped(), parametrizations.weight_norm(nn.Linear(2, 3))]
)
def test_a_layer_that_does_more_than_nn_linear_is_not_annotated(layer: nn.Module) -> None:
    assert not graph_of(noted(layer)).blocks["head"].attributes
