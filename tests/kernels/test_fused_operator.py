"""Plain calls skip the library; whatever watches or traces calls sees operators."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.kernels import gather_rows, layer_norm, rms_norm, rope, scatter_rows, swiglu
from secc.runtime.kernels.fused_operator import is_plain_call


class _NotedNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def run_all(x, weight, index, tables):
    q = x.view(1, 2, *x.shape[-2:])
    results = [rms_norm(x[0], weight), *layer_norm(x, weight, weight, residual=x), swiglu(x, x.flip(0))]
    results += [*rope(q, q[:, :1], tables, tables + 1), gather_rows(x[0], index)]
    results.append(scatter_rows(x[0], index, x[1, : len(index)]))
    return sum((r.sin().sum() for r in results), torch.zeros(()))


def make_inputs():
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randn(8), torch.tensor([3, 0, 3]), torch.randn(1, 5, 8)


def gradients(function, x, weight, *others):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(x, weight, *others)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


def test_watched_calls_give_the_same_bits_and_are_seen():
    plain, modes = gradients(run_all, *make_inputs()), _NotedNames()
    with modes:
        watched = gradients(run_all, *make_inputs())
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    seen = {name.removeprefix("secc::") for name in modes.names if name.startswith("secc::")}
    assert seen == {
        "norm", "norm_backward", "gated", "gated_backward", "rope", "gather_rows", "gather_rows_backward",
        "scatter_rows", "scatter_rows_backward",
    }  # fmt: skip


def test_compiled_calls_are_whole_graphs():
    plain = gradients(run_all, *make_inputs())
    compiled = gradients(torch.compile(run_all, backend="aot_eager", fullgraph=True), *make_inputs())
    torch.testing.assert_close(compiled, plain)


def test_what_is_not_plain_is_told():
    x = torch.ones(2, 3)
    assert is_plain_call(x) and is_plain_call(torch.nn.Parameter(x))
    assert not is_plain_call(x.to("meta"))
    with FakeTensorMode() as fake:
        assert not is_plain_call(x)
        assert rms_norm(fake.from_tensor(x), None).shape == (2, 3)
    assert rms_norm(x.to("meta"), None).shape == (2, 3)


def test_gradients_of_gradients_are_refused_not_wrong():
    x = torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(swiglu(x, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_backward"):
        torch.autograd.grad(gradient.sum(), x)
