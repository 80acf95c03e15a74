"""Plans of other kinds of mixtures of experts: a free search finds what searches with pins find."""

from __future__ import annotations

import pytest

from secc.alloc.refine.local_search import STEP_RESOLUTION
from secc.passes.allocate import MULTI_RANK_MARGIN, Allocate
from tests.alloc.compound_mixture import compound_mixture

SMALL = (8_000_000_000, 3_000_000_000_000, 1), "2x8xH100", 128
LARGE_ENCODER = (24_000_000_000, 6_000_000_000_000, 3), "2x8xH100", 128
MORE_RANKS = (24_000_000_000, 1_000_000_000_000, 2), "4x8xH100", 256


def step_ns(model: tuple[int, int, int], cluster: str, batch: int, *pins: str) -> int:
    """The scheduled step of the plan that is found."""
    asked = Allocate(cluster=cluster, global_batch=batch, set=pins)
    _, won, _ = asked.choose_plan(asked.solve_closed_form(compound_mixture(*model)))
    assert won.evaluation.fits
    return won.evaluation.time_ns


def assert_no_pin_is_better(problem: tuple[tuple[int, int, int], str, int], *pins: str) -> None:
    """Up to the share by which wide replicas have to be better, and what counts as equal."""
    most = 1 + MULTI_RANK_MARGIN + 2 / STEP_RESOLUTION
    free = step_ns(*problem)
    longer = {pin: free / ns for pin in pins if free > most * (ns := step_ns(*problem, pin))}
    assert not longer


def test_no_pinned_parts_or_stages_are_better_than_the_free_plan() -> None:
    assert_no_pin_is_better(LARGE_ENCODER, "lm.ep=1", "lm.ep=4", "lm.dp=8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("problem", [SMALL, LARGE_ENCODER, MORE_RANKS])
def test_no_pinned_degree_is_better_than_the_free_plan(
    problem: tuple[tuple[int, int, int], str, int],
) -> None:
    parts = [f"lm.ep={n}" for n in (1, 2, 4, 8)]
    stages = [f"lm.pp={n}" for n in (1, 2, 4, 8)]
    assert_no_pin_is_better(problem, *parts, *stages, *(f"lm.dp={n}" for n in (2, 4, 8)))
