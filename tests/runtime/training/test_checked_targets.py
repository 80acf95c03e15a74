"""CTC losses with targets that torch would read or write memory elsewhere for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.runtime.training.eager_reference import run_eager


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 5)

    def forward(
        self, sound: torch.Tensor, frames: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        return F.ctc_loss(self.head(sound).log_softmax(-1).transpose(0, 1), targets, frames, lengths)


def batch(targets: list[list[int]] | list[int]) -> dict[str, torch.Tensor]:
    sound = torch.randn(2, 8, 2, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([2, 3])
    return {
        "sound": sound,
        "frames": torch.tensor([7, 8]),
        "targets": torch.tensor(targets),
        "lengths": lengths,
    }


@pytest.mark.parametrize(
    "targets", [[[1, 2, -100], [3, 4, 1]], [1, 2, 3, 4, 1], [[1, 2, 9, 9], [3, 4, 1, 9]]]
)
def test_targets_within_their_lengths_are_computed(targets: list[list[int]] | list[int]) -> None:
    assert run_eager(Listener(), batch(targets)).loss > 0


@pytest.mark.parametrize(
    "targets", [[[1, 2, 0], [3, 4, -100]], [[1, 2], [3, 4]], [1, 2, 3, 4], [[1, 5, 0], [1, 2, 3]]]
)
def test_targets_outside_of_the_classes_are_refused(targets: list[list[int]] | list[int]) -> None:
    with pytest.raises(IndexError, match="ctc_loss expects targets from 0 to 4"):
        run_eager(Listener(), batch(targets))
