"""Judges a run that differs from its reference by what the reference differs from itself.

Rounding is amplified without bound where it decides what is computed (which points are the most uncertain,
which query is matched to which mask, on which side of a pixel an image is sampled) and where training
diverges: no two programs agree there, and plain PyTorch does not agree with itself once its weights are moved
by their last bit. So the reference is trained a few times more, with weights moved in that way. A loss,
gradient or parameter in which it then agrees with itself keeps its tolerance; in others a run may differ by
at most `FACTOR` times as much as the reference does.

A gradient that is zero but for rounding (of a bias in front of a norm) has rounding errors of the size of
what was summed, not of its own. It is compared with what float64 gives: a run may be at most `FACTOR` times
as far from that as plain PyTorch in float32 is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from tools.compare_training import TrainingResult, measure_differences

NUDGES = 6  # trainings with moved weights; they differ by a factor of 20 in how much comes of it
FACTOR = 2.0
# Of the loss of step 1, in tolerances: more than rounding makes before a weight is updated. What differs more
# has drawn other random numbers, for example, and excuses nothing.
LARGEST_START = 10.0
WITHIN_ROUNDING = "within rounding"


def measure_own_differences(
    reference: TrainingResult, train: Callable[[int], TrainingResult]
) -> dict[str, float]:
    """The most by which trainings with nudged weights differ from the reference, by quantity, in units of the
    tolerances. `train` takes the seed of a nudge."""
    own = dict[str, float]()
    for seed in range(1, NUDGES + 1):
        for found in measure_differences(train(seed), reference):
            own[found.quantity] = max(own.get(found.quantity, 0.0), found.tolerances)
    return own


def judge_by_float64(
    found: TrainingResult, reference: TrainingResult, exact: Mapping[str, torch.Tensor | None]
) -> str:
    """`WITHIN_ROUNDING` with the gradient that is farthest from `exact`, which float64 gives, against the
    reference's own distance; "" if something else differs, or a gradient by more than that allows."""
    beyond = [d for d in measure_differences(found, reference) if d.is_beyond]
    names = [d.quantity.removeprefix("gradient of ") for d in beyond]
    ratios = {
        n: _ratio_of_errors(found.gradients.get(n), reference.gradients.get(n), exact.get(n)) for n in names
    }
    if not beyond or not all(ratio <= FACTOR for ratio in ratios.values()):
        return ""
    worst = max(ratios, key=lambda name: ratios[name])
    return (
        f"{WITHIN_ROUNDING}: gradient of {worst} is {ratios[worst]:.2g} times as far from what float64 gives"
        " as plain PyTorch's"
    )


def _ratio_of_errors(
    found: torch.Tensor | None, reference: torch.Tensor | None, exact: torch.Tensor | None
) -> float:
    """How far a gradient is from the exact one, in units of the distance of the reference."""
    if found is None or reference is None or exact is None:
        return math.inf
    own = float((reference.double() - exact).norm())
    return float((found.double() - exact).norm()) / own if own else math.inf


def judge_by_rounding(found: TrainingResult, reference: TrainingResult, own: Mapping[str, float]) -> str:
    """`WITHIN_ROUNDING` with the difference that is largest against the reference's own, and both numbers; ""
    if rounding does not explain all that differs."""
    beyond = [d for d in measure_differences(found, reference) if d.is_beyond]
    explained = own["loss of step 1"] <= LARGEST_START and all(
        1 < own.get(d.quantity, 0.0) < math.inf and d.tolerances <= FACTOR * own[d.quantity] for d in beyond
    )
    if not beyond or not explained:
        return ""
    losses = [d for d in beyond if d.quantity.startswith("loss")]
    worst = max(losses or beyond, key=lambda d: d.tolerances / own[d.quantity])
    return (
        f"{WITHIN_ROUNDING}: {worst.quantity} is off by {worst.tolerances:.2g} tolerances, by up to "
        f"{own[worst.quantity]:.2g} between references with weights that differ in their last bit"
    )
