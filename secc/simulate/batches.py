"""The global batches that a run of a plan would train on, as the metadata that its order is made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from secc.runtime.loader import Loader, Share
from secc.runtime.metadata import Records
from secc.runtime.plan import Plan
from secc.runtime.program import SampleMeta
from secc.runtime.weights import load_user_model


def global_batches(directory: Path, plan: Plan, seed: int = 0, shuffle: bool = False, steps: int = 1) -> Iterator[tuple[SampleMeta, ...]]:
    """The samples of the first `steps` global batches, drawn from the plan's model file as the ranks draw them.

    Raises UserError if the model file is missing or no longer the one that the plan was made from.
    """
    user = load_user_model(plan, directory)
    user.use_inputs(plan.inputs)
    loader = Loader(user, Records(plan, {}), plan.global_batch, seed, shuffle)
    for step in range(steps):
        yield tuple(record.meta for record in loader.share(Share(step, 0, plan.global_batch)))
