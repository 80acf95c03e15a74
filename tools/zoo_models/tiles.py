"""Image-language models that cut images into tiles or take them in their own sizes: how many features an
image gives varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT, VISION, clip, llama, mistral, qwen2, siglip
from tools.zoo_models.samples import (
    IGNORED,
    IMAGE,
    VIDEO,
    Sample,
    after,
    blanks,
    chance,
    integer,
    joined,
    padded,
    words,
)

SIDE = 32  # pixels of a tile
PINPOINTS = [[32, 64], [64, 32], [64, 64]]


def llava_next() -> nn.Module:
    config = T.LlavaNextConfig(
        vision_config=clip(),
        text_config=llama(),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        image_grid_pinpoints=PINPOINTS,
    )
    return T.LlavaNextForConditionalGeneration(config)


def llava_onevision() -> nn.Module:
    config = T.LlavaOnevisionConfig(
        vision_config=siglip(),
        text_config=qwen2(),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=PINPOINTS,
    )
    return T.LlavaOnevisionForConditionalGeneration(config)


def idefics2() -> nn.Module:
    perceiver = T.models.idefics2.configuration_idefics2.Idefics2PerceiverConfig(
        hidden_size=48,
        resampler_n_latents=4,
        resampler_depth=1,
        resampler_n_heads=4,
        resampler_head_dim=12,
        num_key_value_heads=2,
    )
    vision = T.models.idefics2.configuration_idefics2.Idefics2VisionConfig(**VISION)
    config = T.Idefics2Config(
        vision_config=vision,
        perceiver_config=perceiver,
        text_config=mistral(),
        image_token_id=IMAGE,
        use_cache=False,
    )
    return T.Idefics2ForConditionalGeneration(config)


def idefics3() -> nn.Module:
    config = T.Idefics3Config(
        vision_config=dict(VISION), text_config=llama(), image_token_id=IMAGE, scale_factor=2, use_cache=False
    )
    return T.Idefics3ForConditionalGeneration(config)


def smolvlm() -> nn.Module:
    config = T.SmolVLMConfig(
        vision_config=dict(VISION), text_config=llama(), image_token_id=IMAGE, scale_factor=2, use_cache=False
    )
    return T.SmolVLMForConditionalGeneration(config)


def mistral3() -> nn.Module:
    vision = T.PixtralVisionConfig(
        **VISION | {"image_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    )
    config = T.Mistral3Config(
        vision_config=vision, text_config=mistral(), image_token_index=IMAGE, spatial_merge_size=2
    )
    return T.Mistral3ForConditionalGeneration(config)


def mllama() -> nn.Module:
    vision = T.MllamaVisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=2,
        intermediate_size=64,
        vision_output_dim=64,
        image_size=32,
        patch_size=8,
        max_num_tiles=2,
        intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )
    text = T.MllamaTextConfig(
        **TEXT
        | {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    )
    return T.MllamaForConditionalGeneration(
        T.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    )


def _any_resolution(g: torch.Generator) -> Sample:
    """An image of one of three shapes: a small view of it all, then its tiles, with a token at each row's
    end."""
    if not chance(g, 0.6):
        return after([], words(g))
    height, width = PINPOINTS[integer(g, 0, len(PINPOINTS))]
    tiles = 1 + height * width // SIDE**2
    tokens = 16 + height // 8 * (width // 8 + 1)
    sample = after(blanks(tokens), words(g))
    return sample | {
        "pixel_values": torch.randn(1, tiles, 3, SIDE, SIDE, generator=g),
        "image_sizes": torch.tensor([[height, width]]),
    }


def _most_tiles(samples: Sequence[Sample]) -> Sample:
    """Images with as many tiles as the largest has; the others' last ones are empty."""
    batch = padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask") | joined(
        samples, ["image_sizes"]
    )
    if images := [s["pixel_values"] for s in samples if "pixel_values" in s]:
        most = max(i.shape[1] for i in images)
        batch["pixel_values"] = torch.cat(
            [nn.functional.pad(i, (0, 0) * 3 + (0, most - i.shape[1])) for i in images]
        )
    return batch


