"""Preference optimization (DPO) with an integer mask of answer tokens, as TRL's collator makes it.

The batch has the chosen texts first and the rejected ones behind them. The head has a bias and soft-capped
logits; the log-probabilities of a policy and a frozen reference are summed by text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

VOCABULARY, WIDTH, BETA = 120, 16, 0.2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(self.mix(self.norm(h)))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.words(ids)
        for layer in self.layers:
            h = layer(h)
        return h


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 20 * torch.tanh(self.head(self.trunk(ids)) / 20)


class MarkedAnswers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Writer()
        self.reference = Writer().requires_grad_(False)

    def forward(
        self,
        chosen: torch.Tensor,
        chosen_completion_mask: torch.Tensor,
        rejected: torch.Tensor,
        rejected_completion_mask: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        width = max(chosen.shape[1], rejected.shape[1])
        ids = torch.cat([pad_to_width(chosen, width), pad_to_width(rejected, width)])
        marks = torch.cat(
            [pad_to_width(chosen_completion_mask, width), pad_to_width(rejected_completion_mask, width)]
        )
        found = score_answers(self.policy(ids), ids, marks)
        with torch.no_grad():
            known = score_answers(self.reference(ids), ids, marks)
        better, worse = (BETA * (found - known)).chunk(2)
        return {"loss": -F.logsigmoid(better - worse).mean(), "margin": (better - worse).detach().mean()}


def pad_to_width(rows: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(rows, (0, width - rows.shape[1]))


def score_answers(logits: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """The log-probability of each text's marked tokens."""
    picked = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * marks[:, 1:]).sum(-1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return MarkedAnswers()


class Comparisons(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 36

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)

        def words(low: int, high: int) -> torch.Tensor:
            length = int(torch.randint(low, high, (), generator=g))
            return torch.randint(1, VOCABULARY, (length,), generator=g)

        prompt, found = words(2, 5), dict[str, torch.Tensor]()
        for name in ("chosen", "rejected"):
            answer = words(2, 8)
            found[name] = torch.cat([prompt, answer])
            found[f"{name}_completion_mask"] = torch.cat([torch.zeros_like(prompt), torch.ones_like(answer)])
        return found


def dataset() -> Comparisons:
    return Comparisons()


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in samples[0]}


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
