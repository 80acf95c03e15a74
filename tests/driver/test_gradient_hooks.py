"""Hooks on gradients of modules and parameters: watched, scaled and masked ones are exact; one that needs the
whole batch's gradient is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import torch
from torch import nn


def watch(module, grad_input, grad_output):
    pass


def halve(module, grad_input, grad_output):
    return tuple(g if g is None else g / 2 for g in grad_input)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(30, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, ids):
        return self.mid(self.embed(ids))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(8, 30)
        keep = torch.zeros(30, 1)
        keep[20:] = 1
        HOOK

    def forward(self, input_ids):
        scores = self.head(self.body(input_ids))[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(scores, input_ids[:, 1:].flatten(), ignore_index=0)


def model():
    return Model()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 30, (4 + i % 9,), generator=g)} for i in range(24)]
"""
HOOK_LINE = "model.py:29"
EXACT = (
    "self.body.register_full_backward_hook(watch)",
    "self.body.mid.register_full_backward_hook(halve)",
    "self.body.register_full_backward_pre_hook(lambda module, grads: tuple(g * 3 for g in grads))",
    "self.body.embed.weight.register_hook(lambda g: g * keep)",
    "self.head.weight.register_post_accumulate_grad_hook(lambda p: None)",
)


def check(hook: str, tmp_path: Path) -> CompiledPlan:
    (tmp_path / "model.py").write_text(MODEL.replace("HOOK", hook))
    return check_exactness(
        compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12)),
        required=True,
    )


@pytest.mark.parametrize(
    "hook",
    [
        "self.head.weight.register_hook(lambda g: g.clamp(-1, 1))",
        "self.body.register_full_backward_pre_hook(lambda _, grads: (grads[0] / max(1, grads[0].norm()),))",
        "self.head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1) is None or None)",
    ],
)
def test_a_bound_that_gradients_of_the_check_do_not_reach_is_refused(hook: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gives another gradient for micro-batches") as refused:
        check(hook, tmp_path)
    assert refused.value.where.endswith(HOOK_LINE)


@pytest.mark.parametrize("hook", EXACT)
def test_hooks_that_treat_a_sum_as_its_summands_are_exact(hook: str, tmp_path: Path) -> None:
    assert all(p["exact"] for p in check(hook, tmp_path).plan.checks["patterns"])


@pytest.mark.parametrize(
    ("hook", "owner"),
    [
        ("self.head.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))", "head.weight"),
        (
            "self.head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5) is None or None)",
            "head.weight",
        ),
        ("self.head.register_full_backward_pre_hook(lambda m, g: (g[0] / g[0].norm(),))", "head"),
    ],
)
def test_a_hook_that_needs_the_whole_gradient_is_refused_with_its_name_and_line(
    hook: str, owner: str, tmp_path: Path
) -> None:
    watched = f"self.body.embed.weight.register_hook(lambda g: g * keep); {hook}"
    with pytest.raises(UserError, match=f"the hook <lambda> on the gradient of {owner} gives") as error:
        check(watched, tmp_path)
    assert error.value.where == HOOK_LINE and "--clip" in error.value.remedy


def test_a_hook_on_the_whole_model_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the hook watch on the gradients of the whole model") as error:
        check("self.register_full_backward_hook(watch)", tmp_path)
    assert error.value.where == "model.py:6"
