"""The short form of `tools/chaos.py`: a few random faults, after which the weights are bit-equal."""

from __future__ import annotations

import pytest

from tools import chaos


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_runs_survive_random_faults(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--cases", "4", "--seed", "5", "--steps", "60"]) == 0
    assert "4 of 4 cases passed" in capfd.readouterr().out


def test_cases_are_drawn_from_their_seed() -> None:
    cases = chaos.draw_cases(50, 3)
    assert cases == chaos.draw_cases(50, 3) and cases != chaos.draw_cases(50, 4)
    assert not [c for c in cases if c.fault == "TRUNCATE" and c.moment == "start"]
