"""What every test shares: one torch thread for each process, where the sample models are, goldens, and free
ports.

The thread settings must stand before torch is imported: two busy threads on a small machine are many times
slower than one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings
from torch import nn

from secc.runtime.model.user_file import UserModel, load_model_file

# No deadline, since a busy machine is no failure. With CI=true the same commit has the same examples;
# elsewhere each run has new ones.
settings.register_profile("secc", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("secc")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="overwrite golden files instead of comparing with them"
    )
    parser.addoption(
        "--plans", type=int, default=60, help="so many random plans in all (tests/e2e/test_random_plans.py)"
    )
    parser.addoption(
        "--having", default="", help="only random plans with a section that has these pins: cp,norms=sequence"
    )


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be overwritten."""
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of small model files written as a user would write them."""
    return ROOT / "tests" / "models"


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of the examples on real data."""
    return ROOT / "examples"


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago, for a rendezvous on this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class AcceptsAnyBatch(nn.Module):
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
        user = load_model_file(path)
        vars(user.module).update({"model": AcceptsAnyBatch, "dataset": lambda: samples, **functions})
        return user

    return build
