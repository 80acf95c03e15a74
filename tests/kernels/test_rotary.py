from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.runtime.errors import UserError
from secc.runtime.kernels import launch_tuning, rope
from tests.kernels.float64_comparison import (
    assert_agree,
    check_operator_registrations,
    example_count,
    strided_tensor,
    tensor_seeds,
)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def reference(x, cos, sin):
    """Rotates as Hugging Face's models do, partially."""
    width = cos.shape[-1]
    cos, sin = (t.double().unsqueeze(-3) for t in (cos, sin))
    rotated, rest = x[..., :width], x[..., width:]
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, rest], -1)


@settings(max_examples=example_count(30))
@given(
    batch=st.integers(0, 2),
    heads=st.integers(1, 5),
    key_heads=st.integers(1, 2),
    positions=st.integers(0, 4),
    half=st.integers(1, 5),
    rest=st.integers(0, 3),
    tables=st.sampled_from(["shared", "own", "2-dim"]),
    transposed=st.booleans(),
    seed=tensor_seeds(),
)
def test_agrees_with_float64(batch, heads, key_heads, positions, half, rest, tables, transposed, seed):
    shape = {
        "shared": [1, positions, 2 * half],
        "own": [batch, positions, 2 * half],
        "2-dim": [positions, 2 * half],
    }[tables]
    cos, sin = (
        strided_tensor(shape, "plain", seed),
        strided_tensor(shape, "stepped", seed + 1),
    )  # halves that differ, too

    def projected(count, number):
        width = 2 * half + rest
        if transposed:
            return strided_tensor([batch, positions, count, width], "plain", number).transpose(1, 2)
        return strided_tensor([batch, count, positions, width], "stepped", number)

    inputs = [projected(heads, seed + 2), projected(key_heads, seed + 3)]
    with launch_tuning.use_launch("rope", launch_tuning.LaunchParameters(0, 2)):
        assert_agree(
            lambda q, k: rope(q, k, cos, sin),
            lambda q, k: (reference(q, cos, sin), reference(k, cos, sin)),
            inputs,
            2e-5,
        )


def test_results_keep_the_memory_order_of_dims():
    q = torch.randn(2, 5, 3, 4).transpose(1, 2)
    rotated, _ = rope(q, q, torch.ones(5, 4), torch.zeros(5, 4))
    assert rotated.stride() == q.stride()
    assert torch.equal(rotated, q)


def test_invalid_arguments_are_rejected():
    q = torch.ones(1, 2, 3, 4)
    for message, cos in {
        "do not fit": torch.ones(2, 4),
        "even": torch.ones(3, 3),
        "no gradient": torch.ones(3, 4, requires_grad=True),
    }.items():
        with pytest.raises(UserError, match=message):
            rope(q, q, cos, cos)


def test_operator_registrations():
    q, tables = torch.randn(2, 3, 4, 6, requires_grad=True), torch.randn(1, 4, 4)
    check_operator_registrations("rope", q, None, tables, tables + 1, False, torch.float32, torch.float32)
    check_operator_registrations(
        "rope", q, q.detach()[:, :1], tables, tables + 1, True, torch.float32, torch.float32
    )
