"""Random ops of every kind: noise and dropout in the glue, some of it only with an image; dropout in a
recurrent encoder whose dim 0 is time, in attention with merged heads and in recomputed layers; a layer that
the whole batch skips; soft choices by Gumbel noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

WIDTH, VOCABULARY, IMAGE = 16, 37, 1


class Pictures(nn.Module):
    """Two layers on flattened patches; the second is skipped by chance, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout2d(0.2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = pixels.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3).transpose(1, 2).flatten(2)
        hidden = self.drop(self.first(patches).relu().transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
        keep = torch.bernoulli(torch.full((), 0.7))
        hidden = hidden + keep * self.second(hidden)
        flat = hidden.reshape(-1, WIDTH)
        return F.dropout(flat, 0.1).view_as(hidden).mean(1)


class Layer(nn.Module):
    """Attention with merged heads, recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.norm, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WIDTH)),
        )

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, padded, use_reentrant=False)

    def block(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.mlp(self.attention(h, h, h, key_padding_mask=padded)[0])


class Choice(nn.Module):
    """A soft choice of a code for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.codes = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.codes(F.gumbel_softmax(self.scores(x), tau=1.0))


class Compound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.layers, self.choice = (
            Pictures(),
            nn.ModuleList(Layer() for _ in range(2)),
            Choice(),
        )
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.recurrent = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2)
        self.drop = nn.Dropout(0.1)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor | None = None
    ) -> torch.Tensor:
        padded = ids == 0
        x = self.embed(ids)
        if pixels is not None:
            seen = self.drop(self.pictures(pixels))
            seen = seen + 0.1 * torch.randn_like(seen)
            x = x.masked_scatter((ids == IMAGE)[..., None], seen)
        x = x + 0.05 * torch.rand(x.shape)
        x = self.drop(x)
        x = self.recurrent(x.transpose(0, 1))[0].transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padded)
        logits = self.head(x + self.choice(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Compound()


class Captions(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(2, VOCABULARY, (4 + int(torch.randint(0, 9, (), generator=g)),), generator=g)
        if i % 3 == 0:
            return {"ids": ids, "labels": ids.roll(-1)}
        ids[0] = IMAGE
        return {"ids": ids, "labels": ids.roll(-1), "pixels": torch.randn(1, 3, 12, 12, generator=g)}


def dataset() -> Dataset:
    return Captions()


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    batch = {
        "ids": pad([s["ids"] for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }
    if any("pixels" in s for s in samples):
        batch["pixels"] = torch.cat([s["pixels"] for s in samples if "pixels" in s])
    return batch
