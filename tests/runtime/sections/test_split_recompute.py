"""Recomputation under a split backward: a unit runs again once, and both parts read what it saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.runtime.sections.recompute import install_recompute
from secc.runtime.training.split_backward import split_backward

WIDTH, DEPTH = 8, 4


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.inner(x).tanh() * x


def _run(mode: str) -> tuple[list[torch.Tensor | None], int]:
    """(gradients of the input and of parameters, runs of all layers)."""
    torch.manual_seed(0)
    layers = [_Layer() for _ in range(DEPTH)]
    tower = nn.Sequential(*layers)
    install_recompute(tower, [""], mode, splits_backward=True)
    leaf = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    out = tower(leaf).square().sum()
    finish = split_backward([(out, torch.ones(()))], [leaf])
    runs = sum(layer.runs for layer in layers)
    assert all(p.grad is None for p in tower.parameters())
    finish()
    assert runs == sum(layer.runs for layer in layers)
    return [leaf.grad, *(p.grad for p in tower.parameters())], runs


@pytest.mark.parametrize(("mode", "again"), [("selective", DEPTH // 2), ("full", DEPTH)])
def test_a_unit_runs_again_once(mode: str, again: int) -> None:
    (expected, runs), (found, with_again) = _run("none"), _run(mode)
    assert (runs, with_again) == (DEPTH, DEPTH + again)
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
