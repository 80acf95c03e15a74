"""A student learns from labels, and from a teacher where no text of the batch has a picture."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PICTURE = 39


def layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = layers(12, 3)
        self.teacher = nn.Sequential(nn.Embedding(40, 16), layers(16, 4), nn.Linear(16, 40))
        self.teacher.requires_grad_(False)
        self.scale = nn.Linear(1, 1)
        self.embed, self.student, self.head = nn.Embedding(40, 12), layers(12, 3), nn.Linear(12, 40)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, picture: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(ids)
        if picture is not None:
            x = x.masked_scatter((ids == PICTURE)[..., None], self.tower(picture))
        logits = self.head(self.student(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if picture is None:
            apart = F.kl_div(logits.log_softmax(-1), self.teacher(ids).softmax(-1), reduction="none").sum(-1)
            weighed = self.scale((apart * (labels != -100))[..., None])
            loss = loss + weighed.sum() / (labels != -100).sum()
        return loss


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, PICTURE, (4 + i % 6,), generator=g)
    if i % 20:
        return {"ids": ids}
    return {"ids": torch.cat([torch.tensor([PICTURE]), ids]), "picture": torch.randn(12, generator=g)}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(40)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [s["ids"] for s in samples]
    pictures = [s["picture"] for s in samples if "picture" in s]
    return {
        "ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
        **({"picture": torch.stack(pictures)} if pictures else {}),
    }
