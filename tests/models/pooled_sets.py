"""Adds the mean of a ragged set, packed with offsets, to each token of the samples that have one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class PooledSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.item = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(
        self,
        ids: torch.Tensor,
        items: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        owner: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(ids)
        if items is not None and offsets is not None and owner is not None:
            h, lengths = self.item(items), offsets[1:] - offsets[:-1]
            total = torch.cat([h.new_zeros(1, 16), h.cumsum(0)])
            sums = total[offsets[1:]] - total[offsets[:-1]]
            x = x.index_add(0, owner, (sums / lengths[:, None])[:, None].expand(-1, x.shape[1], -1))
        return F.cross_entropy(self.head(x).transpose(1, 2), ids, ignore_index=0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return PooledSets()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    samples = list[dict[str, torch.Tensor]]()
    for i in range(60):
        samples.append({"ids": torch.randint(1, 40, (4 + i % 5,), generator=g)})
        if i % 3:
            samples[-1]["items"] = torch.randn(2 + i % 4, 6, generator=g)
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch = {"ids": pad_sequence([s["ids"] for s in samples], batch_first=True)}
    if owners := [i for i, s in enumerate(samples) if "items" in s]:
        batch["items"] = torch.cat([samples[i]["items"] for i in owners])
        batch["offsets"] = torch.tensor([0, *(len(samples[i]["items"]) for i in owners)]).cumsum(0)
        batch["owner"] = torch.tensor(owners)
    return batch
