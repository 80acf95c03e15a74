"""Warnings about plans that were not compared with plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.report.plan_warnings import plan_warnings
from tests.runtime.schedule.plan_strategies import make_edge, make_plan, make_section

COMPARED = {"patterns": [{"exact": True}]}


@pytest.mark.parametrize(
    ("mode", "grad", "extents", "checks", "warned"),
    [
        ("train", False, ((1, "S", "right"),), {}, True),
        ("train", False, ((1, "S", "right"),), COMPARED, False),
        ("train", False, ((1, "S", "right"),), {"padding_seen": ["hidden"]}, False),
        ("train", False, (), {}, False),
        ("train", True, ((1, "S", "right"),), {}, False),
        ("forward", False, ((1, "S", "right"),), {}, False),
    ],
    ids=["mask", "compared", "seen in the small model", "no width", "hidden states", "frozen"],
)
def test_a_mask_that_was_not_compared_is_named(
    mode: str, grad: bool, extents: tuple[tuple[int, str, str], ...], checks: dict[str, object], warned: bool
) -> None:
    edge = replace(make_edge("ears", "lm", grad=grad, name="hidden"), extents=extents)
    sections = [make_section("ears", range(1), mode=mode), make_section("lm", range(1, 2))]
    plan = replace(make_plan(sections, [edge], 2), checks=checks)
    texts = [w for w in plan_warnings(plan) if w.text.startswith("hidden: ")]
    assert len(texts) == warned
    assert all("--widths global" in w.remedy for w in texts)
