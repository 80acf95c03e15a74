"""Distillation with `use_cache` on in both models, which is Hugging Face's default: each layer writes its
keys and values into a cache that no other layer reads. Some layers of the teacher attend within a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn
from torch.utils.data import Dataset

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        teacher = T.Gemma3TextConfig(**SIZES, hidden_size=48, sliding_window=6)
        self.teacher = T.Gemma3ForCausalLM(teacher).requires_grad_(False).eval()
        self.student = T.LlamaForCausalLM(T.LlamaConfig(**SIZES, hidden_size=32))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids).logits
        logits = self.student(input_ids=input_ids).logits
        counted = labels != -100
        divergences = F.kl_div(
            logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        return (divergences * counted).sum() / counted.sum()


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        tokens = torch.randint(1, 80, (5 + (i * 7) % 14,), generator=g)
        return {"input_ids": tokens, "labels": tokens}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Distillation()


def dataset() -> Rows:
    return Rows()
