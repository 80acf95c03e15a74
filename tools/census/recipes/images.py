"""Images and clips: whole ones of several sizes, and patches with grids, places or masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tools.census.batches import Batching, Draw, noise
from tools.census.recipes.recipe import Recipe, config_value, drawn
from tools.census.small_configs import IMAGE, PATCH
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import integer


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    size = config_value(config, "image_size", "max_img_size", default=IMAGE)
    channels = config_value(config, "num_channels", "in_channels", "in_chans", default=3)
    return int(channels), int(size), int(size)


def images(names: set[str], config: Any) -> Iterator[Recipe]:
    """Images or clips of several sizes, in each of the forms that the names allow."""
    yield from _patches_with_grids(names, config)
    if {"pixel_attention_mask", "spatial_shapes"} <= names:
        yield Recipe("images as padded patches", _masked_patches(config), Batching())
    channels, height, _ = image_shape(config)
    for size in dict.fromkeys((height, 32, 64, 224)):
        if "pixel_values" in names:
            if config_value(config, "num_frames") is not None:
                frames = int(config_value(config, "num_frames"))
                clips = drawn("pixel_values", frames, channels, size, size)
                yield Recipe(f"clips of {size}", clips, Batching())
            yield Recipe(f"images of {size}", drawn("pixel_values", channels, size, size), Batching())
        elif "pixel_values_videos" in names:
            key, frames = "pixel_values_videos", int(config_value(config, "frames_per_clip", default=4))
            yield Recipe(f"clips of {size}", drawn(key, frames, channels, size, size), Batching())


def rare_images(names: set[str], config: Any) -> Iterator[Recipe]:
    """Patches with their places, or pairs of images."""
    channels, size, _ = image_shape(config)
    places = next((k for k in ("pixel_position_ids", "image_position_ids") if k in names), None)
    if places is not None:
        draw = placed_patches(config, places)
        yield Recipe("images as padded patches", draw, Batching(joined=frozenset({"pixel_values", places})))
    elif {"pixel_values", "target_sizes"} <= names:
        packed = Batching(joined=frozenset({"target_sizes"}), lined_up=frozenset({"pixel_values"}))
        yield Recipe("rows of patches", _rows_of_patches(config), packed)
    elif "pixel_values" in names:
        for side in dict.fromkeys((size, 64)):
            yield Recipe("pairs of images", drawn("pixel_values", 2, channels, side, side), Batching())


def _patches_with_grids(names: set[str], config: Any) -> Iterator[Recipe]:
    """Images of various sizes as patches, all images of a batch one behind the other."""
    grid = next((k for k in ("grid_thw", "image_grid_thw") if k in names), None)
    key = next((k for k in ("pixel_values", "hidden_states") if k in names), None)
    if grid is None or key is None:
        return
    channels = image_shape(config)[0]
    patch = int(config_value(config, "patch_size", default=14))
    merge = int(config_value(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))
    for temporal in (int(config_value(config, "temporal_patch_size", default=2)), 1):

        def patches(g: torch.Generator, temporal: int = temporal) -> Sample:
            h, w = merge * integer(g, 1, 3), merge * integer(g, 1, 3)
            sample: Sample = {key: noise(g, h * w, channels * temporal * patch * patch)}
            sample[grid] = torch.tensor([[1, h, w]])
            return sample | ({"merge_sizes": torch.tensor([merge])} if "merge_sizes" in names else {})

        yield Recipe("image patches", patches, Batching(joined=frozenset({key, grid, "merge_sizes"})))

    def square_patches(g: torch.Generator) -> Sample:
        h, w = merge * integer(g, 1, 3), merge * integer(g, 1, 3)
        return {key: noise(g, h * w, channels, patch, patch), grid: torch.tensor([[1, h, w]])}

    yield Recipe("square image patches", square_patches, Batching(joined=frozenset({key, grid})))
    blocks = image_blocks(config, key, grid)
    yield Recipe("image blocks", blocks, Batching(joined=frozenset({key, grid})))


def _rows_of_patches(config: Any) -> Draw:
    """Images of various sizes as a row of patches each; the rows of a batch stand one behind the other."""
    channels, patch = image_shape(config)[0], int(config_value(config, "patch_size", default=PATCH))

    def row(g: torch.Generator) -> Sample:
        h, w = 4 * integer(g, 1, 3), 4 * integer(g, 1, 3)
        size = torch.tensor([[h, w]], dtype=torch.int32)
        return {"pixel_values": noise(g, channels, patch, h * w * patch), "target_sizes": size}

    return row


def image_blocks(config: Any, key: str, grid: str) -> Draw:
    """Images as one square of pixels, channels last, for each token; grids count tokens."""
    channels = image_shape(config)[0]
    patch = int(config_value(config, "patch_size", default=14))
    merge = int(config_value(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))

    def blocks(g: torch.Generator) -> Sample:
        h, w = integer(g, 1, 3), integer(g, 1, 3)
        return {key: noise(g, h * w, merge * patch, merge * patch, channels), grid: torch.tensor([[1, h, w]])}

    return blocks


def placed_patches(config: Any, key: str = "image_position_ids") -> Draw:
    """Images of two sizes as patches with their places (x, y) as `key`; padding has the place (-1, -1)."""
    channels = image_shape(config)[0]
    patch = int(config_value(config, "model_patch_size", "patch_size", default=PATCH))
    side = int(config_value(config, "pooling_kernel_size", default=3))
    most = 2 * side * side

    def patches(g: torch.Generator) -> Sample:
        places = torch.full((1, most, 2), -1)
        wide = integer(g, 1, 3) * side
        x, y = torch.meshgrid(torch.arange(wide), torch.arange(side), indexing="xy")
        places[0, : wide * side] = torch.stack([x.flatten(), y.flatten()], 1)
        pixels = noise(g, 1, most, channels * patch * patch) * (places[..., :1] >= 0)
        return {"pixel_values": pixels, key: places}

    return patches


def _masked_patches(config: Any) -> Draw:
    """Images of two sizes as padded patches, with a mask of the patches and their height and width."""
    channels, patch = image_shape(config)[0], int(config_value(config, "patch_size", default=PATCH))

    def patches(g: torch.Generator) -> Sample:
        wide = integer(g, 1, 3) * 2
        mask = torch.arange(8) < 2 * wide
        pixels = noise(g, 8, channels * patch * patch) * mask[:, None]
        shape = torch.tensor([2, wide])
        return {"pixel_values": pixels, "pixel_attention_mask": mask.long(), "spatial_shapes": shape}

    return patches


def masked_tiles(channels: int, height: int, width: int) -> Draw:
    """Images of one or two tiles, padded to two, and which tiles there are."""

    def tiles(g: torch.Generator) -> Sample:
        mask = torch.arange(2)[None] < integer(g, 1, 3)
        return {
            "pixel_values": noise(g, 1, 2, channels, height, width) * mask[..., None, None, None],
            "pixel_attention_mask": mask,
        }

    return tiles
