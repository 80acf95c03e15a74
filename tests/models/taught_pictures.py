"""A frozen teacher with a frozen tower for images, of which samples have none to three, and a student that
sees the text only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.frozen_tower import IMAGE, PIXELS, VOCABULARY, WIDTH
from tests.models.frozen_tower import dataset as dataset


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(PIXELS, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.teacher_embed, self.student_embed = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.teacher = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, VOCABULARY))
        self.student = nn.Sequential(Layer(), nn.Linear(WIDTH, VOCABULARY))
        for part in (self.tower, self.teacher_embed, self.teacher):
            part.requires_grad_(False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, images: torch.Tensor | None = None
    ) -> torch.Tensor:
        with torch.no_grad():
            seen = self.teacher_embed(input_ids)
            if images is not None:
                seen = seen.masked_scatter((input_ids == IMAGE).unsqueeze(-1), self.tower(images))
            taught = self.teacher(seen).log_softmax(-1)
        logits = self.student(self.student_embed(input_ids))
        counted = (labels != -100)[..., None]
        divergence = F.kl_div(logits.log_softmax(-1), taught, reduction="none", log_target=True)
        return (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            + (divergence * counted).sum() / counted.sum()
        )


def model() -> nn.Module:
    return Model()
