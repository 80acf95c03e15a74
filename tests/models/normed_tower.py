"""Plain PyTorch: a residual network with batch norms in training mode encodes images, which not all samples
have, for a classifier of short texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, CLASSES = 32, 16, 5


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out, momentum=None)
        self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.skip(x)).relu()


class Tower(nn.Module):
    """[n, 3, 8, 8] -> [n, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.ModuleList([ResidualBlock(8, 16, 2), ResidualBlock(16, WIDTH, 2)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        images: torch.Tensor | None = None,
        owners: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.tokens(input_ids).mean(1)
        if images is not None:
            x = x.index_add(0, owners, self.tower(images))
        return F.cross_entropy(self.head(x + self.mlp(x)), labels)


def model() -> nn.Module:
    return Classifier()


class Samples(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, VOCABULARY, (6,), generator=g)
        sample = {"input_ids": ids, "labels": torch.randint(0, CLASSES, (), generator=g)}
        if i % 3:
            sample["images"] = torch.randn(1, 3, 8, 8, generator=g)
        return sample


def dataset() -> Dataset:
    return Samples()


def eval_dataset() -> Dataset:
    return torch.utils.data.Subset(Samples(), range(20, 31))


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("input_ids", "labels")}
    having = [i for i, s in enumerate(samples) if "images" in s]
    if having:
        batch["images"] = torch.cat([samples[i]["images"] for i in having])
        batch["owners"] = torch.tensor(having)
    return batch
