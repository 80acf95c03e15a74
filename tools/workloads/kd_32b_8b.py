"""Workload kd-32b-8b: Qwen3-32B teaches Qwen3-8B, KL and cross entropy, sequences of 3,000 tokens."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH = 151_936, 3_000


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int) -> T.Qwen3ForCausalLM:
    config = T.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    return T.Qwen3ForCausalLM(config)


class Distillation(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(input_ids=input_ids).logits
        learned = self.student(input_ids=input_ids, labels=labels)
        divergence = F.kl_div(learned.logits.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="batchmean")
        return learned.loss + divergence


def model() -> nn.Module:
    teacher = _qwen3(layers=64, hidden=5120, heads=64, intermediate=25_600)
    student = _qwen3(layers=36, hidden=4096, heads=32, intermediate=12_288)
    return Distillation(teacher, student).to(torch.bfloat16)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Only sizes matter here: one token, expanded."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(1, dtype=torch.int64).expand(LENGTH)
        return {"input_ids": tokens, "labels": tokens}


def dataset() -> Samples:
    return Samples()
