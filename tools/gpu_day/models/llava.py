"""LLaVA with synthetic images in half of the samples: 1B to train, an 8B model's layers to measure."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn

from tools.gpu_day.models.sizes import (
    DTYPE,
    TOKENS,
    VOCABULARY,
    Samples,
    build_model,
    choose,
    learnable_tokens,
)

IMAGE, PATCH = choose({"small": (16, 8), "train": (224, 14), "layers": (336, 14)})
PLACES = (IMAGE // PATCH) ** 2
IMAGE_TOKEN = VOCABULARY - 1


def model() -> nn.Module:
    (v_layers, v_hidden, v_heads), (layers, hidden, heads, ffn) = choose(
        {
            "small": ((2, 32, 2), (2, 32, 4, 64)),
            "train": ((12, 768, 12), (16, 2048, 32, 5632)),
            "layers": ((4, 1024, 16), (3, 4096, 32, 14_336)),
        }
    )
    vision = T.CLIPVisionConfig(
        hidden_size=v_hidden,
        intermediate_size=4 * v_hidden,
        num_hidden_layers=v_layers,
        num_attention_heads=v_heads,
        image_size=IMAGE,
        patch_size=PATCH,
    )
    text = T.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * (TOKENS + PLACES),
        use_cache=False,
    )
    config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    return build_model(lambda: T.LlavaForConditionalGeneration(config))


def _sample(generator: torch.Generator, length: int) -> dict[str, torch.Tensor]:
    tokens = learnable_tokens(generator, length, IMAGE_TOKEN)
    if int(torch.randint(2, (), generator=generator)) == 0:
        return {"input_ids": tokens, "labels": tokens}
    places = torch.full((PLACES,), IMAGE_TOKEN)
    tokens = torch.cat([tokens[:1], places, tokens[1:]])
    labels = tokens.masked_fill(tokens == IMAGE_TOKEN, -100)
    pixels = torch.randn(1, 3, IMAGE, IMAGE, generator=generator, dtype=torch.float32).to(DTYPE)
    return {"input_ids": tokens, "labels": labels, "pixel_values": pixels}


def dataset() -> Samples:
    return Samples(_sample)
