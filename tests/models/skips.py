"""What stages of a pipeline have to pass on: a bias without samples for every layer, skip connections over
layers, a tied head, glue that reads parameters, and a first layer that does not train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 80, 24, 4, 5, 24


class Bias(nn.Module):
    """A learnt bias for each distance and head, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * LONGEST + 1, HEADS)

    def forward(self, length: int) -> torch.Tensor:
        place = torch.arange(length, device=self.table.weight.device)
        return self.table(place[None, :] - place[:, None] + LONGEST).permute(2, 0, 1).unsqueeze(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) / 2 + bias).masked_fill(causal, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.gates = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.bias = Bias()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.layers[0].requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        bias = self.bias(length)
        x = self.embed(input_ids) + self.places[:length]
        kept = [x]
        for layer in self.layers:
            x = layer(x, bias)
            kept.append(x)
        x = self.norm(x + self.gates[0] * kept[0] + self.gates[1] * kept[2] * torch.tanh(kept[1]))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model() -> nn.Module:
    return Model()


class Samples(Dataset):
    """Texts of many lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        text = torch.randint(1, VOCABULARY, (int(torch.randint(4, LONGEST, (), generator=g)),), generator=g)
        return {"input_ids": text, "labels": text.clone()}


def dataset() -> Dataset:
    return Samples()
