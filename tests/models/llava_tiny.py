"""A tiny LLaVA: half of the samples have one image, text lengths are ragged, collation is secc's default."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, IMAGE, PATCHES = 120, 119, 16


def model() -> nn.Module:
    vision = T.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
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
    config = T.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return T.LlavaForConditionalGeneration(config)


class Samples(Dataset):
    """Random captions; a sample with an image starts with its placeholders, which carry no label."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        has_image = torch.rand((), generator=g).item() < 0.5
        text = torch.randint(1, IMAGE, (int(torch.randint(5, 20, (), generator=g)),), generator=g)
        if not has_image:
            return {"input_ids": text, "labels": text.clone()}
        blank = torch.full((PATCHES,), IMAGE)
        return {
            "input_ids": torch.cat([blank, text]),
            "labels": torch.cat([torch.full_like(blank, -100), text]),
            "pixel_values": torch.randn(1, 3, 32, 32, generator=g),
        }


def dataset() -> Dataset:
    return Samples()
