"""Distillation: a frozen Qwen3-style teacher and a smaller student, cross entropy plus a masked KL
divergence, ragged lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn
from torch.utils.data import Dataset

VOCABULARY = 96


def qwen(hidden: int, layers: int) -> nn.Module:
    config = T.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        use_cache=False,
    )
    return T.Qwen3ForCausalLM(config)


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = qwen(64, 3).requires_grad_(False)
        self.student = qwen(32, 2)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids, attention_mask=attention_mask).logits
        out = self.student(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        kl = F.kl_div(
            out.logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        mask = (labels != -100).to(kl.dtype)
        return 0.5 * out.loss + 0.5 * (kl * mask).sum() / mask.sum()


def model() -> nn.Module:
    return Distillation()


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        text = torch.randint(1, VOCABULARY, (int(torch.randint(6, 24, (), generator=g)),), generator=g)
        return {"input_ids": text, "labels": text.clone()}


def dataset() -> Dataset:
    return Samples()
