"""Mixtures with experts in a `ModuleList`, as they are written by hand: a loop over the experts that some
token chose, next to a shared expert; and a loop over all of them, with gates that are zero for other tokens.
No token goes to the last expert of the first kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, WIDTH, INNER, CHOICES = 4, 16, 24, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class ChosenOnly(nn.Module):
    """Each expert computes the tokens that chose it, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS), Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([0.5, 0.0, 0.0, -99.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOICES)
        out = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, self.experts[number](tokens[rows]) * weights[rows, places, None])
        return (out + self.shared(tokens)).view_as(x)


class AllOfThem(nn.Module):
    """Each expert computes every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        values, chosen = scores.topk(1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, values.sigmoid())
        return sum(gates[..., k, None] * expert(x) for k, expert in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix, self.mixture = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), mixture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.cumsum(1) / x.shape[1])
        return x + self.mixture(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList([Layer(ChosenOnly()), Layer(AllOfThem()), Layer(ChosenOnly())])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 32, (n,), generator=g) for n in [6, 9, 4] * 12]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def optimizer(params: object) -> torch.optim.Optimizer:
    """Decays weights: an expert without a gradient stays as it is, one with zeros shrinks."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)  # pyright: ignore[reportArgumentType]
