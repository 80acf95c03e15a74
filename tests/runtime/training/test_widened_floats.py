"""Ops that run in wider floats than the code asks for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from secc.runtime.training.widened_floats import widened_floats


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.weight = nn.Parameter(torch.randn(7, 8)), nn.Parameter(torch.randn(3, 8, 4))

    def forward(self) -> torch.Tensor:
        ends = torch.tensor([2, 2, 7], dtype=torch.int32)
        return torch.ops.aten._grouped_mm(self.rows, self.weight, ends).square().sum()


def test_grouped_products_which_torch_lacks_in_float64_are_computed_group_by_group() -> None:
    torch.manual_seed(0)
    model = Experts()
    parts = zip(model.rows.split([2, 0, 5]), model.weight, strict=True)
    wanted = sum((rows.double() @ weight.double()).square().sum() for rows, weight in parts)
    assert isinstance(wanted, torch.Tensor)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    with widened_floats(model, torch.float64):
        found = model()
        assert found.dtype == torch.float64
        found.backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.detach(), wanted.detach())


@pytest.mark.timeout(60)
def test_views_of_parameters_without_values_do_not_wait_for_their_own_lock() -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(4, 8))
        with widened_floats(nn.Module(), torch.float64):
            row = parameter[None]
    assert row.shape == (1, 4, 8) and row.requires_grad
