"""Small random compound models under random plans train like plain PyTorch. `random_runs` tries any range
of seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.random_runs import try_model

QUICK = (2, 39)
MANY = tuple(s for s in range(1000, 1030) if s not in QUICK)


@pytest.mark.gloo
@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in MANY)])
def test_a_random_model_under_a_random_plan_is_exact(seed: int, tmp_path: Path) -> None:
    assert [outcome.error for outcome in try_model(seed, tmp_path)] == [""]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2030))
def test_a_random_model_with_experts_under_a_random_plan_is_exact(seed: int, tmp_path: Path) -> None:
    assert [outcome.error for outcome in try_model(seed, tmp_path, experts=True)] == [""]