def _several(tokens: int) -> Callable[[torch.Generator], Sample]:
    def make(g: torch.Generator) -> Sample:
        count = integer(g, 1, 4) if chance(g, 0.6) else 0
        sample = after(blanks(tokens * count), words(g))
        return sample | ({"pixel_values": torch.randn(count, 3, SIDE, SIDE, generator=g)} if count else {})

    return make


def _most_images(samples: Sequence[Sample]) -> Sample:
    """[samples, most images, ...]: samples with fewer images have empty ones, which the model drops."""
    batch = padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask")
    counts = [len(s["pixel_values"]) if "pixel_values" in s else 0 for s in samples]
    if most := max(counts):
        batch["pixel_values"] = torch.zeros(len(samples), most, 3, SIDE, SIDE)
        for i, sample in enumerate(samples):
            if counts[i]:
                batch["pixel_values"][i, : counts[i]] = sample["pixel_values"]
        batch["pixel_attention_mask"] = torch.ones(len(samples), most, SIDE, SIDE, dtype=torch.long)
    return batch


def _own_size(g: torch.Generator) -> Sample:
    """Up to two images of 16 or 32 pixels' height; one token for 16 x 16 pixels. The model takes no image of
    one token."""
    count = integer(g, 1, 3) if chance(g, 0.6) else 0
    sizes = [(16 * integer(g, 1, 3), 16 * integer(g, 2, 4)) for _ in range(count)]
    sample = after(blanks(sum(h * w // 256 for h, w in sizes)), words(g))
    if not count:
        return sample
    images = torch.zeros(count, 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, generator=g)
    return sample | {"pixel_values": images, "image_sizes": torch.tensor(sizes)}


def _largest(samples: Sequence[Sample]) -> Sample:
    """Images on a canvas as large as the largest one."""
    batch = padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask") | joined(
        samples, ["image_sizes"]
    )
    if images := [s["pixel_values"] for s in samples if "pixel_values" in s]:
        height, width = (max(i.shape[d] for i in images) for d in (2, 3))
        batch["pixel_values"] = torch.cat(
            [nn.functional.pad(i, (0, width - i.shape[3], 0, height - i.shape[2])) for i in images]
        )
    return batch


def _tiled(g: torch.Generator) -> Sample:
    """One image of one or two tiles, which the text after its token looks at."""
    tiles = integer(g, 1, 3)
    sample = after(blanks(1), words(g))
    return sample | {"pixel_values": torch.randn(tiles, 3, SIDE, SIDE, generator=g)}


def _two_tiles(samples: Sequence[Sample]) -> Sample:
    """[samples, 1 image, 2 tiles, ...], the second tile empty where an image has one; masks say which tiles
    are real."""
    batch = padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask")
    counts = torch.tensor([len(s["pixel_values"]) for s in samples])
    real = (torch.arange(2) < counts[:, None]).long()
    batch["pixel_values"] = torch.stack(
        [nn.functional.pad(s["pixel_values"], (0, 0) * 3 + (0, 2 - len(s["pixel_values"]))) for s in samples]
    )[:, None]
    batch["aspect_ratio_ids"] = counts[:, None]
    batch["aspect_ratio_mask"] = real[:, None]
    batch["cross_attention_mask"] = batch["attention_mask"][:, :, None, None] * real[:, None, None]
    return batch


ENTRIES = [
    Entry("llava_next", "tiles", llava_next, _any_resolution, _most_tiles),
    Entry("llava_onevision", "tiles", llava_onevision, _any_resolution, _most_tiles),
    Entry("idefics2", "tiles", idefics2, _several(4), _most_images),
    Entry("idefics3", "tiles", idefics3, _several(4), _most_images),
    Entry("smolvlm", "tiles", smolvlm, _several(4), _most_images),
    Entry("mllama", "tiles", mllama, _tiled, _two_tiles),
    Entry("mistral3", "tiles", mistral3, _own_size, _largest),
]
