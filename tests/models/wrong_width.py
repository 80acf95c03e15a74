"""Plain PyTorch cannot compute this model either: its head is for another width."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Layer(12), Layer(3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(x)), labels)


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((8,), float(i)), "labels": torch.tensor(i % 3)} for i in range(64)]
