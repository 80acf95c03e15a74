"""Whether plain PyTorch itself takes the model and its samples, for messages: what it refuses, too, is no
matter of sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from secc.errors import UserError
from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.source_lines import error_source_line
from secc.runtime.model.user_file import UserModel


def is_user_error(error: BaseException) -> bool:
    """Whether an error of a capture was raised by the user's code, or by torch in it."""
    cause = error.__cause__
    return cause is not None and (not isinstance(cause, UserError) or is_user_error(cause))


def find_eager_failure(
    user: UserModel, model: nn.Module, samples: Sequence[dict[str, Any]]
) -> UserError | None:
    """What plain PyTorch raises in forward of a batch of these samples, None if it takes them."""
    batch = user.collate(samples)
    try:
        with torch.no_grad():
            model(**unflatten_batch(batch))
    except Exception as error:  # whatever the user's code raises
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"forward fails in plain PyTorch too, on the first samples on this machine's CPU: {type(error).__name__}: {why}"
        return UserError(
            message, error_source_line(error), "correct the model file until plain PyTorch computes a loss"
        )
    return None
