"""Rewritten modules keep the user's parameters, names, hooks and lines; arguments unlike the trace's run the
user's code."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.codegen.fused_module import plan_rewrites, render_fused_module
from secc.errors import UserError
from secc.frontend.fusion.find_fusions import find_fusions
from secc.runtime.fusion import install as install_module
from secc.runtime.fusion.install import install_fused, installed_temporarily, rebind_globals
from secc.runtime.model.source_lines import module_paths_by_id, random_call_name, running_module_and_lines
from tests.fusion.fuse_model import block_names, declare_fusions, fuse_model

WIDTH = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        hidden = self.dropout(hidden)
        hidden = self.down(hidden)
        return hidden if scale is None else hidden * scale


class Marked(torch.Tensor):
    """A tensor subclass, like DTensor."""


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP(), nn.LayerNorm(WIDTH)).eval()


def ran(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the fused code of the first module runs for these arguments."""
    calls: list[Any] = []
    kernel = install_module.operators.swiglu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            install_module.operators, "swiglu", lambda gate, up: calls.append(1) or kernel(gate, up)
        )
        model[0](*args, **kwargs)
    return bool(calls)


def test_parameters_names_and_hooks_are_kept(model: nn.Module) -> None:
    before, seen = {k: v.data_ptr() for k, v in model.state_dict().items()}, list[str]()
    model[0].register_forward_pre_hook(lambda m, args: seen.append("before"))
    model[0].register_forward_hook(lambda m, args, out: seen.append("after"))
    model[0].gate.register_forward_hook(lambda m, args, out: seen.append("gate"))
    model[0].register_full_backward_hook(lambda m, *_: seen.append("backward"))
    with fuse_model(model):
        model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        assert {k: v.data_ptr() for k, v in model.state_dict().items()} == before
        assert list(inspect.signature(model[0].forward).parameters) == ["x", "scale"]
    assert seen == ["before", "gate", "after", "backward"]
    assert "forward" not in vars(model[0])


def test_arguments_unlike_the_trace_run_the_users_code(model: nn.Module) -> None:
    x = torch.randn(3, WIDTH)
    with fuse_model(model):
        assert ran(model, x) and ran(model, x=x)
        assert not ran(model, x, 2.0) and not ran(model, x, scale=2.0)
        assert not ran(model, x.as_subclass(Marked))
        assert model[0](x, 2.0).allclose(2 * model[0](x))


def test_random_ops_and_tracebacks_have_the_users_lines(model: nn.Module) -> None:
    model[0].train()
    names = list[str]()

    def hook(module: nn.Module, args: Any) -> None:
        names.append(random_call_name(*running_module_and_lines(module_paths_by_id(model))))

    model[0].dropout.register_forward_pre_hook(hook)
    model[0](torch.randn(2, WIDTH))
    with fuse_model(model):
        model[0](torch.randn(2, WIDTH))
        try:
            model[0](torch.randn(2, WIDTH + 1))
        except RuntimeError as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
            assert frames[-1].line == "hidden = F.silu(self.gate(x)) * self.up(x)"
    assert names[0] == names[1] and "test_install.py:" in names[0]


def test_another_model_than_the_plans_is_rejected(model: nn.Module) -> None:
    graph = declare_fusions(find_fusions(model, block_names(model)))
    made, text = plan_rewrites(graph), render_fused_module(graph)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), *list(model)[1:])
    with pytest.raises(UserError, match="0 is of class Linear, but the plan was made with MLP"):
        install_fused(other, made, text)
    install_fused(model, made, text)
    with pytest.raises(UserError, match="has its own forward"):
        install_fused(model, [replace(r, modules=r.modules[:1]) for r in made], text)


def test_code_is_compiled_once_for_each_line(model: nn.Module) -> None:
    graph = declare_fusions(find_fusions(model, block_names(model)))
    text = render_fused_module(graph)
    mlp = next(r for r in plan_rewrites(graph) if r.cls == "MLP")
    assert mlp.modules == ("0", "1") and "swiglu = fused.swiglu(gate, up)" in text
    compile(text, "fused.py", "exec")
    with installed_temporarily(model, plan_rewrites(graph), text):
        assert model[0].forward.__wrapped__.__func__ is MLP.forward


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def decorated(function: Any) -> Any:
    def run(*args: Any) -> Any:
        return function(*args) + 1

    run.__wrapped__ = function
    return run


@decorated
def wrapped(x: torch.Tensor) -> torch.Tensor:
    return twice(x)


def test_global_is_rebound_through_decorators() -> None:
    again = rebind_globals(wrapped, {"twice": lambda x: 3 * x})
    assert again(torch.ones(())) == 4 and wrapped(torch.ones(())) == 3
    hidden = decorated(print)
    with pytest.raises(ValueError, match="hides its code"):
        rebind_globals(hidden, {})
