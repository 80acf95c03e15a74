"""Model files whose functions are given as objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secc.runtime.model.user_file import UserModel, load


class Anything(nn.Module):
    """Takes any batch."""

    def forward(self, **batch: Any) -> torch.Tensor:
        return torch.zeros(())


@pytest.fixture
def user_of(tmp_path: Path) -> Callable[..., UserModel]:
    """`user_of(samples, **functions)`: a user's model that takes any batch, with a list as dataset and
    further functions of the file."""

    def build(samples: list[dict[str, Any]], **functions: Any) -> UserModel:
        path = tmp_path / "given_functions.py"
        path.write_text("")
        user = load(path)
        vars(user.module).update({"model": Anything, "dataset": lambda: samples, **functions})
        return user

    return build
