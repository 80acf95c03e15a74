"""A tiny Voxtral: a speech encoder whose frames are grouped by four, then a Llama decoder; about half of the
samples have sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, AUDIO, TOKENS_PER_CLIP, MELS, FRAMES = 120, 119, 4, 8, 32


def model() -> nn.Module:
    audio = T.VoxtralEncoderConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
    )
    text = T.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return T.VoxtralForConditionalGeneration(
        T.VoxtralConfig(audio_config=audio, text_config=text, audio_token_id=AUDIO)
    )


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        has_audio = torch.rand((), generator=g).item() < 0.5
        text = torch.randint(1, AUDIO, (int(torch.randint(5, 16, (), generator=g)),), generator=g)
        if not has_audio:
            return {"input_ids": text, "labels": text.clone()}
        blank = torch.full((TOKENS_PER_CLIP,), AUDIO)
        return {
            "input_ids": torch.cat([blank, text]),
            "labels": torch.cat([torch.full_like(blank, -100), text]),
            "input_features": torch.randn(MELS, FRAMES, generator=g),
        }


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    def pad(values: list[torch.Tensor], value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)

    batch = {
        "input_ids": pad([s["input_ids"] for s in samples], 0),
        "labels": pad([s["labels"] for s in samples], -100),
        "attention_mask": pad([torch.ones_like(s["input_ids"]) for s in samples], 0),
    }
    if clips := [s["input_features"] for s in samples if "input_features" in s]:
        batch["input_features"] = torch.stack(clips)
    return batch
