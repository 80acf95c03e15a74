"""Products of tensors in different dtypes fail while forward is recorded, as they do in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.errors import UserError
from secc.runtime.recorder import record_forward


class Product(nn.Module):
    """A product inside a block, or of the block's result with a parameter of the model."""

    def __init__(self, block: nn.Module, shared: torch.Tensor) -> None:
        super().__init__()
        self.block, self.shared = block, nn.Parameter(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.block(x) @ self.shared).sum()


def linear(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(4, 4, dtype=dtype)


BLOCKS = {
    "linear": linear,
    "no bias": lambda dtype: nn.Linear(4, 4, bias=False, dtype=dtype),
    "layers": lambda dtype: nn.Sequential(linear(dtype), nn.ReLU()),
    "convolution": lambda dtype: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 4, dtype=dtype), nn.Flatten()
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("of_block", "of_glue", "fails"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
    ],
    ids=["one dtype", "in the block", "between blocks"],
)
def test_products_of_two_dtypes(kind: str, of_block: torch.dtype, of_glue: torch.dtype, fails: bool) -> None:
    torch.manual_seed(0)
    model = Product(BLOCKS[kind](of_block), torch.randn(4, 4, dtype=of_glue))
    batch = {"x": torch.randn(3, 4)}
    try:
        model(**batch)
        failed = False
    except RuntimeError:
        failed = True
    assert failed is fails
    if fails:
        with pytest.raises((RuntimeError, UserError), match=r"different dtypes|should be the same"):
            record_forward(model, batch, ["block"])
    else:
        record_forward(model, batch, ["block"])
