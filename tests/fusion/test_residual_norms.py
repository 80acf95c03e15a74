"""Sums that a norm follows in a layer's own code become one operator with it, in users' spellings; what
cannot be shown equal stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.frontend.fusion.find_fusions import find_fusions
from secc.frontend.fusion.residual_norms import RESIDUAL_NORM
from secc.runtime.fusion import operators
from secc.runtime.model.source_lines import module_paths_by_id, random_call_name, running_module_and_lines
from tests.fusion.fuse_model import block_names, fuse_model, rules_by_class

WIDTH = 8


class RootMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * hidden.to(dtype)


class Shifted(nn.Module):
    """A norm of a sum that is used elsewhere, too: the sum must exist before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RootMean()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden, (WIDTH,), None, None, 1e-5) + hidden


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        if hidden.shape[0] > 100:  # a trace cannot follow it
            return hidden, None
        return self.o(hidden).tanh(), None


class Layer(nn.Module):
    """The parts of a layer."""

    norm_class: Callable[[], nn.Module] = RootMean

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.norm_class(), self.norm_class()
        self.attention, self.mlp = Attention(), nn.Linear(WIDTH, WIDTH)


class Llama(Layer):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        """Adds, keeps the sum, normalizes."""
        residual = hidden
        hidden = self.first(hidden)
        hidden, _ = self.attention(
            hidden=hidden,
            mask=mask,
            **others,
        )
        hidden = residual + hidden
        residual = hidden
        hidden = self.second(hidden)
        hidden = residual + self.mlp(hidden)
        return hidden


class Nano(Layer):
    norm_class = partial(nn.LayerNorm, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))[0]
        x = x + self.mlp(self.second(x))
        return x


class PostNorm(Layer):
    norm_class = partial(nn.LayerNorm, WIDTH)

    def forward(self, x: torch.Tensor, twice: bool = True) -> torch.Tensor:
        y = x + self.attention(x)[0]
        x = self.first(y)
        if twice:
            y = self.mlp(x) + x
            return self.second(y)
        return x


class Broadcast(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x.mean(0, keepdim=True)
        return self.first(y)


class Branch(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mlp(x)
        return y if len(self._modules) > 9 else self.first(y) if x.dim() else y


class Uses(Layer):
    norm_class = Shifted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mlp(x)
        return self.first(y)


def doubles(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * forward(*args, **kwargs)

    return run


class Wrapped(Layer):
    @doubles
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mlp(x)
        return self.first(y)


class Closure(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().__init__  # noqa: B018
        y = x + self.mlp(x)
        return self.first(y)


class Dropped(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + F.dropout(self.mlp(x), 0.5, self.training)
        return self.first(y)


FOUND, LEFT = [Llama, Nano, PostNorm, Broadcast, Wrapped, Dropped], [Branch, Uses, Closure]


def run(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 5, WIDTH, dtype=dtype, requires_grad=True)
    y = model(x)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [
        y,
        *torch.autograd.grad(
            y.float().square().sum(), [x, *wanted], allow_unused=True, materialize_grads=True
        ),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", FOUND)
def test_sums_and_norms_are_one_operator(layer: type[Layer], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer()).to(dtype)
    plain, truth = run(model, dtype), run(nn.Sequential(*model).double(), torch.float64)
    model.to(dtype)
    with fuse_model(model) as found:
        assert RESIDUAL_NORM in rules_by_class(found)[layer.__name__]
        fused = run(model, dtype)
    for mine, own, true in zip(fused, plain, truth, strict=True):
        assert mine.dtype == own.dtype
        error, allowed = (mine.double() - true).norm(), (own.double() - true).norm()
        assert error <= 1.5 * allowed + 1e-6 * true.norm()


@pytest.mark.parametrize("layer", LEFT)
def test_other_sums_stay(layer: type[Layer]) -> None:
    model = nn.Sequential(layer())
    assert RESIDUAL_NORM not in rules_by_class(find_fusions(model, block_names(model))).get(
        layer.__name__, ()
    )


def test_the_kernel_reads_both_summands(monkeypatch: pytest.MonkeyPatch) -> None:
    residuals = list[bool]()
    kernel = operators.kernels.rms_norm
    monkeypatch.setattr(
        operators.kernels, "rms_norm", lambda *a: residuals.append(a[-1] is not None) or kernel(*a)
    )
    model = nn.Sequential(Llama())
    with fuse_model(model):
        residuals.clear()
        model(torch.randn(2, 3, WIDTH))
        assert residuals == [False, True]
        residuals.clear()
        model.get_submodule("0.second").register_forward_pre_hook(lambda _, given: (given[0] * 2,))
        with torch.no_grad():
            model(torch.randn(2, 3, WIDTH))
        assert residuals == [False, False]  # the hook sees the sum


def test_random_ops_keep_their_lines() -> None:
    model = nn.Sequential(Dropped())
    paths, seen = module_paths_by_id(model), list[str]()

    def note(*args: Any) -> torch.Tensor:
        seen.append(random_call_name(*running_module_and_lines(paths)))
        return args[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", note)
        model(torch.randn(2, WIDTH))
        with fuse_model(model):
            model(torch.randn(2, WIDTH))
    assert len(seen) == 2 and seen[0] == seen[1]
