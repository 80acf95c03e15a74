"""Shows that a model computes the same from samples side by side in one row as from padded samples: loss and
every gradient of plain PyTorch, within the exactness contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel
from secc.runtime.training.eager_reference import LossAndGradients, compare_results, run_eager
from secc.runtime.training.widened_floats import widen_batch, widened_floats

SAMPLES_TOGETHER = (2, 5)  # samples in a row, of the batches that are compared
REMEDY = "leave --pack out"


def check_packing(padded: UserModel, packed: UserModel, model: nn.Module) -> None:
    """Compares batches of `packed` with batches of `padded`, the same model file. Raises UserError if the
    model draws random numbers, which depend on places in a batch, if it takes no packed batch, or if a loss
    or gradient differs."""
    ids = padded.survey_ids(sum(SAMPLES_TOGETHER))
    samples = [padded.load_sample(i) for i in ids]
    start = 0
    for count in SAMPLES_TOGETHER:
        together = [samples[i % len(samples)] for i in range(start, start + count)]
        start += count
        reference = _run(padded, model, together)
        if not compare_results(_run(padded, model, together), reference).is_exact:
            message = "samples cannot be packed: the model draws random numbers by their places in a batch"
            raise UserError(message, padded.forward_source_line, REMEDY)
        try:
            found = _run(packed, model, together)
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            message = f"samples cannot be packed: forward fails on samples in one row ({reason})"
            raise UserError(message, padded.forward_source_line, REMEDY) from error
        difference = compare_results(found, reference)
        if not difference.is_exact:
            message = (
                f"samples cannot be packed: {count} of them in one row give another result ({difference})"
            )
            remedy = (
                f"{REMEDY}; attention must stay within samples, as transformers' does by position_ids,"
                " and no other layer may mix tokens"
            )
            raise UserError(message, padded.forward_source_line, remedy)


def _run(user: UserModel, model: nn.Module, samples: Sequence[Mapping[str, Any]]) -> LossAndGradients:
    """Runs plain PyTorch in float32 on a batch of these samples."""
    with widened_floats(model, torch.float32):
        return run_eager(model, widen_batch(user.collate(samples), torch.float32))
