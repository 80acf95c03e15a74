"""Loops over parts of tensors: which ones become one pass over all rows, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.runtime.recorder import Replay, record_forward
from secc.runtime.recorder.fold_joins import fold_joins

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
BATCH = {"x": torch.arange(42.0).reshape(7, 3, 2) / 10 - 2, "y": torch.arange(21).reshape(7, 3) % 5}


class Looped(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.loss = nn.Linear(2, 2), nn.Linear(2, 5), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head, self.body(x), y)


def chunked(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = h.new_zeros(())
    for rows, labels in zip(h.flatten(0, 1).chunk(4), y.flatten().chunk(4), strict=True):
        total = total + F.cross_entropy(head(rows), labels, reduction="sum")
    return total / y.numel()


def scaled(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = zip(h.split(2), y.split(2), strict=True)
    return sum(F.cross_entropy(head(a).flatten(0, 1), b.flatten(), reduction="sum") / 21 for a, b in parts)  # type: ignore[return-value]


def joined(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = zip(h.flatten(0, 1).split(4), y.flatten().split(4), strict=True)
    return torch.cat([F.cross_entropy(head(a), b, reduction="none") for a, b in flat]).mean()


def one_by_one(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = torch.cat([head(h[k : k + 1]) for k in range(len(h))])
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def squares(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([head(part.exp() * 2).pow(2).sum() for part in h.split(3)]).sum()


def of_chunks(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = zip(h.flatten(0, 1).chunk(4), y.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(head(a), b) for a, b in parts)  # type: ignore[return-value]


def along_rows(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([head(part).softmax(0) for part in h.split(3)]).pow(2).sum()


def neighbours(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second, third = h[:6].split(2)
    return (head(first) * head(second)).sum() + head(third).sum()


FOLDED: dict[str, Loss] = {f.__name__: f for f in (chunked, scaled, joined, one_by_one, squares)}
KEPT: dict[str, Loss] = {f.__name__: f for f in (of_chunks, along_rows, neighbours)}


@pytest.mark.parametrize("name", [*FOLDED, *KEPT])
def test_a_loop_over_parts_becomes_one_pass_if_no_op_mixes_rows(name: str) -> None:
    model = Looped({**FOLDED, **KEPT}[name])
    recording = fold_joins(record_forward(model, BATCH, ["body", "head"]))
    calls = [str(n.target) for n in recording.block_calls]
    assert (calls == ["body", "head"]) == (name in FOLDED), recording.graph
    torch.testing.assert_close(
        Replay(model, recording.graph, recording.constants).compute_loss(BATCH), model(**BATCH)
    )
