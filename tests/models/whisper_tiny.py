"""A tiny Whisper: encoder and decoder joined by cross attention, a tied head, labels of ragged length, no
optional input."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, MELS, FRAMES = 96, 8, 32


def model() -> nn.Module:
    config = T.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
        use_cache=False,
    )
    return T.WhisperForConditionalGeneration(config)


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        labels = torch.randint(3, VOCABULARY, (int(torch.randint(4, 12, (), generator=g)),), generator=g)
        return {"input_features": torch.randn(MELS, FRAMES, generator=g), "labels": labels}


def dataset() -> Dataset:
    return Samples()
