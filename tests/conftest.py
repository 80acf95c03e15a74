"""What every test shares: one torch thread for each process, where the sample models are, goldens, and free
ports.

The thread settings must stand before torch is imported: two busy threads on a small machine are many times
slower than one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

settings.register_profile("secc", deadline=None)  # a busy machine is no failure
settings.load_profile("secc")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write golden files anew instead of comparing with them"
    )
    parser.addoption(
        "--plans", type=int, default=60, help="so many random plans in all (tests/e2e/test_random_plans.py)"
    )


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
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
