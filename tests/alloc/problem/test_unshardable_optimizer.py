"""What a plan says of the user's optimizer: whether replicas may share its states between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import optimizer_limits
from secc.errors import UserError
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import load_model_file

MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)){frozen}

def dataset():
    return [{{"input": torch.zeros(4)}}]

def optimizer(params):
    params = list(params)
    return {optimizer}
"""


@pytest.mark.parametrize(
    ("optimizer", "frozen", "reason"),
    [
        ("torch.optim.AdamW(params)", "", ""),
        ("torch.optim.SGD([p for n, p in params if p.ndim > 1], lr=0.1)", "", ""),
        (
            "torch.optim.Muon([p for _, p in params if p.ndim == 2])",
            "",
            "Muon does not step on a part of a parameter",
        ),
        ("torch.optim.SGD([p for n, p in params if n == 'none'])", "", "optimizer() fails on this machine"),
        ("torch.optim.Muon([])", ".requires_grad_(False)", ""),
    ],
)
def test_the_users_optimizer_is_probed_without_weights(
    tmp_path: Path, optimizer: str, frozen: str, reason: str
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(optimizer=optimizer, frozen=frozen))
    user = load_model_file(path)
    found = optimizer_limits(user, build_meta_model(user)).get("unshardable", "")
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_an_optimizer_that_takes_pairs_for_parameters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(optimizer="torch.optim.SGD([p for p in params if p.ndim > 1])", frozen=""))
    user = load_model_file(path)
    with pytest.raises(UserError, match="'tuple' object has no attribute 'ndim'") as error:
        optimizer_limits(user, build_meta_model(user))
    assert error.value.where.endswith("model.py:12") and "(name, parameter) pairs" in error.value.remedy


def test_hooks_on_gradients_that_optimizer_registers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    hook = "[p.register_hook(lambda g: g.clamp(-1, 1)) for _, p in params] and torch.optim.AdamW(params)"
    path.write_text(MODEL.format(optimizer=hook, frozen=""))
    user = load_model_file(path)
    with pytest.raises(UserError, match=r"optimizer\(\) registers the hook <lambda>") as error:
        optimizer_limits(user, build_meta_model(user))
    assert error.value.where.endswith("model.py:12") and "in model()" in error.value.remedy
