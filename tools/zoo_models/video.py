"""Video-language models: samples with a video, with an image, with both, with neither."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import clip, llama
from tools.zoo_models.samples import IMAGE, VIDEO, Sample, after, blanks, chance, words

FRAMES = 3


def llava_next_video() -> nn.Module:
    config = T.LlavaNextVideoConfig(
        vision_config=clip(),
        text_config=llama(),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        vision_feature_layer=-1,
        image_grid_pinpoints=[[32, 64]],
    )
    return T.LlavaNextVideoForConditionalGeneration(config)


def video_llava() -> nn.Module:
    config = T.VideoLlavaConfig(
        vision_config=clip(), text_config=llama(), image_token_index=IMAGE, video_token_index=VIDEO
    )
    return T.VideoLlavaForConditionalGeneration(config)


def _llava_next_video(g: torch.Generator) -> Sample:
    """A frame has four tokens after pooling; an image of one shape has 52."""
    has_image, has_video = chance(g), chance(g)
    sample = after(torch.cat([blanks(52 * has_image), blanks(4 * FRAMES * has_video, VIDEO)]), words(g))
    if has_image:
        sample |= {
            "pixel_values": torch.randn(1, 3, 3, 32, 32, generator=g),
            "image_sizes": torch.tensor([[32, 64]]),
        }
    if has_video:
        sample["pixel_values_videos"] = torch.randn(1, FRAMES, 3, 32, 32, generator=g)
    return sample


def _video_llava(g: torch.Generator) -> Sample:
    """A frame has a class token more than an image."""
    has_image, has_video = chance(g), chance(g)
    sample = after(torch.cat([blanks(16 * has_image), blanks(17 * FRAMES * has_video, VIDEO)]), words(g))
    if has_image:
        sample["pixel_values_images"] = torch.randn(1, 3, 32, 32, generator=g)
    if has_video:
        sample["pixel_values_videos"] = torch.randn(1, FRAMES, 3, 32, 32, generator=g)
    return sample


ENTRIES = [
    Entry("llava_next_video", "video", llava_next_video, _llava_next_video),
    Entry("video_llava", "video", video_llava, _video_llava),
]
