from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.runtime.errors import UserError
from secc.runtime.kernels import geglu, launch_tuning, swiglu
from tests.kernels.float64_comparison import (
    TENSOR_LAYOUTS,
    assert_agree,
    check_operator_registrations,
    example_count,
    strided_tensor,
    tensor_seeds,
)

FUSED = {"silu": swiglu, "tanh": lambda g, u: geglu(g, u, "tanh"), "none": lambda g, u: geglu(g, u, "none")}
PLAIN = {"silu": F.silu, "tanh": lambda g: F.gelu(g, approximate="tanh"), "none": F.gelu}


@settings(max_examples=example_count(40))
@given(
    rows=st.sampled_from([(), (0,), (1,), (5,), (2, 3)]),
    width=st.integers(0, 20),
    activation=st.sampled_from(sorted(FUSED)),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
def test_agrees_with_float64(rows, width, activation, scale, layout, seed):
    inputs = [
        strided_tensor([*rows, width], layout, seed, scale),
        strided_tensor([*rows, width], "plain", seed + 1),
    ]
    with launch_tuning.use_launch("gated", launch_tuning.LaunchParameters(8)):
        assert_agree(FUSED[activation], lambda g, u: PLAIN[activation](g) * u, inputs, 2e-5)


def test_both_halves_of_one_projection():
    whole = [torch.randn(3, 2, 10)]
    assert_agree(lambda x: swiglu(*x.chunk(2, -1)), lambda x: F.silu(x[..., :5]) * x[..., 5:], whole, 2e-5)


@pytest.mark.parametrize("activation", sorted(FUSED))
def test_half_precision_rounds_once(activation):
    inputs = [torch.randn(7, 24).bfloat16(), torch.randn(7, 24).bfloat16()]
    assert_agree(
        FUSED[activation], lambda g, u: PLAIN[activation](g) * u, inputs, torch.finfo(torch.bfloat16).eps
    )


def test_invalid_arguments_are_rejected():
    with pytest.raises(UserError, match="differ in shape"):
        swiglu(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(UserError, match="cubic"):
        geglu(torch.ones(2), torch.ones(2), "cubic")


def test_operator_registrations():
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    check_operator_registrations("gated", gate, up, "silu")
