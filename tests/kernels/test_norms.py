from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from secc.runtime.errors import UserError
from secc.runtime.kernels import launch_tuning, layer_norm, rms_norm
from tests.kernels.float64_comparison import (
    TENSOR_LAYOUTS,
    assert_agree,
    check_operator_registrations,
    example_count,
    strided_tensor,
    tensor_seeds,
)

ROWS = st.sampled_from([(), (0,), (1,), (9,), (2, 3), (2, 2, 3)])


def launch(width: int, rows: int = 2):
    return launch_tuning.use_launch(
        "norm", launch_tuning.LaunchParameters(1 << (width - 1).bit_length(), rows)
    )


@settings(max_examples=example_count(40))
@given(
    rows=ROWS,
    width=st.integers(1, 20),
    weighted=st.booleans(),
    center=st.booleans(),
    residual=st.booleans(),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
@example(
    rows=(9,), width=2, weighted=False, center=True, residual=False, layout="swapped", seed=863851
)  # gradients that cancel
def test_agrees_with_float64(rows, width, weighted, center, residual, layout, seed):
    inputs = [strided_tensor([*rows, width], layout, seed + i, 3.0) for i in range(1 + residual)]
    inputs += [strided_tensor([width], "plain", seed + 2 + i) for i in range(weighted * (1 + center))]

    def split(tensors):
        x, *rest = tensors
        extra = rest.pop(0) if residual else None
        weight, bias = [*rest, None, None][:2]
        return x, extra, weight, bias

    def operator(*tensors):
        x, extra, weight, bias = split(tensors)
        return layer_norm(x, weight, bias, 1e-3, extra) if center else rms_norm(x, weight, 1e-3, extra)

    def reference(*tensors):
        x, extra, weight, bias = split(tensors)
        h = x if extra is None else x + extra
        y = F.layer_norm(h, [width], weight, bias, 1e-3) if center else F.rms_norm(h, [width], weight, 1e-3)
        return y if extra is None else (y, h)

    with launch(width):
        assert_agree(operator, reference, inputs, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    inputs = [(3 * torch.randn(7, 24)).to(dtype), torch.randn(24).to(dtype)]
    assert_agree(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, [24], w, 1e-5),
        inputs,
        torch.finfo(dtype).eps,
    )


def test_mixed_dtypes_promote_as_in_pytorch():
    x, weight = torch.randn(2, 8).bfloat16().requires_grad_(), torch.randn(8, requires_grad=True)
    y = rms_norm(x, weight)
    assert y.dtype == torch.float32
    assert [g.dtype for g in torch.autograd.grad(y.sum(), (x, weight))] == [torch.bfloat16, torch.float32]


def test_gradient_of_an_unused_norm_with_residual():
    x, residual = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    _, h = rms_norm(x, torch.ones(8), 1e-6, residual)
    assert torch.equal(h, x + residual)
    for gradient in torch.autograd.grad(h.sum(), (x, residual)):
        assert torch.equal(gradient, torch.ones(2, 8))


def test_invalid_arguments_are_rejected():
    with pytest.raises(UserError, match="weight"):
        rms_norm(torch.ones(2, 8), torch.ones(7))
    with pytest.raises(UserError, match="residual"):
        layer_norm(torch.ones(2, 8), None, None, residual=torch.ones(8))


def test_operator_registrations():
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ([3, 8], [8], [8]))
    check_operator_registrations("norm", x, weight, bias, None, 1e-5, True)
    check_operator_registrations("norm", x, weight, None, torch.randn(3, 8), 1e-5, False)
