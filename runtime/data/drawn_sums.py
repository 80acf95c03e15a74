"""Batch-wide sums that random numbers of forward decide, such as the number of positions that a drawn mask
keeps.

Random numbers belong to a sample and a step, so a sum is known as soon as the samples of a global batch are,
before any section runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.randomness.micro_batch_draws import ModelRandomness, forward_context, make_sample_keys

DrawnSumFunction = Callable[[Mapping[str, Any], Callable[..., Any]], Any]  # of a batch and `draw`


@dataclass(frozen=True)
class DrawnSums:
    """The functions of a plan's drawn sums, by name. seed_of_step: the seed of random numbers of a step.
    evaluates: dropout in glue is off."""

    plan: Plan
    functions: Mapping[str, DrawnSumFunction]
    seed_of_step: Callable[[int], int]
    evaluates: bool = False

    def compute_sums(
        self,
        step: int,
        samples: Sequence[SampleMeta],
        positions: Sequence[int],
        batch: Mapping[str, Any],
        widths: Mapping[str, int],
    ) -> tuple[float, ...]:
        """Returns the sums over the samples at `positions` of a global batch of `samples`. batch: these
        samples, collated and padded to `widths`."""
        randomness = ModelRandomness(nn.Module(), self.plan.draws, self.plan.symbols, self.evaluates)
        seed = self.seed_of_step(step)
        keys = make_sample_keys(seed, samples)
        draws = randomness.make_draws(
            seed, [keys[i] for i in positions], [{**samples[i].sizes, **widths} for i in positions]
        )
        with torch.no_grad(), forward_context(draws):
            return tuple(_compute_sum(f, batch, draws.draw_named) for f in self.functions.values())


def find_drawn_sums(
    terms: object, plan: Plan, seed_of_step: Callable[[int], int], evaluates: bool = False
) -> DrawnSums | None:
    """Returns the drawn sums of a plan's module `terms`; None for a plan without them."""
    functions: Mapping[str, DrawnSumFunction] = getattr(terms, "DRAWN_LEAVES", {})
    return DrawnSums(plan, functions, seed_of_step, evaluates) if functions else None


def _compute_sum(function: DrawnSumFunction, batch: Mapping[str, Any], draw: Callable[..., Any]) -> float:
    """Evaluates one function; 0 if the batch lacks an input that it reads."""
    try:
        return float(function(batch, draw))
    except KeyError:
        return 0.0
