"""A reward model (Bradley-Terry): chosen and rejected answers are padded to one length in forward and go
through one trunk. Only the last samples have the longer answer chosen."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WORDS, WIDTH, SAMPLES = 50, 16, 400


class Reward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, "gelu", batch_first=True)
        self.trunk = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(
        self,
        chosen_ids: torch.Tensor,
        chosen_mask: torch.Tensor,
        rejected_ids: torch.Tensor,
        rejected_mask: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        width = max(chosen_ids.shape[1], rejected_ids.shape[1])
        ids, mask = (
            torch.cat([F.pad(x, (0, width - x.shape[1])) for x in pair])
            for pair in ((chosen_ids, rejected_ids), (chosen_mask, rejected_mask))
        )
        hidden = self.words(ids) + self.places(torch.arange(width, device=ids.device))
        ignored = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, float("-inf"))
        causal = nn.Transformer.generate_square_subsequent_mask(width, device=ids.device)
        hidden = self.trunk(hidden, mask=causal, src_key_padding_mask=ignored)
        last = hidden[torch.arange(len(hidden), device=ids.device), mask.sum(1) - 1]
        good, bad = self.score(last).squeeze(-1).chunk(2)
        loss = -F.logsigmoid(good - bad).mean() + 0.01 * (good + bad).square().mean()
        return {"loss": loss, "accuracy": (good > bad).float().mean()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Reward()


class Pairs(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        lengths = (4 + i % 5, 9 + i % 4) if i < SAMPLES - 3 else (9, 5)
        sample: dict[str, torch.Tensor] = {}
        for name, length, step in zip(("chosen", "rejected"), lengths, (3, 7), strict=True):
            sample[f"{name}_ids"] = (i + step * torch.arange(length)) % WORDS
            sample[f"{name}_mask"] = torch.ones(length, dtype=torch.bool)
        return sample


def dataset() -> Pairs:
    return Pairs()
