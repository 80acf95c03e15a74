"""Models that describe images and videos by grids (`image_grid_thw`): positions and windows are computed from
their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT
from tools.zoo_models.samples import (
    AUDIO,
    END,
    IGNORED,
    IMAGE,
    START,
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

PATCH, MELS, FRAMES = 4, 8, 32
SOUND_START, SOUND_END = 114, 113
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
TOKENS: dict[str, Any] = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
)
TOWER: dict[str, Any] = dict(
    depth=2, num_heads=2, patch_size=PATCH, spatial_merge_size=2, temporal_patch_size=2
)
MRoPE: dict[str, Any] = TEXT | {"rope_parameters": ROPE}


def qwen2_vl() -> nn.Module:
    config = T.Qwen2VLConfig(
        vision_config=TOWER | dict(embed_dim=32, hidden_size=48, mlp_ratio=2),
        text_config=dict(MRoPE),
        **TOKENS,
    )
    return T.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> nn.Module:
    vision = TOWER | dict(
        hidden_size=32, intermediate_size=64, out_hidden_size=48, window_size=16, fullatt_block_indexes=[1]
    )
    return T.Qwen2_5_VLForConditionalGeneration(
        T.Qwen2_5_VLConfig(vision_config=vision, text_config=dict(MRoPE), **TOKENS)
    )


def qwen3_vl() -> nn.Module:
    vision = TOWER | dict(
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=48,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    text = MRoPE | {"head_dim": 12, "rope_parameters": ROPE | {"mrope_interleaved": True}}
    return T.Qwen3VLForConditionalGeneration(
        T.Qwen3VLConfig(vision_config=vision, text_config=text, **TOKENS)
    )


def qwen2_5_omni() -> nn.Module:
    audio = dict(
        num_mel_bins=MELS,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        d_model=32,
        max_source_positions=16,
        n_window=4,
        output_dim=48,
    )
    vision = TOWER | dict(
        hidden_size=32, intermediate_size=64, out_hidden_size=48, window_size=16, fullatt_block_indexes=[1]
    )
    config = T.Qwen2_5OmniThinkerConfig(
        audio_config=audio,
        vision_config=vision,
        text_config=dict(MRoPE),
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_start_token_id=SOUND_START,
        audio_end_token_id=SOUND_END,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return T.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _patches(g: torch.Generator, frames: int = 1) -> tuple[torch.Tensor, list[int]]:
    """Patches of an image, or of a video of 2 * `frames` pictures, and its grid."""
    grid = [frames, 2 * integer(g, 1, 4), 2 * integer(g, 1, 4)]
    return torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * PATCH * PATCH, generator=g), grid


def _gridded(token: int, key: str, grid_key: str, frames: int) -> Any:
    def part(g: torch.Generator) -> tuple[torch.Tensor, Sample]:
        patches, grid = _patches(g, frames)
        tokens = torch.cat([torch.tensor([START]), blanks(len(patches) // 4, token), torch.tensor([END])])
        return tokens, {key: patches, grid_key: torch.tensor([grid])}

    return part


image = _gridded(IMAGE, "pixel_values", "image_grid_thw", 1)
video = _gridded(VIDEO, "pixel_values_videos", "video_grid_thw", 2)


def sound(g: torch.Generator) -> tuple[torch.Tensor, Sample]:
    """A clip of 16 to 32 frames, the rest of which is silence."""
    length = integer(g, 16, FRAMES + 1)
    count = ((length - 1) // 2 - 1) // 2 + 1
    tokens = torch.cat([torch.tensor([SOUND_START]), blanks(count, AUDIO), torch.tensor([SOUND_END])])
    mask = (torch.arange(FRAMES) < length).long()[None]
    return tokens, {
        "input_features": torch.randn(1, MELS, FRAMES, generator=g),
        "feature_attention_mask": mask,
    }


def mixed(parts: Sequence[Any], typed: bool) -> Any:
    """Texts with some of `parts` before them; `typed` adds the token types that say which positions are
    images and videos."""

    def make(g: torch.Generator) -> Sample:
        chosen = [p(g) for p in parts if chance(g, 0.5)]
        sample = after(torch.cat([blanks(0), *(tokens for tokens, _ in chosen)]), words(g))
        for _, values in chosen:
            sample |= values
        ids = sample["input_ids"]
        return sample | ({"mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO)).int()} if typed else {})

    return make


def collate(samples: Sequence[Sample]) -> Sample:
    types = {"mm_token_type_ids": 0} if "mm_token_type_ids" in samples[0] else {}
    rows = (
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "input_features",
        "feature_attention_mask",
    )
    return padded(samples, {"input_ids": 0, "labels": IGNORED} | types, "attention_mask") | joined(
        samples, rows
    )


ENTRIES = [
    Entry("qwen2_vl", "grids", qwen2_vl, mixed([image], True), collate),
    Entry("qwen2_vl_video", "grids", qwen2_vl, mixed([image, video], True), collate),
    Entry("qwen2_5_vl", "grids", qwen2_5_vl, mixed([image], True), collate),
    Entry("qwen3_vl", "grids", qwen3_vl, mixed([image], True), collate),
    Entry("qwen2_5_omni", "grids", qwen2_5_omni, mixed([image, sound], False), collate),
]
