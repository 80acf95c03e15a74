"""Distillation on real text: a Qwen3-style teacher, frozen, and a student half its width that learns from
text and teacher.

The text is the standard library's `pydoc_data.topics`, Python's own manual; bytes are tokens, nothing is
downloaded. The teacher needs no backward and no optimizer, so its ranks differ from the student's: that is
what secc plans for. The teacher is trained first:

    python examples/train_teacher.py
    secc compile examples/distill_text.py -o plan_distill/
    secc run plan_distill/ --steps 400 --save runs/distill
    secc export runs/distill -o runs/student.safetensors
    python examples/eval_distill.py runs/student.safetensors

With DISTILL_ALPHA=0 the student learns from the text alone, for comparison.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, WIDTH = 256, 128, 96
ALPHA = float(os.environ.get("DISTILL_ALPHA", "0.5"))  # the teacher's share of the loss
TEACHER = Path(
    os.environ.get("DISTILL_TEACHER", Path(__file__).resolve().parent.parent / "runs" / "teacher.safetensors")
)


def qwen(width: int) -> nn.Module:
    config = T.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=LENGTH,
        initializer_range=0.05,
        use_cache=False,
    )
    return T.Qwen3ForCausalLM(config)


def teacher() -> nn.Module:
    return qwen(2 * WIDTH)


class Distillation(nn.Module):
    """(1 - ALPHA) of the student's cross entropy plus ALPHA of its divergence from the teacher, both per
    token."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = teacher().requires_grad_(False)
        self.student = qwen(WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = self.student(input_ids=input_ids, labels=labels)
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids).logits.log_softmax(-1)
        got = out.logits.log_softmax(-1)
        divergence = F.kl_div(got.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
        return (1 - ALPHA) * out.loss + ALPHA * divergence


def model() -> nn.Module:
    if not TEACHER.exists():
        raise FileNotFoundError(
            f"{TEACHER}: there is no teacher yet; train it with `python examples/train_teacher.py`"
        )
    net = Distillation()
    net.teacher.load_state_dict(load_file(TEACHER), strict=False)
    return net


@cache
def manual() -> tuple[bytes, bytes]:
    """Python's manual in two parts, for training and held out: every tenth run of ten paragraphs is held out,
    repeated ones count once."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = list(dict.fromkeys(text.split("\n\n")))
    parts: tuple[list[str], list[str]] = ([], [])
    for i, paragraph in enumerate(paragraphs):
        parts[i // 10 % 10 == 9].append(paragraph)
    train, held_out = ("\n\n".join(part).encode() for part in parts)
    return train, held_out


class Text(Dataset):
    """Sample i is a piece of the training text whose place is decided by i alone."""

    def __init__(self, size: int = 65536) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Any]:
        train, _ = manual()
        start = random.Random(i).randrange(len(train) - LENGTH)
        ids = torch.tensor(list(train[start : start + LENGTH]))
        return {"input_ids": ids, "labels": ids.clone()}


def dataset() -> Dataset:
    return Text()


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95))


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """A short warm-up, then constant, then falling with the square root of the step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1.0, (200 / (step + 1)) ** 0.5)
    )
