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
        if loss in (attended_slices, attended_sequences):
            self.head = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0)

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


def by_positions(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total, scores = 0.0, list[torch.Tensor]()
    for k in range(0, h.shape[1] - 1, 1):
        rows = head(h[:, k : k + 1]).float()
        scores.append(rows)
        flat = rows.reshape(-1, rows.shape[-1])
        total = total + F.cross_entropy(flat, y[:, k + 1 : k + 2].reshape(-1), reduction="sum")
    return total / y.numel() + torch.cat(scores, 1).softmax(1).pow(2).sum()  # type: ignore[return-value]


def of_images(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = zip(h.split(2, 1), y.split(2, 1), strict=True)
    return sum(F.cross_entropy(head(a).transpose(1, 2), b, reduction="sum") for a, b in parts)  # type: ignore[return-value]


def by_sample(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logps = h.new_zeros(len(h))
    for rows, labels in zip(h.split(2, 1), y.split(2, 1), strict=True):
        logps = logps + head(rows).log_softmax(-1).gather(-1, labels[..., None])[..., 0].sum(1)
    return F.logsigmoid(logps).mean()


def of_flat_slices(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, labels, losses = h.flatten(0, 1), y.flatten(), list[torch.Tensor]()
    for k in range(0, len(labels), 8):
        part = slice(k, k + 8)
        losses.append((head(rows[part])[None] - 1).square().mean(-1).mul(labels[part][None] != 0).sum())
    return torch.stack(losses).sum()


def with_an_empty_part(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, size = h.flatten(0, 1), 6
    parts = [(k * size, min(k * size + size, len(rows))) for k in range(5)]
    return sum((head(rows[a:b]).square().sum(-1) * y.flatten()[a:b]).sum() for a, b in parts)  # type: ignore[return-value]


def of_chunks(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = zip(h.flatten(0, 1).chunk(4), y.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(head(a), b) for a, b in parts)  # type: ignore[return-value]


def along_rows(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([head(part).softmax(0) for part in h.split(3)]).pow(2).sum()


def along_positions(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([head(part).cumsum(1) for part in h.split(2, 1)], 1).pow(2).sum()


def attended_slices(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = [head(part.transpose(0, 1)) for part in h.split(2, 1)]  # positions first: a block may mix them
    return torch.cat(parts).pow(2).sum()


def merged_positions(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([head(part).flatten(0, 1) for part in h.split(2, 1)])
    return (rows * torch.arange(len(rows))[:, None]).sum()


def shared_labels(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = h.flatten(0, 1).split(7)
    return sum(F.cross_entropy(head(a), y[:, 0], reduction="sum") for a in parts)  # type: ignore[return-value]


def neighbours(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second, third = h[:6].split(2)
    return (head(first) * head(second)).sum() + head(third).sum()


def attended_sequences(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Positions of sequences of uneven lengths, which `head` mixes."""
    return torch.stack([head(part).pow(2).sum() for part in h.flatten(0, 1).split([2, 6, 5, 8])]).sum()


_FOLDED = (chunked, scaled, joined, one_by_one, squares, by_positions, of_images, by_sample)
_KEPT = (of_chunks, along_rows, neighbours, along_positions, merged_positions, shared_labels)
FOLDED: dict[str, Loss] = {f.__name__: f for f in (*_FOLDED, of_flat_slices, with_an_empty_part)}
KEPT: dict[str, Loss] = {f.__name__: f for f in (*_KEPT, attended_slices, attended_sequences)}


@pytest.mark.parametrize("name", [*FOLDED, *KEPT])
def test_a_loop_over_parts_becomes_one_pass_if_no_op_mixes_rows(name: str) -> None:
    model = Looped({**FOLDED, **KEPT}[name])
    recording = fold_joins(record_forward(model, BATCH, ["body", "head"]))
    calls = [str(n.target) for n in recording.block_calls]
    assert (calls == ["body", "head"]) == (name in FOLDED), recording.graph
    torch.testing.assert_close(
        Replay(model, recording.graph, recording.constants).compute_loss(BATCH), model(**BATCH)
    )


def test_a_batch_of_one_part_looks_like_longer_ones() -> None:
    def loss(head: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for rows, labels in zip(h.split(4), y.split(4), strict=True):
            scores = head(rows)
            total = (
                total
                + F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
                + scores.pow(2).sum()
            )
        return total / (y != 9).sum()

    model, short = Looped(loss), {k: v[:3] for k, v in BATCH.items()}
    long = fold_joins(record_forward(model, BATCH, ["body", "head"]))
    one = fold_joins(record_forward(model, short, ["body", "head"]), long.folded_loops)
    assert [n.target for n in one.graph.nodes] == [n.target for n in long.graph.nodes]
    torch.testing.assert_close(Replay(model, one.graph, one.constants).compute_loss(short), model(**short))
