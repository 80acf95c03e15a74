"""What glue reads of the global batch, statistics and rows. `runtime.training.first_pass` finds them."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class BatchRows:
    """A row for each sample of a global batch, in its order: [samples, entries], in float64."""

    values: torch.Tensor

    def read(self, own: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns all rows in the form of `own`, the rows of the samples at `places`. The gradient of these
        counts for as many samples as the batch has, as that of a statistic does."""
        count = len(self.values)
        whole = self.values.to(own.device).view(count, *own.shape[1:]).to(own.dtype)
        if not own.requires_grad:
            return whole
        return whole.index_add(0, places, (own - own.detach()) * (count / len(own)))


BatchValues = Mapping[str, BatchStatistic | BatchRows]  # by the name of the term


@dataclass(frozen=True)
class BatchPlaces:
    """Where the samples of a micro-batch stand in a batch of `samples`. Rows of the others are zero until a
    first pass has found them."""

    places: torch.Tensor
    samples: int

    def place_rows(self, own: torch.Tensor) -> torch.Tensor:
        """Returns rows [samples, ...] with `own` at the places of the micro-batch."""
        return own.new_zeros(self.samples, *own.shape[1:]).index_copy(0, self.places.to(own.device), own)
