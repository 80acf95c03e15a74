"""An encoder with dropout that looks at either of two optional inputs, or at both: which of its calls is the
first differs from sample to sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

FEATURES, WIDTH, VOCABULARY = 6, 8, 19
CAMERA, SONAR = 1, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.layers = nn.Linear(FEATURES, WIDTH), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Robot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embed, self.head = (
            Encoder(),
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        camera: torch.Tensor | None = None,
        sonar: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(ids)
        if camera is not None:
            x = x.masked_scatter((ids == CAMERA)[..., None], self.encoder(camera))
        if sonar is not None:
            x = x.masked_scatter((ids == SONAR)[..., None], self.encoder(sonar))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Robot()


class Walks(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCABULARY, (4 + int(torch.randint(0, 5, (), generator=g)),), generator=g)
        sample = dict[str, torch.Tensor]()
        for name, token in (("camera", CAMERA), ("sonar", SONAR)):
            if (i + token) % 3:
                sample[name] = torch.randn(1 + i % 2, FEATURES, generator=g)
                ids = torch.cat([torch.full((1 + i % 2,), token), ids])
        return sample | {"ids": ids, "labels": ids.roll(-1)}


def dataset() -> Dataset:
    return Walks()
