"""A frozen tokenizer turns pictures into tokens within forward, and a language model predicts them, too.
Which labels count depends on inputs alone, their values on the tokenizer.

The language model reads the weights of its embeddings itself, as its head and as positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WORDS, CODES, WIDTH, LONGEST, PLACE = 99, 32, 16, 64, 98


class Tokenizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.codes = nn.Conv2d(3, 8, 4, 4), nn.Embedding(CODES, 8)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        found = self.patches(pictures).flatten(2).transpose(1, 2)
        return torch.cdist(found, self.codes.weight.expand(len(found), -1, -1)).argmin(-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.cumsum(1)))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS + CODES, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.tokens.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer, self.language_model = Tokenizer().requires_grad_(False), LanguageModel()

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, pictures: torch.Tensor | None = None
    ) -> torch.Tensor:
        if pictures is not None:
            places = ids == PLACE
            ids = ids.masked_scatter(places, self.tokenizer(pictures) + WORDS)
            labels = torch.where(places, ids, labels)
        logits, wanted = self.language_model(ids)[:, :-1], labels[:, 1:]
        counts = wanted != -100
        penalty = (logits.logsumexp(-1).square() * counts).sum() / counts.sum()
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) + 0.01 * penalty


def model() -> nn.Module:
    torch.manual_seed(1)
    return Model()


class Samples(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, PLACE, (4 + 5 * i % 9,), generator=g)
        if i % 3 == 0:
            return {"ids": ids, "labels": ids}
        ids = torch.cat([ids[:2], torch.full((4,), PLACE), ids[2:]])
        labels = torch.where(ids == PLACE, -100, ids)
        return {"ids": ids, "labels": labels, "pictures": torch.randn(1, 3, 8, 8, generator=g)}


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {
        key: nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=fill)
        for key, fill in (("ids", 0), ("labels", -100))
    }
    if pictures := [s["pictures"] for s in samples if "pictures" in s]:
        batch["pictures"] = torch.cat(pictures)
    return batch
