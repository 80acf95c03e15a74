"""Python takes a tensor apart along a dim of one entry: a list of codebooks that has one."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset


class Codebooks(nn.Module):
    def __init__(self, books: int = 1) -> None:
        super().__init__()
        self.books = nn.ModuleList(nn.Linear(8, 8) for _ in range(books))
        self.out = nn.Linear(8, 1)

    def forward(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for book, rows in zip(self.books, codes.transpose(0, 1), strict=True):
            total = total + book(rows)
        return (self.out(torch.tanh(total)).squeeze(-1) - values).square().mean()


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(index)
        return {"codes": torch.randn(1, 8, generator=g), "values": torch.randn((), generator=g)}


def model() -> nn.Module:
    return Codebooks()


def dataset() -> Dataset:
    return Samples()
