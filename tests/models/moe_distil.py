"""Distillation of mixtures: a frozen Qwen3-MoE teacher with eight experts, a Qwen3-MoE student with four. The
loss is the divergence and the cross entropy of the labels: of random models, the divergence alone is so small
(0.016) that float32 rounds it by 1.6e-6 in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn


def qwen(hidden: int, layers: int, experts: int) -> nn.Module:
    more: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = T.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **more,
    )
    return T.Qwen3MoeForCausalLM(config)


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = qwen(48, 3, 8).requires_grad_(False)
        self.student = qwen(32, 2, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(input_ids).logits.log_softmax(-1)
        logits = self.student(input_ids).logits
        kept = (labels != -100)[..., None]
        divergence = F.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True)
        taught = (divergence * kept).sum() / kept.sum()
        return taught + F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Distillation()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 64, (n,), generator=g) for n in [6, 9, 4, 11] * 12]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]
