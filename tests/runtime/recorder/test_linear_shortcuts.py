"""Linear maps inside blocks are not run: the recorder predicts the layouts that torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.runtime.recorder import record_forward, take_at_path


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    ("bias", "trained", "cast"), [(True, True, False), (False, True, True), (True, False, False)]
)
def test_linear_maps_inside_blocks_have_the_layout_that_torch_gives(
    shape: tuple[int, ...], bias: bool, trained: bool, cast: bool
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(4, 6, bias).requires_grad_(trained)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                return self.map(x.to(self.map.weight))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.scale = (
                Block(),
                nn.Sequential(Block(), nn.ReLU()),
                nn.Parameter(torch.ones(4)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x * self.scale.detach()).sum() + self.second(x * self.scale).sum()

    model = Whole()
    taken = [
        n.meta
        for n in record_forward(model, {"x": torch.ones(shape)}, ["first", "second"]).graph.nodes
        if n.target is take_at_path
    ]
    for meta, entry in zip(taken, (torch.ones(shape), torch.ones(shape).requires_grad_()), strict=True):
        out = model.first(entry)
        assert (meta["shape"], meta["dtype"], meta["stride"]) == (out.shape, out.dtype, out.stride())
        assert meta["requires_grad"] == out.requires_grad
