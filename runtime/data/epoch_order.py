"""Which samples a global batch holds: a sequence of epochs, cut into batches.

Global batch k holds the samples kN .. (k+1)N-1 of the sequence, so a batch may begin in one epoch and end in
the next. Each epoch goes through the dataset once, in its own order or in a permutation drawn from (seed,
epoch). The sequence is endless or ends after a number of epochs; then the last batch holds the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secc.runtime.model.item_seeds import derive_item_seed


def repeated_samples_text(length: int, global_batch: int) -> str:
    """Returns what to tell about a dataset of `length` samples, fewer than a global batch."""
    return (
        f"dataset() has {length} samples, fewer than the global batch of {global_batch}: a step trains "
        "samples more than once"
    )


class EpochOrder:
    """The sequence over a dataset of `length` samples in batches of `global_batch`; `epochs` is None for
    an endless one."""

    def __init__(
        self, length: int, global_batch: int, seed: int = 0, shuffle: bool = False, epochs: int | None = None
    ) -> None:
        self.length, self.global_batch, self.epoch_count = length, global_batch, epochs
        self.seed, self.shuffle = seed, shuffle
        self._permutation: tuple[int, list[int]] = (-1, [])

    @property
    def step_count(self) -> int | None:
        """Number of batches, None if the sequence is endless."""
        return None if self.epoch_count is None else -(-self.epoch_count * self.length // self.global_batch)

    def samples_in_step(self, step: int) -> int:
        """Number of samples in a step's batch: fewer than `global_batch` in the last one, 0 after it."""
        if self.epoch_count is None:
            return self.global_batch
        return max(0, min(self.global_batch, self.epoch_count * self.length - step * self.global_batch))

    def locate_sample(self, step: int, position: int) -> tuple[int, int]:
        """Return (epoch, dataset index) of the sample at `position` of the step's batch."""
        epoch, index = divmod(step * self.global_batch + position, self.length)
        return epoch, self._epoch_permutation(epoch)[index] if self.shuffle else index

    def dataset_indices(self, step: int) -> list[int]:
        """Return the dataset indices of a step's batch, by position."""
        return [self.locate_sample(step, position)[1] for position in range(self.samples_in_step(step))]

    def _epoch_permutation(self, epoch: int) -> list[int]:
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(derive_item_seed(self.seed, epoch, -1))
            self._permutation = epoch, torch.randperm(self.length, generator=generator).tolist()
        return self._permutation[1]


class EvaluationOrder(EpochOrder):
    """Batches of at most `batch` samples that go through several sets one after another, without end: a
    batch never spans two sets, and each pass has the same batches of the same samples.

    `lengths` are the numbers of samples of the sets, which follow each other in one dataset.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int = 0) -> None:
        super().__init__(sum(lengths), batch, seed)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        # (set, first dataset index, number of samples) of the batches of one pass.
        self.batches = [
            (number, start + first, min(batch, length - first))
            for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
            for first in range(0, length, batch)
        ]

    def samples_in_step(self, step: int) -> int:
        """Number of samples in a step's batch."""
        return self.batches[step % len(self.batches)][2]

    def locate_sample(self, step: int, position: int) -> tuple[int, int]:
        """Return (0, dataset index) of the sample at `position` of the step's batch: every pass draws the
        samples of epoch 0."""
        return 0, self.batches[step % len(self.batches)][1] + position
