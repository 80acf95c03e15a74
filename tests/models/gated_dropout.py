"""A T5 with gated activations and dropout as it is trained: random ops inside modules that fused operators
may compute, ragged texts."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration


def model() -> nn.Module:
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.1,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).train()


class Texts(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        lengths = torch.randint(5, 15, (2,), generator=g).tolist()
        ids, labels = (torch.randint(1, 61, (n,), generator=g) for n in lengths)
        return {"input_ids": ids, "labels": labels}


def dataset() -> Dataset:
    return Texts()
