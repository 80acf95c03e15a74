"""Texts of one length with inputs that few language models take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tools.census.batches import Batching, noise, sometimes, words
from tools.census.recipes.images import image_shape
from tools.census.recipes.modalities import feature_count
from tools.census.recipes.recipe import FIXED, Recipe, config_value, drawn
from tools.census.small_configs import MELS
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import IGNORED, integer


def rare_language(names: set[str], config: Any, model: nn.Module) -> Iterator[Recipe]:
    """All that the names allow."""
    if "image_attention_mask" in names:
        yield _attended_images(config)
    if "input_ids" in names and (books := int(config_value(config, "num_codebooks", default=0))):
        yield _text_and_codes(books)
    if "decoder_input_ids" in names and "delay_pattern" in vars(config):
        yield _spoken_codes(len(config.delay_pattern))
    if {"state", "actions"} <= names:
        yield from _robot_steps(config, model)
    if "encoder_inputs_embeds" in names and "input_features" in names:
        yield from _words_of_frames(config, model)
    if {"pixel_values", "image_token_pooling"} <= names:
        yield _pooled_crops(config)
    if "qformer_input_ids" in names:
        yield from _questions_about_clips(config)


def _attended_images(config: Any) -> Recipe:
    """An image, and which words attend to it."""
    channels, height, width = image_shape(config)

    def attended(g: torch.Generator) -> Sample:
        text = words(g, FIXED)
        sample = {"input_ids": text, "labels": text, "pixel_values": noise(g, 1, channels, height, width)}
        return sample | {"image_attention_mask": torch.ones(FIXED[0], 1, dtype=torch.long)}

    return Recipe("fixed text and attended images", attended, Batching())


def _pooled_crops(config: Any) -> Recipe:
    """A text, every second one with an image as one or two crops of patches; each of the image's tokens pools
    four patches, or those of them that there are."""
    seen, token = config.vision_config, int(config.image_token_id)
    side = math.isqrt(int(seen.num_position_embeddings))
    pixels = seen.num_channels * seen.patch_size**2

    def cropped(g: torch.Generator) -> Sample:
        text, crops = words(g), integer(g, 1, 3) if sometimes(g) else 0
        patches = torch.arange(crops * side**2).view(crops, side // 2, 2, side // 2, 2)
        pooled = patches.transpose(2, 3).reshape(-1, 4)
        pooled[:: side**2 // 4, 3] = -1
        before = torch.full((len(pooled),), token)
        sample: Sample = {
            "input_ids": torch.cat([before, text]),
            "labels": torch.cat([torch.full_like(before, IGNORED), text]),
            "mm_token_type_ids": torch.cat([torch.ones_like(before), torch.zeros_like(text)]),
        }
        if not crops:
            return sample
        more = side // 2 if crops > 1 else 0
        return sample | {
            "pixel_values": noise(g, crops, side**2, pixels),
            "image_token_pooling": pooled,
            "image_grids": torch.tensor([[side // 2, side // 2, more, more]]),
        }

    padded = {"input_ids": 0, "labels": IGNORED, "mm_token_type_ids": 0}
    joined = frozenset({"pixel_values", "image_grids"})
    masks, places = {"input_ids": "attention_mask"}, {"image_token_pooling": "pixel_values"}
    return Recipe("text and pooled crops", cropped, Batching(padded, joined, masks=masks, places=places))


def _text_and_codes(books: int) -> Recipe:
    """A word and the codes of `books` codebooks at each step."""

    def codes(g: torch.Generator) -> Sample:
        ids = torch.stack([words(g, FIXED) for _ in range(books + 1)], 1)
        return {"input_ids": ids, "labels": ids[:, 0].clone()}

    return Recipe("a text and codes of each step", codes, Batching())


def _spoken_codes(channels: int) -> Recipe:
    """A text, and codes of several channels at each step, the labels of a channel one step behind."""

    def spoken(g: torch.Generator) -> Sample:
        codes = torch.stack([words(g, FIXED) for _ in range(channels)], 1)
        first = torch.full((1, channels), 1)
        sample: Sample = {"input_ids": words(g, FIXED), "decoder_input_ids": torch.cat([first, codes[:-1]])}
        return sample | {"labels": codes.T.contiguous()}

    return Recipe("a text and spoken codes", spoken, Batching(joined=frozenset({"labels"})))


def _words_of_frames(config: Any, model: nn.Module) -> Iterator[Recipe]:
    """A sound with a word for each of its frames."""
    bins = int(config_value(config, "num_mel_bins", default=MELS))
    heard = drawn("input_features", 1, bins, 64)
    count = feature_count(model, "get_audio_features", heard)
    if count is None:
        return

    def spoken(g: torch.Generator) -> Sample:
        sample = heard(g)
        text = words(g, (count(sample), count(sample) + 1))
        return {"input_ids": text, "labels": text} | sample

    yield Recipe("a word for each frame", spoken, Batching(joined=frozenset({"input_features"})))


def _questions_about_clips(config: Any) -> Iterator[Recipe]:
    """A clip, a question that the frames' queries see, and a text behind the clip's tokens."""
    channels, height, width = image_shape(config)
    token = int(config_value(config, "video_token_id", "video_token_index", default=-1))
    queries, frames = int(config.num_query_tokens), 2
    if token < 0:
        return

    def asked(g: torch.Generator) -> Sample:
        text, query = words(g, FIXED), words(g, FIXED)
        before = torch.full((queries * frames,), token)
        labels = torch.cat([torch.full_like(before, IGNORED), text])
        pixels = noise(g, frames, channels, height, width)
        ids = torch.cat([before, text])
        return {"input_ids": ids, "labels": labels, "qformer_input_ids": query, "pixel_values": pixels}

    yield Recipe("fixed text, question and clips", asked, Batching())


def _robot_steps(config: Any, model: nn.Module) -> Iterator[Recipe]:
    """A text with an image of one camera, a robot's state, and its next actions with noise and time."""
    channels, height, width = image_shape(config)
    token = int(config_value(config, "image_token_id", "image_token_index", default=-1))
    seen = drawn("pixel_values", 1, channels, height, width)
    towers = [m for m in model.modules() if hasattr(m, "get_image_features")]
    count = feature_count(towers[-1], "get_image_features", seen) if towers else None
    if count is None or token < 0:
        return

    def step(g: torch.Generator) -> Sample:
        sample = seen(g)
        before = torch.full((count(sample),), token)
        return sample | {
            "input_ids": torch.cat([before, words(g, FIXED)]),
            "pixel_attention_mask": torch.ones(1, dtype=torch.bool),
            "state": noise(g, config.max_state_dim),
            "actions": noise(g, config.chunk_size, config.max_action_dim),
            "noise": noise(g, config.chunk_size, config.max_action_dim),
            "timestep": torch.rand((), generator=g),
        }

    yield Recipe("fixed text, images, states and actions", step, Batching())
