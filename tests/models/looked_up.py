"""A tower that looks notes up in large tables: nearly no work, most of the weights."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, NOTES, TOKENS = 16, 20000, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(NOTES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, found: torch.Tensor, notes: torch.Tensor) -> torch.Tensor:
        return found + self.mix(self.table(notes)).tanh()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, notes: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(notes), WIDTH, device=notes.device)
        for layer in self.layers:
            found = layer(found, notes)
        return found


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outward(self.inward(x).relu())


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Reader() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.body = Tower(), Body()

    def forward(self, x: torch.Tensor, notes: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.tower(notes).unsqueeze(1)).pow(2).mean()


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {"x": torch.randn(TOKENS, WIDTH, generator=g), "notes": torch.randint(0, NOTES, (), generator=g)}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(24)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([s[key] for s in samples]) for key in ("x", "notes")}
