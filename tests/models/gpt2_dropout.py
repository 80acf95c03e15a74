"""A Hugging Face GPT-2 as it is trained: dropout everywhere, in fused attention too; recomputed layers,
ragged texts."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel


def model() -> nn.Module:
    config = GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=3, n_head=4,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    made = GPT2LMHeadModel(config).train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


class Texts(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 61, (int(torch.randint(5, 19, (), generator=g)),), generator=g)
        return {"input_ids": ids, "labels": ids.clone()}


def dataset() -> Dataset:
    return Texts()
