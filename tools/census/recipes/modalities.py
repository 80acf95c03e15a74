"""Optional images and sounds of language models: how they are drawn, and how many tokens stand for them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tools.census.batches import Draw, noise
from tools.census.recipes.images import image_blocks, image_shape, masked_tiles, placed_patches
from tools.census.recipes.recipe import config_value, drawn
from tools.census.small_configs import MELS, PATCH
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import integer

MODAL = {"pixel_values", "input_features", "input_values", "pixel_values_images"}


@dataclass(frozen=True)
class Modality:
    """An optional input: `draw` gives one image or sound as it stands in a batch of one, `joined` its keys;
    `token` is the special token for its features, `around` tokens before and after. A `required` one is in
    every sample."""

    name: str
    draw: Draw
    joined: frozenset[str]
    token: int
    count: Callable[[Sample], int]
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    typed: int = 1
    required: bool = False


def modalities(names: set[str], config: Any, model: nn.Module) -> Iterator[list[Modality]]:
    """Which images and sounds a sample may have, in each of the forms that the names allow."""
    images, sounds = list(_image_forms(names, config, model)), list(_sound_forms(names, config, model))
    for image in images:
        for sound in sounds:
            yield [image, sound]
    for one in (*images, *sounds):
        yield [one]
    if "pixel_values" in names and not images:
        pixels = drawn("pixel_values", *image_shape(config))
        yield [Modality("an image", pixels, frozenset(), 0, lambda _: 0, required=True)]


def _image_forms(names: set[str], config: Any, model: nn.Module) -> Iterator[Modality]:
    """Images that the model's own `get_image_features` takes."""
    token = config_value(config, "image_token_id", "image_token_index", "image_token")
    if token is None or "pixel_values" not in names:
        return
    starts = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
    ends = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
    start, end = config_value(config, *starts), config_value(config, *ends)
    around = ((int(start),) if start is not None else (), (int(end),) if end is not None else ())
    for name, draw in _drawn_images(names, config):
        count = feature_count(model, "get_image_features", draw)
        if count is not None:
            keys = frozenset(draw(torch.Generator().manual_seed(0)))
            yield Modality(name, draw, keys, int(token), count, around)


def _drawn_images(names: set[str], config: Any) -> Iterator[tuple[str, Draw]]:
    """The forms of one image, with the name of each."""
    if "image_grid_thw" in names:
        yield from _gridded_images(config)
    elif "image_grid_hw" in names:
        yield "image patches", _flat_patches(config)
    elif "image_position_ids" in names:
        yield "images as padded patches", placed_patches(config)
    else:
        yield from _whole_images(names, config)


def _gridded_images(config: Any) -> Iterator[tuple[str, Draw]]:
    """Images of various sizes as patches, flat or square, or as one block of pixels for each token."""
    channels = image_shape(config)[0]
    patch = int(config_value(config, "patch_size", default=14))
    merge = int(config_value(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))

    def patches_of(*size: int) -> Draw:
        def patches(g: torch.Generator) -> Sample:
            h, w = merge * integer(g, 1, 3), merge * integer(g, 1, 3)
            return {"pixel_values": noise(g, h * w, *size), "image_grid_thw": torch.tensor([[1, h, w]])}

        return patches

    for temporal in (int(config_value(config, "temporal_patch_size", default=2)), 1):
        yield "image patches", patches_of(channels * temporal * patch * patch)
    yield "square image patches", patches_of(channels, patch, patch)
    yield "image blocks", image_blocks(config, "pixel_values", "image_grid_thw")


def _flat_patches(config: Any) -> Draw:
    """Images of various sizes as patches, with their height and width."""
    channels, patch = image_shape(config)[0], int(config_value(config, "patch_size", default=PATCH))

    def patches(g: torch.Generator) -> Sample:
        h, w = 2 * integer(g, 1, 3), 2 * integer(g, 1, 3)
        pixels = noise(g, h * w, channels * patch * patch)
        return {"pixel_values": pixels, "image_grid_hw": torch.tensor([[h, w]])}

    return patches


