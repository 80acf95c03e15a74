"""Gradients of batch norms for one sample, whatever the strides of input and gradient are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secc.runtime.sections.batch_norm_strides import batch_norms_of_one

CPU = torch.device("cpu")
ORDERS = {
    "NCHW": lambda t: t.clone(memory_format=torch.contiguous_format),
    "NHWC": lambda t: t.clone(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("follows", [lambda x: x, F.relu_, lambda x: x.unsqueeze(0).mul_(2)[0]])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("of_input", "of_gradient"), list(itertools.product(ORDERS, ORDERS)))
def test_gradients_do_not_depend_on_strides(
    of_input: str, of_gradient: str, training: bool, follows: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Also where what follows the norm changes its result in place."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, track_running_stats=not training).train(training)
    x, gradient = torch.randn(1, 8, 4, 4), torch.randn(1, 8, 4, 4)

    def compute(x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        with batch_norms_of_one(CPU):
            result = follows(norm(leaf))
            return [result, *torch.autograd.grad(result, (leaf, *norm.parameters()), gradient)]

    expected = compute(x, gradient)
    for found, wanted in zip(
        compute(ORDERS[of_input](x), ORDERS[of_gradient](gradient)), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_torchs_own_function_is_back_afterwards() -> None:
    before = F.batch_norm
    with pytest.raises(ValueError, match="stop"), batch_norms_of_one(CPU):
        assert F.batch_norm is not before
        raise ValueError("stop")
    assert F.batch_norm is before
