"""A frozen teacher and a student: Qwen3-1.7B teaches Qwen3-0.6B; at the real layer sizes, 32B teaches 8B."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

from tools.gpu_day.models.sizes import Samples, build_model, choose, decoder, learnable_tokens


class Distillation(nn.Module):
    """Cross entropy on the labels and the divergence from the teacher's predictions."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids, attention_mask=attention_mask).logits
        logits = self.student(input_ids=input_ids, attention_mask=attention_mask).logits
        counted = labels[:, 1:] != -100
        divergences = F.kl_div(
            F.log_softmax(logits[:, :-1].float(), -1),
            F.log_softmax(wanted[:, :-1].float(), -1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        divergence = (divergences * counted).sum() / counted.sum()
        entropy = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return entropy + divergence


def model() -> nn.Module:
    teacher, student = choose(
        {
            "small": ((2, 48, 4, 96), (2, 32, 4, 64)),
            "train": ((28, 2048, 16, 6144), (28, 1024, 16, 3072)),
            "layers": ((2, 5120, 64, 25_600), (3, 4096, 32, 12_288)),
        }
    )

    def make_decoder(layers: int, hidden: int, heads: int, ffn: int) -> nn.Module:
        return decoder(T.Qwen3Config, layers, hidden, heads, ffn, head_dim=hidden // heads)

    return build_model(lambda: Distillation(make_decoder(*teacher), make_decoder(*student)))


def _sample(generator: torch.Generator, length: int) -> dict[str, torch.Tensor]:
    tokens = learnable_tokens(generator, length)
    return {"input_ids": tokens, "labels": tokens}


def dataset() -> Samples:
    return Samples(_sample)
