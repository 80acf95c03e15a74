"""Recomputation of modules that keep tensors from one call for another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.runtime.sections import recompute

WIDTH = 8


@pytest.mark.parametrize("splits_backward", [False, True])
def test_a_unit_runs_again_with_the_tensors_that_its_first_run_found(
    splits_backward: bool,
) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
            if back:
                return self.inner(x).tanh() * self.mean
            self.mean = x.mean(0)
            return self.inner(x - self.mean).tanh()

    torch.manual_seed(0)
    block = Scale()
    batches = [torch.randn(3, WIDTH), torch.randn(4, WIDTH)]

    def gradients() -> list[torch.Tensor]:
        losses = [block(block(x), back=True).square().sum() for x in batches]  # two in flight
        found = [torch.autograd.grad(loss, list(block.parameters())) for loss in losses]
        torch.testing.assert_close(block.mean, batches[1].mean(0))
        return [g for of_batch in found for g in of_batch]

    wanted = gradients()
    recompute.install_recompute(nn.ModuleDict({"block": block}), ["block"], "full", splits_backward)
    torch.testing.assert_close(gradients(), wanted, rtol=0, atol=0)
