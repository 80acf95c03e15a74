"""Models that run as plain PyTorch end with an exception, not with the process: CTC losses with targets that
torch would read or write memory elsewhere for, and tensors that the machine has no memory for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.errors import NotEnoughMemory
from secc.runtime.training import eager_watch
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


class Speller(nn.Module):
    """Scores of 1,000 words for each position, and a loss that keeps several tensors of their size."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.head = nn.Embedding(1000, 4), nn.Linear(4, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros((), dtype=torch.float32).expand(10**6, 10**6)  # takes no memory
        return F.cross_entropy(self.head(self.text(ids)).flatten(0, 1), ids.flatten()) + mask[0, 0]


@pytest.mark.parametrize(("scores_left", "fits"), [(3.5, False), (4.5, True)])
def test_a_large_tensor_needs_memory_for_what_is_made_of_it(
    scores_left: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(60).reshape(2, 30)
    size = ids.numel() * 1000 * 4
    monkeypatch.setattr(eager_watch, "_LARGE", size)
    monkeypatch.setattr(eager_watch, "available_memory", lambda: scores_left * size)
    if fits:
        assert run_eager(Speller(), {"ids": ids}).loss > 0
        return
    with pytest.raises(NotEnoughMemory, match="needs more memory than this machine has"):
        run_eager(Speller(), {"ids": ids})


def test_memory_that_torch_does_not_get_is_named() -> None:
    with pytest.raises(NotEnoughMemory, match="you tried to allocate"), eager_watch.memory_errors():
        torch.empty(1 << 50, dtype=torch.uint8)


class Neighbours(nn.Module):
    """Averages over the neighbours in a graph, which a sparse matrix has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        edges = torch.eye(len(rows)).to_sparse()
        return torch.sparse.mm(edges, self.head(rows)).square().mean()


def test_sparse_tensors_are_computed() -> None:
    assert run_eager(Neighbours(), {"rows": torch.ones(3, 4)}).loss > 0
