"""Shape rules of ops on fake tensors give what torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from secc.runtime.recorder import meta_rules

aten = torch.ops.aten
MODE = FakeTensorMode(allow_non_fake_inputs=True)  # as the recorder has it


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return [layout(v) for v in value]
    return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


def calls(n: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x, turned, half = fake(n, 3, 8), fake(8, 3, n).permute(2, 1, 0), fake(n, 3, 8, dtype=torch.bfloat16)
    whole, flag, one = (
        fake(n, 3, 8, dtype=torch.int64),
        fake(3, 8, dtype=torch.bool),
        fake(dtype=torch.float64),
    )
    return [
        (aten.mul.Tensor, (x, fake(8)), {}),
        (aten.add.Tensor, (half, x), {}),
        (aten.add.Tensor, (fake(n, 1, 8), fake(3, 1)), {}),
        (aten.add.Tensor, (x, one), {"alpha": 2}),
        (aten.mul.Tensor, (whole, 2.5), {}),
        (aten.mul.Tensor, (turned, turned), {}),
        (aten.mul.Tensor, (turned, x), {}),
        (aten.eq.Scalar, (whole, 3), {}),
        (aten.where.self, (flag, x, one), {}),
        (aten.sin.default, (whole,), {}),
        (aten.silu.default, (x[1:],), {}),
        (aten.pow.Tensor_Scalar, (half, 2), {}),
        (aten.mm.default, (fake(n, 8), fake(8, 5)), {}),
        (aten.addmm.default, (fake(5), fake(n, 8), fake(5, 8).t()), {}),
        (aten.bmm.default, (x, turned.transpose(1, 2)), {}),
        (aten._to_copy.default, (turned,), {"dtype": torch.bfloat16}),
        (aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}),
        (aten.view.default, (x, [n * 3, 8]), {}),
        (aten.transpose.int, (x, 0, 2), {}),
        (aten.expand.default, (fake(1, 3, 1), [n, 3, 4]), {}),
        (aten.slice.Tensor, (x, 0, 1, 9), {}),
        (aten.select.int, (x, 2, 3), {}),
        (aten.split.Tensor, (x, 2, 1), {}),
        (aten.unbind.int, (x, 1), {}),
        (aten.embedding.default, (fake(9, 4), whole), {}),
        (aten.embedding.default, (fake(9, 4), torch.ones(n, 3, dtype=torch.int64)), {}),
        (aten.mul.Tensor, (x, torch.ones(3, 8)), {}),
        (aten.add.Tensor, (torch.ones(n, 3, 8, dtype=torch.float64), half), {}),
        (aten.add.Tensor, (x, torch.tensor(2.0, dtype=torch.float64)), {}),
        (aten.mul.Tensor, (turned, torch.ones(1, 3, 8)), {}),
        (aten.div.Tensor, (torch.ones(8, 3, n).permute(2, 1, 0), half), {}),
        (aten.nll_loss_forward.default, (fake(n, 7), torch.zeros(n, dtype=torch.int64), None, 1, -100), {}),
        (aten.nll_loss_forward.default, (fake(n, 7), fake(n, dtype=torch.int64), None, 2, -100), {}),
        (aten.nll_loss_forward.default, (fake(n, 7), fake(n, dtype=torch.int64), None, 0, -100), {}),
        (aten.nll_loss_forward.default, (fake(n, 7), fake(n, dtype=torch.int64), fake(7), 1, -100), {}),
        (aten.nll_loss_forward.default, (fake(7), fake(dtype=torch.int64), None, 1, -100), {}),
        (aten.native_layer_norm.default, (x, [8], fake(8), fake(8), 1e-5), {}),
        (aten.native_layer_norm.default, (x, [3, 8], None, None, 1e-5), {}),
        (aten.native_layer_norm.default, (turned, [8], None, None, 1e-5), {}),
        (aten.native_layer_norm.default, (half, [8], None, None, 1e-5), {}),
        (aten.native_layer_norm.default, (x[:, 1], [8], None, fake(8), 1e-5), {}),
        (aten.masked_scatter.default, (x, fake(n, 3, 1, dtype=torch.bool), fake(5, 8)), {}),
        (aten.masked_scatter.default, (x, torch.zeros(3, 8, dtype=torch.bool), x[1:]), {}),
        (aten.masked_scatter.default, (fake(3, 8), fake(n, 3, 8, dtype=torch.bool), x), {}),
        (aten.mean.dim, (x, [-1], True), {}),
        (aten.mean.dim, (x, [0, 2]), {}),
        (aten.mean.dim, (turned, [1]), {}),
        (aten._softmax.default, (x, -1, False), {}),
        (aten._log_softmax.default, (x, 1, False), {}),
        (aten._log_softmax.default, (turned, 2, False), {}),
        (aten._log_softmax.default, (half, 2, False), {}),
    ]


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_layouts_equal_torchs_even_if_learned_at_another_size(n: int) -> None:
    for func, args, kwargs in [*calls(4), *calls(n)]:
        assert layout(meta_rules.run_with_rule(func, args, kwargs)) == layout(func(*args, **kwargs)), func


def test_views_share_their_storage() -> None:
    x = fake(4, 6)
    for view in (
        meta_rules.run_with_rule(aten.t.default, (x,), {}),
        *meta_rules.run_with_rule(aten.split.Tensor, (x, 3), {}),
    ):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def test_real_tensors_keep_their_values_and_wrong_shapes_are_errors() -> None:
    assert meta_rules.run_with_rule(aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}).tolist() == [2, 2]
    assert isinstance(meta_rules.run_with_rule(aten.add.Tensor, (fake(2), fake(2)), {}), FakeTensor)
    with pytest.raises(RuntimeError):
        meta_rules.run_with_rule(aten.add.Tensor, (fake(2), fake(3)), {})
