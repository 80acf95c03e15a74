"""Finds values that forward reads and that loading samples has set: a global that `collate` or the dataset
assigns.

Plain PyTorch loads samples where it computes, or in processes that start from it. Ranks load them in
processes of their own, and what these set never reaches forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from secc.driver.start_state import StartState, are_equal, values_of_start
from secc.errors import UserError
from secc.runtime.model.kept_values import iter_values
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import Plan
from secc.runtime.training.eager_reference import (
    LossAndGradients,
    PlanRandomness,
    compare_results,
    run_eager,
)


def refuse_loaded_values(
    plan: Plan,
    user: UserModel,
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    reference: LossAndGradients,
    unloaded: StartState | None,
) -> None:
    """Raises UserError if plain PyTorch has another result than `reference` for samples where files keep
    what they kept before any was loaded (`unloaded`; None if loading changes nothing)."""
    if unloaded is None:
        return
    draws = PlanRandomness(model, plan.draws, plan.symbols).draws_for(user, samples)
    batch = user.collate(samples)
    loaded = {v.name: v.read() for v in iter_values(model, user)}
    with values_of_start(unloaded, model, user):
        before = {v.name: v.read() for v in iter_values(model, user)}
        try:
            found = run_eager(model, batch, draws)
        except Exception:  # a value that forward needs is not there
            found = None
    if found is not None and compare_results(found, reference).is_exact:
        return
    missing = object()
    changed = [n for n, value in loaded.items() if not are_equal(value, before.get(n, missing))]
    raise UserError(
        f"loading samples sets {' and '.join(changed[:3]) or 'something'}, which forward reads:"
        " ranks load samples in processes of their own, where forward does not run",
        user.forward_source_line or str(user.path),
        "return it with each sample, or set it where the file is imported or in model()",
    )
