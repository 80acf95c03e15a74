"""Captions of images by an attention over the image and a recurrent cell, in a loop over the positions of the
padded caption: as many ops as the longest caption of a batch has characters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 24, 3, 2, 1))
        self.start = nn.Linear(24, 32)
        self.embed, self.attend, self.cell = nn.Embedding(40, 24), nn.Linear(56, 1), nn.GRUCell(48, 32)
        self.head = nn.Linear(32, 40)
        self.temperature = nn.Parameter(torch.ones(()))

    def look_at_patches(
        self, patches: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = state[:, None].expand(-1, patches.shape[1], -1)
        weights = (self.attend(torch.cat([patches, states], -1)) * self.temperature).softmax(1)
        return (weights * patches).sum(1), weights[..., 0]

    def forward(self, image: torch.Tensor, caption: torch.Tensor) -> dict[str, torch.Tensor]:
        patches = self.encoder(image).flatten(2).transpose(1, 2)
        state = torch.tanh(self.start(patches.mean(1)))
        scores, glances = [], []
        for position in range(caption.shape[1] - 1):
            seen, weights = self.look_at_patches(patches, state)
            state = self.cell(torch.cat([self.embed(caption[:, position]), seen], -1), state)
            scores.append(self.head(state))
            glances.append(weights)
        written = caption[:, 1:] != 0
        attended = (torch.stack(glances, 1) * written[..., None]).sum(1)
        targets = caption[:, 1:].flatten()
        loss = F.cross_entropy(torch.stack(scores, 1).flatten(0, 1), targets, ignore_index=0)
        return {"loss": loss + 0.1 * ((1 - attended) ** 2).sum(1).mean()}


def model() -> nn.Module:
    return Captioner()


def dataset() -> list[dict[str, torch.Tensor]]:
    samples = list[dict[str, torch.Tensor]]()
    for i in range(48):
        g = torch.Generator().manual_seed(i)
        length = int(torch.randint(3, 6, (), generator=g))
        caption = torch.randint(1, 40, (length,), generator=g)
        samples.append({"image": torch.randn(3, 16, 16, generator=g), "caption": caption})
    return samples


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "image": torch.stack([s["image"] for s in samples]),
        "caption": nn.utils.rnn.pad_sequence([s["caption"] for s in samples], batch_first=True),
    }
