"""Checks the targets of CTC losses before torch computes them.

torch takes targets as indices without a check: one outside of the classes reads and, in the backward, writes
memory elsewhere. Batches that the compiler makes up, of cropped samples for example, may have such targets.
"""

from __future__ import annotations

from typing import Any

import torch

from secc.runtime.training.widened_floats import DtypeWatch

_CTC_OPS = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)


class CheckedTargets(DtypeWatch):
    """Raises IndexError for a CTC loss with targets outside of its classes, or fewer than its lengths say.
    Notes 16-bit floats, too: a further mode would cost every op as much again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CTC_OPS:
            scores, targets, _, lengths = args[:4]
            _check_targets(targets, torch.as_tensor(lengths), scores.shape[-1])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _check_targets(targets: torch.Tensor, lengths: torch.Tensor, classes: int) -> None:
    """Raises IndexError unless `targets` has as many indices below `classes` as `lengths` says, in a row of
    each sample [samples, longest], or one sample behind the other in one dim."""
    if targets.dim() == 1:
        counted = targets[: int(lengths.sum())]
        complete = len(counted) == int(lengths.sum())
    else:
        counted = targets[torch.arange(targets.shape[1]) < lengths[:, None]]
        complete = bool((lengths <= targets.shape[1]).all())
    if not complete or bool(((counted < 0) | (counted >= classes)).any()):
        raise IndexError(
            f"ctc_loss expects targets from 0 to {classes - 1}, {lengths.tolist()} of them for the samples, "
            f"but got {targets.tolist()}"
        )
