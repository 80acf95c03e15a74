"""Samples without labels, by the names of forward's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.census.batches import Batching
from tools.census.recipes.audio import rare_sounds, rare_spectrograms, spectrograms, waves
from tools.census.recipes.images import images, rare_images
from tools.census.recipes.recipe import Recipe, config_value, drawn
from tools.census.recipes.series import series
from tools.census.recipes.texts import codes_of_steps, named_classes, texts, texts_with_image, with_text
from tools.census.small_configs import HIDDEN

_HEARD = {"input_features", "input_values"}
_SEEN = {"pixel_values", "image", "pixel_values_videos", *_HEARD}


def plain_inputs(names: set[str], config: Any, choices: int = 0) -> Iterator[Recipe]:
    """Text, boxes of words, images, clips, sounds, series; texts with one of these. With `choices`, a sample
    has so many texts."""
    if "input_ids" in names and not names & _SEEN:
        yield from texts(names, config, choices)
    elif "input_ids" in names and names & {"pixel_values", "image"}:
        yield from texts_with_image(names, config)
        yield from texts(names, config, choices)
    elif "input_ids" in names:
        for seen in plain_inputs(names - {"input_ids"}, config):
            yield with_text(seen)
    else:
        for some in (images, waves, spectrograms, series):
            yield from some(names, config)


def rare_inputs(names: set[str], config: Any) -> Iterator[Recipe]:
    """Inputs that few models take: pairs of images, patches with places, sounds of codecs, hidden states."""
    for some in (rare_images, rare_sounds, codes_of_steps, rare_spectrograms):
        yield from some(names, config)
    if "classes_structure" in names:
        yield named_classes(config)
    if "inputs" in names and (width := int(config_value(config, "d_model", default=0))):
        yield Recipe("embedded inputs", drawn("inputs", 16, width), Batching())
    if "hidden_states" in names and "pixel_values" not in names:
        hidden = int(config_value(config, "hidden_size", default=HIDDEN))
        for shape in ((16, hidden), (hidden, 16), (1, 640)):
            yield Recipe("hidden states", drawn("hidden_states", *shape), Batching())