def _whole_images(names: set[str], config: Any) -> Iterator[tuple[str, Draw]]:
    """Images of one size, in tiles, and as clips; with a mask of their pixels or tiles if the model takes
    one."""
    channels, height, width = image_shape(config)
    extra: Sample = {"image_sizes": torch.tensor([[height, width]])} if "image_sizes" in names else {}

    def images_of(*shape: int) -> Draw:
        return lambda g: {"pixel_values": noise(g, 1, *shape)} | extra

    if "pixel_attention_mask" in names:
        mask = torch.ones(1, 1, height, width, dtype=torch.long)
        in_samples = drawn("pixel_values", 1, 1, channels, height, width)
        yield "images in samples", lambda g: in_samples(g) | {"pixel_attention_mask": mask}
        yield "masked image tiles", masked_tiles(channels, height, width)
    yield "images", images_of(channels, height, width)
    yield "image tiles", images_of(2, channels, height, width)
    yield "clips, channels last", drawn("pixel_values", 1, 2, height, width, channels)
    patch = int(config_value(config, "patch_size", default=PATCH))
    yield "clips of patches", drawn("pixel_values", 4, 2, patch, patch, channels)


def _sound_forms(names: set[str], config: Any, model: nn.Module) -> Iterator[Modality]:
    token = config_value(config, "audio_token_id", "audio_token_index", "audio_token")
    if token is None or not names & {"input_features", "input_values"}:
        return
    mels = int(
        config_value(config, "num_mel_bins", "input_feat_size", "feature_size", "input_dim", default=MELS)
    )
    mask = next(
        (m for m in ("feature_attention_mask", "input_features_mask", "attention_mask") if m in names), ""
    )
    length = 2 * int(config_value(config, "max_source_positions", default=32))
    stacked = int(config_value(config, "num_stacked_frames", default=1))
    for shape in ((1, mels, length), (1, length, mels), (1, length, stacked * mels)):

        def sound(g: torch.Generator, shape: tuple[int, int, int] = shape) -> Sample:
            sample: Sample = {"input_features": noise(g, *shape)}
            if mask and mask != "attention_mask":
                sample[mask] = torch.ones(1, length, dtype=torch.long)
            return sample

        count = feature_count(model, "get_audio_features", sound)
        if count is not None:
            keys = frozenset(sound(torch.Generator().manual_seed(0)))
            yield Modality("sounds", sound, keys, int(token), count, typed=3)
            if mask == "input_features_mask":
                masked = _with_feature_mask(sound, count, mask)
                yield Modality("sounds with masked features", masked, keys, int(token), count, typed=3)


def _with_feature_mask(sound: Draw, count: Callable[[Sample], int], key: str) -> Draw:
    """Sounds with a mask of their features in place of one of their spectrograms."""

    def masked(g: torch.Generator) -> Sample:
        sample = {k: v for k, v in sound(g).items() if k != key}
        return sample | {key: torch.ones(1, count(sample), dtype=torch.bool)}

    return masked


def feature_count(model: nn.Module, method: str, draw: Draw) -> Callable[[Sample], int] | None:
    """How many features an input becomes, asked of the model; None if it does not say."""
    ask = getattr(model, method, None) or getattr(getattr(model, "model", None), method, None)
    if ask is None:
        return None
    known = dict[tuple[Any, ...], int]()

    def count(sample: Sample) -> int:
        key = tuple(
            tuple(v.shape) + tuple(() if v.is_floating_point() else v.flatten().tolist())
            for v in sample.values()
        )
        if key not in known:
            accepted = inspect.signature(ask).parameters
            with torch.no_grad():
                out = ask(**{k: v for k, v in sample.items() if k in accepted or "kwargs" in accepted})
            features = getattr(out, "pooler_output", out)
            if features is None:  # of each layer that adds some at the places of the tokens
                _, features = out.deepstack_features[0]
            listed = features if isinstance(features, list | tuple) else [features]
            known[key] = sum(math.prod(f.shape[:-1]) for f in listed)
        return known[key]

    try:
        count(draw(torch.Generator().manual_seed(0)))
    except Exception:  # not a form that this model takes
        return None
    return count
