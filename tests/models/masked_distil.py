"""Distillation with a loss that picks the labelled rows by a boolean mask: a divergence and a cross entropy
over the picked rows of a frozen teacher and a student, ragged lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

VOCABULARY = 96


def decoder(hidden: int, layers: int) -> nn.Module:
    config = T.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return T.Qwen2ForCausalLM(config)


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = decoder(64, 3).requires_grad_(False)
        self.student = decoder(32, 2)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids, attention_mask=attention_mask).logits
        logits = self.student(input_ids=input_ids, attention_mask=attention_mask).logits
        mask = labels[:, 1:] != -100
        s, t = logits[:, :-1][mask], wanted[:, :-1][mask]
        kl = F.kl_div(s.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True).sum()
        return kl / mask.sum() + F.cross_entropy(s, labels[:, 1:][mask])


def model() -> nn.Module:
    return Distillation()


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCABULARY, (int(torch.randint(5, 16, (), generator=g)),), generator=g)
        labels = ids.clone()
        labels[: int(torch.randint(1, 4, (), generator=g))] = -100
        return {"input_ids": ids, "labels": labels}


def dataset() -> Dataset:
    return Samples()


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ids, labels = [s["input_ids"] for s in samples], [s["labels"] for s in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
    }
