"""The operators that rewritten code calls: argument shapes, tables that a kernel does not take, parts of
tensors."""

from __future__ import annotations

import pytest
import torch

from secc.runtime.fusion import operators
from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, mark_of, set_mark
from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode


def plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


SHAPES = [
    ((2, 3, 5, 8), (2, 1, 5, 8)),
    ((2, 3, 5, 8), (1, 1, 5, 8)),
    ((2, 5, 3, 8), (2, 5, 1, 8)),
    ((5, 3, 8), (5, 1, 8)),
    ((3, 5, 8), (1, 5, 8)),
    ((2, 1, 1, 8), (2, 1, 1, 8)),
    ((5, 5, 8), (5, 1, 8)),
    ((2, 3, 5, 8), (2, 3, 5, 8)),
    ((2, 3, 5, 8), (5, 8)),
    ((2, 0, 5, 8), (2, 1, 5, 8)),
]


@pytest.mark.parametrize(("shape", "table"), SHAPES)
@pytest.mark.parametrize("learnt", [False, True])
def test_rotations_broadcast_like_the_users_code(
    shape: tuple[int, ...], table: tuple[int, ...], learnt: bool
) -> None:
    x = torch.randn(shape, requires_grad=True)
    cos, sin = (torch.randn(table, requires_grad=learnt) for _ in range(2))
    wanted, found = plain(x, cos, sin), operators.rotate(x, cos, sin)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    inputs = [x, cos, sin] if learnt else [x]
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream)
    )


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the part of the second of two ranks."""
    return set_mark(x.chunk(2, dim)[1].clone(), ShardMark(dim, (x.shape[dim],)))


def test_operators_on_parts_give_parts() -> None:
    torch.manual_seed(0)
    gate, up, x = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 4, 5, 8)
    weight, cos, sin = torch.randn(8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)
    with WholeShapeMode(1, 2):
        gated = operators.swiglu(part(gate, 2), part(up, 2))
        normed = operators.rms_norm(part(x, 1), weight, 1e-5)
        turned = operators.rotate(part(x, 1), cos, sin)
        assert gated.shape == gate.shape and normed.shape == x.shape  # whole sizes, on parts
    found = {
        gated: operators.swiglu(gate, up),
        normed: operators.rms_norm(x, weight, 1e-5),
        turned: operators.rotate(x, cos, sin),
    }
    for got, whole in found.items():
        known = mark_of(got)
        assert known is not None and known.whole_size == whole.shape[known.dim]
        torch.testing.assert_close(got.as_subclass(torch.Tensor), whole.chunk(2, known.dim)[1])


def test_norm_over_a_cut_dim_takes_plain_ops() -> None:
    with WholeShapeMode(1, 2), pytest.raises(UnshardableCode):
        operators.rms_norm(part(torch.randn(2, 5, 8), 2), None, 1e-5)
