"""A statistic of the global batch as glue reads it; `runtime.training.first_pass` finds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BatchStatistic:
    """A sum over the samples of a global batch, times its coefficient.

    total: all entries, in float64. factor: the coefficient times the number of samples.
    """

    total: torch.Tensor
    factor: float

    def read(self, own: torch.Tensor, samples: int) -> torch.Tensor:
        """Returns the statistic in the form of `own`, the sum of a micro-batch of `samples`. Its gradient
        counts for as many samples as the batch has, since what is computed of it counts by the share of the
        micro-batch."""
        whole = self.total.to(own.device).view_as(own).to(own.dtype)
        return whole + (own - own.detach()) * (self.factor / samples) if own.requires_grad else whole
