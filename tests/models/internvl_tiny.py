"""A tiny InternVL: pixel shuffle between the towers, tied embeddings, up to three image tiles a sample, a
frozen vision tower."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, IMAGE, TOKENS_PER_TILE = 120, 119, 4


def model() -> nn.Module:
    vision = T.InternVLVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    text = T.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    net = T.InternVLForConditionalGeneration(
        T.InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    )
    net.model.vision_tower.requires_grad_(False)
    return net


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        tiles = int(torch.randint(1, 4, (), generator=g)) if torch.rand((), generator=g) < 0.6 else 0
        text = torch.randint(1, IMAGE, (int(torch.randint(5, 16, (), generator=g)),), generator=g)
        blank = torch.full((TOKENS_PER_TILE * tiles,), IMAGE)
        sample = {
            "input_ids": torch.cat([blank, text]),
            "labels": torch.cat([torch.full_like(blank, -100), text]),
        }
        if tiles:
            sample["pixel_values"] = torch.randn(tiles, 3, 16, 16, generator=g)
        return sample


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    def pad(key: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)

    batch = {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}
    batch["attention_mask"] = nn.utils.rnn.pad_sequence(
        [torch.ones_like(s["input_ids"]) for s in samples], batch_first=True
    )
    if tiles := [s["pixel_values"] for s in samples if "pixel_values" in s]:
        batch["pixel_values"] = torch.cat(tiles)
    return batch
