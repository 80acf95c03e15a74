"""The short form of `tools.chaos`: a few faults, after which the weights are bit-equal."""

from __future__ import annotations

import pytest

from tools.chaos import __main__ as chaos
from tools.chaos.moments import MOMENTS


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_runs_survive_faults(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--cases", "6", "--seed", "5"]) == 0
    assert "6 of 6 cases passed" in capfd.readouterr().out


def test_cases_are_drawn_from_their_seed() -> None:
    cases = chaos.draw_cases(300, 3)
    assert cases == chaos.draw_cases(300, 3) and cases != chaos.draw_cases(300, 4)
    kinds = {(c.fault, c.process, c.moment) for c in cases}
    assert len(kinds) == sum(
        chaos.is_possible(f, p, m) for f in chaos.FAULTS for p in chaos.PROCESSES for m in MOMENTS
    )
