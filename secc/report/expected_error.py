"""How far predicted steps are from measured ones, by comparison with published training steps.

`published_errors.json` holds the ratio of predicted to measured seconds for layouts that others have
published, priced as secc would run them (`tools/check_published.py --own-runtime --errors` writes it;
docs/costs.md has the method). A plan's expected error is that of the layouts most like it: the same chip, and
the same kinds of parallelism where enough layouts have them. Errors are often on one side, so they are a
range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from secc.cluster import Cluster
from secc.runtime.plan.schema import Plan, Section

ERRORS_FILE = Path(__file__).with_name("published_errors.json")
LEAST_LAYOUTS = 10  # fewer layouts say too little
COVERED_SHARE = 0.9  # of the layouts lie in the expected range
# Kinds of devices with the chip of a kind that was measured.
_CHIPS = {"A100": "A100", "A100_40GB": "A100", "A800": "A100", "H100": "H100", "H200": "H100"}


@dataclass(frozen=True)
class LayoutTraits:
    """What layouts are compared by. chip: such as "A100". tensors, stages: whether tp or pp is above 1.
    gathers: zero3. recomputes: layers run again."""

    chip: str
    tensors: bool
    stages: bool
    gathers: bool
    recomputes: bool

    def describe(self, level: int) -> str:
        """The traits that are compared at a level, in words."""
        words = [(self.tensors, "tp"), (self.stages, "stages"), (self.gathers, "zero3")]
        words += [(self.recomputes, "recomputation")] if level == 0 else []
        return ", ".join(
            [self.chip, *(word for is_set, word in words if is_set)] if level < 2 else [self.chip]
        )


@dataclass(frozen=True)
class ExpectedError:
    """lowest, highest: measured over predicted seconds, minus 1, of the middle `COVERED_SHARE` of `layouts`
    published layouts. traits: what they have in common with the plan, in words."""

    lowest: float
    highest: float
    layouts: int
    traits: str


@cache
def _published_ratios() -> tuple[tuple[LayoutTraits, float], ...]:
    """(traits, predicted over measured seconds) of each published layout."""
    entries = json.loads(ERRORS_FILE.read_text(encoding="utf-8"))["layouts"]
    return tuple(
        (layout_traits(kind, tp, pp, sharding, recompute), ratio)
        for kind, tp, pp, sharding, recompute, ratio in entries
    )


def layout_traits(kind: str, tp: int, pp: int, sharding: str, recompute: str) -> LayoutTraits:
    """The traits of a layout on devices of `kind`."""
    return LayoutTraits(_CHIPS.get(kind, kind), tp > 1, pp > 1, sharding == "zero3", recompute != "none")


def find_expected_error(traits: LayoutTraits) -> ExpectedError | None:
    """The expected error of a layout; None if there are too few published layouts on its chip."""
    levels = (
        lambda other: other == traits,
        lambda other: (
            (other.chip, other.tensors, other.stages, other.gathers)
            == (traits.chip, traits.tensors, traits.stages, traits.gathers)
        ),
        lambda other: other.chip == traits.chip,
    )
    for level, is_like in enumerate(levels):
        errors = sorted(1 / ratio - 1 for other, ratio in _published_ratios() if is_like(other))
        if len(errors) >= LEAST_LAYOUTS:
            left_out = math.floor((1 - COVERED_SHARE) / 2 * len(errors))
            lowest, highest = errors[left_out], errors[-1 - left_out]
            return ExpectedError(lowest, highest, len(errors), traits.describe(level))
    return None


def expected_error_text(plan: Plan) -> str:
    """Says how far the plan's predicted step may be from a measured one, and where that comes from."""
    if any(s.cost.label == "measured" for s in plan.sections):
        return "costs were measured; `secc drift` compares them with a run"
    cluster = Cluster.from_dict(plan.cluster)
    error = (
        find_expected_error(_plan_traits(plan.user_sections, cluster)) if cluster and plan.sections else None
    )
    if error is None:
        return "unknown: no measured layouts like this one"
    return (
        f"{error.lowest:+.0%} to {error.highest:+.0%}: nine in ten of {error.layouts} published layouts like "
        f"this one ({error.traits}) took that much longer or shorter than predicted"
    )


def _plan_traits(sections: Sequence[Section], cluster: Cluster) -> LayoutTraits:
    """The traits of the section with the most ranks, trained ones first."""
    largest = max(sections, key=lambda s: (s.mode == "train", len(s.mesh.ranks)))
    kind = cluster.view_of_ranks(largest.mesh.ranks).device.kind if cluster.groups else cluster.device.kind
    return layout_traits(kind, largest.mesh.tp, largest.mesh.pp, largest.sharding, largest.recompute)
