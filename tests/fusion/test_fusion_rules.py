"""Fusion rules find what kernels compute in modules of any spelling and class, and say why if they do not
apply."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from secc.frontend.fusion import find_fusions as finding
from secc.runtime.training.eager_reference import LossAndGradients, compare_results
from tests.fusion.fuse_model import describe_misses, fuse_model, rules_by_class

WIDTH = 12


class Holder(nn.Module):
    """A module with weights, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.eps = 1e-5


class Inline(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * F.silu(self.gate(x)))


class Sigmoid(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class NewGelu(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g = self.gate(x)
        return (
            0.5
            * g
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))))
            * self.up(x)
        )


class ExactGelu(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([self.gate(x), self.up(x)], -1).chunk(2, dim=-1)
        return F.gelu(gate) * up


class Root(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps) * self.scale


class OnePlus(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._norm(x.float()) * (1.0 + self.scale.float())
        return y.type_as(x)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Variance(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + self.eps) * self.scale
            + self.shift
        )


class Block(Holder):
    """Norm, gate and residual in one forward, without submodules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (WIDTH,), self.scale, self.shift, 1e-5)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def halves(x: torch.Tensor) -> torch.Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def turn(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos[None, None], sin[None, None]
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


class Attention(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(x.shape[0], -1, 3, 4).transpose(1, 2) for p in (self.gate, self.up, self.down))
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        q, k = turn(q, k, angles.cos(), angles.sin())
        return (
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape) * self.scale + self.shift
        )


FUSED = [
    (Inline, {"swiglu"}),
    (Sigmoid, {"swiglu"}),
    (NewGelu, {"geglu"}),
    (ExactGelu, {"geglu"}),
    (Root, {"rms-norm"}),
    (OnePlus, {"rms-norm"}),
    (Variance, {"layer-norm"}),
    (Block, {"layer-norm", "swiglu"}),
    (Attention, {"rope"}),
]


def step(model: nn.Module, x: torch.Tensor) -> LossAndGradients:
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    loss = model(x).square().sum()
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return LossAndGradients(float(loss.detach()), gradients | {"x": x.grad})


@pytest.mark.parametrize(("cls", "rules"), FUSED, ids=[c.__name__ for c, _ in FUSED])
def test_spellings_are_found_and_exact(cls: type[nn.Module], rules: set[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(cls())
    for shape in ((3, 5, WIDTH), (1, 1, WIDTH), (2, 7, WIDTH)):
        x = torch.randn(shape)
        own = step(model, x)
        with fuse_model(model) as found:
            assert rules_by_class(found) == {cls.__name__: rules}, describe_misses(found)
            assert compare_results(step(model, x), own).is_exact


class Clamped(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)).clamp(max=2.0) * self.up(x))


class OutsideRoot(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.scale + self.eps


class OtherDim(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.scale


class LearntEps(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shift) * self.scale


class Branch(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x) if x.sum() > 0 else x


class Writes(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return F.silu(self.gate(x)) * self.up(x)


class InPlace(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self.gate(x))
        gate *= self.up(x)
        return gate


class Rounded(Holder):
    """Returns another dtype than a kernel would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x).double()) * self.up(x)


class Mixed(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.down.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((F.silu(self.gate(x)) * self.up(x)).to(self.down.weight.dtype))


class Training(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.silu(self.gate(x)) * self.up(x), 0.1, self.training)


RMS = "rms-norm: `x * rsqrt(mean(square(x)) + eps) * weight` does not fit:"
REFUSED = [
    (Clamped, "swiglu: `silu(gate) * up` does not fit: `clamp` stands where silu(…) is expected"),
    (
        OutsideRoot,
        f"{RMS} mean(…) stands where add(…) is expected",
    ),
    (
        OtherDim,
        f"{RMS} `mean` stands where mean(…) is expected",
    ),
    (
        LearntEps,
        "rms-norm: `x * rsqrt(mean(square(x)) + eps) * weight` does not fit: eps is shift, not a number",
    ),
    (Branch, "it cannot be traced: symbolically traced variables cannot be used as inputs to control flow"),
    (Writes, "it writes to last"),
    (InPlace, "it changes a tensor in place (*=)"),
    (Rounded, "swiglu: the value is float32[3, 5, 24] instead of float64[3, 5, 24]"),
    (Mixed, "it reads dtypes, and its parameters have several (bfloat16, float32)"),
    (Training, "it cannot be traced: it reads self.training, which may change"),
]


@pytest.mark.parametrize(("cls", "reason"), REFUSED, ids=[c.__name__ for c, _ in REFUSED])
def test_unfused_module_is_explained(cls: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(cls())
    with fuse_model(model) as found:
        assert not found.forms
        assert (
            reason in describe_misses(found)
            and f"{cls.__name__}.forward" in describe_misses(found)
            and "test_fusion_rules.py:" in describe_misses(found)
        )


def test_hooked_modules_are_not_fused_away() -> None:
    """An activation with a hook is called as before."""

    class Gated(Holder):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.gate(x)) * self.up(x)

    model = nn.Sequential(Gated(), Gated())
    called: list[nn.Module] = []
    model.get_submodule("0.act").register_forward_hook(lambda module, *_: called.append(module))
    with fuse_model(model) as found:
        assert [f.modules for f in found.forms] == [["1"]]
        model(torch.randn(2, 3, WIDTH))
    assert called == [model[0].act]


class _Numbered(nn.Module):
    """A norm in a numbered layer; subclasses may read the number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.eps, self.shape = number, 1e-6, tuple([16])
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-len(self.shape), keepdim=True) + self.eps) * self.weight


class _Reading(_Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.number == 0 else x * self.weight


@pytest.mark.parametrize(("layer", "traces"), [(_Numbered, 1), (_Reading, 3)])
def test_equal_layers_are_traced_once(
    layer: type[_Numbered], traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    trace = finding.trace_method

    def counted(module: nn.Module, method: str, reads: set[str]) -> fx.Graph:
        nonlocal count
        count += 1
        return trace(module, method, reads)

    monkeypatch.setattr(finding, "trace_method", counted)
    model = nn.Sequential(*(layer(i) for i in range(3)))
    found = finding.find_fusions(model, ["0", "1", "2"])
    assert count == traces
    assert [f.modules for f in found.forms] == ([["0", "1", "2"]] if traces == 1 else [["0"]])
