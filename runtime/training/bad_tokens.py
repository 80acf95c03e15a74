"""Names the samples with indices that an embedding does not have, instead of torch's bare IndexError.

On a GPU an index out of range is an assertion of the device, which says nothing about the sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.plan.step_program import Instruction
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.step_planner import PlannedStep


@contextmanager
def naming_bad_tokens(step: PlannedStep, context: RankContext) -> Iterator[None]:
    """Turns an IndexError of an embedding in the body into a UserError that names the samples."""
    try:
        yield
    except IndexError as error:
        module, indices = _failed_embedding(error.__traceback__)
        running = context.trace.activity.what
        if module is None or indices is None or not isinstance(running, Instruction):
            raise
        beyond = indices[(indices < 0) | (indices >= module.num_embeddings)].unique().tolist()
        micro = step.schedule.micro_batches[running.section][running.micro]
        positions = [p for p in micro.samples if p < len(step.batch.samples)]
        bad = [step.samples[p].id for p in positions if _has_index(context, p, beyond)]
        samples = bad or [step.samples[p].id for p in micro.samples]
        more = f" and {len(samples) - 1} more samples of the micro-batch" if len(samples) > 1 else ""
        message = (
            f"step {step.batch.step + 1}: dataset()[{samples[0]}]{more} has index {beyond[0]}, but an"
            f" embedding of section {running.section} has {module.num_embeddings} entries"
        )
        remedy = "correct the dataset, or make the embedding larger"
        raise UserError(message, str(context.user_model.path), remedy) from error


def _failed_embedding(trace: TracebackType | None) -> tuple[nn.Embedding | None, torch.Tensor | None]:
    """Returns the embedding in the traceback and what it was called with."""
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("self"), nn.Embedding) and isinstance(names.get("input"), torch.Tensor):
            return names["self"], names["input"]
        trace = trace.tb_next
    return None, None


def _has_index(context: RankContext, position: int, indices: list[int]) -> bool:
    """Tells whether an integer input of the sample at a position of the batch has one of some values."""
    batch: dict[str, Any] = context.data_plane.load_micro_batch([position])
    integers = [v for v in batch.values() if isinstance(v, torch.Tensor) and not v.is_floating_point()]
    return any(bool(torch.isin(v, torch.tensor(indices)).any()) for v in integers)
