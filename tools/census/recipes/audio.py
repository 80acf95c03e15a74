"""Sounds as waves and as spectrograms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tools.census.batches import Batching, noise, words
from tools.census.recipes.images import image_shape
from tools.census.recipes.recipe import FIXED, Recipe, config_value, drawn
from tools.census.small_configs import MELS
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import integer

FRAMES = 4  # of a clip with a sound
LONGER = 3840  # values of a sound: two frames for codecs with frames of 1,920 values


def waves(names: set[str], config: Any) -> Iterator[Recipe]:
    """Sounds as `input_values`: spectrograms where the configuration counts their bins, or waves."""
    if "input_values" not in names:
        return
    mels = int(config_value(config, "num_mel_bins", default=0))
    length = int(config_value(config, "max_length", default=64))
    if mels:
        yield Recipe("spectrograms", drawn("input_values", length, mels), Batching())

    def wave(g: torch.Generator) -> Sample:
        return {"input_values": noise(g, integer(g, 1200, 2000))}

    mask = {"input_values": "attention_mask"} if "attention_mask" in names else {}
    yield Recipe("sounds", wave, Batching({"input_values": 0.0}, masks=mask))
    yield Recipe("sounds of one length", drawn("input_values", 1600), Batching())
    yield Recipe("sounds with a channel", drawn("input_values", 1, 1600), Batching())
    if "padding_mask" in names:
        whole = torch.ones(1600, dtype=torch.long)

        def masked_sound(g: torch.Generator) -> Sample:
            return {"input_values": noise(g, 1, 1600), "padding_mask": whole}

        yield Recipe("sounds with a channel and a mask", masked_sound, Batching())
    yield Recipe("longer sounds with a channel", drawn("input_values", 1, LONGER), Batching())


def spectrograms(names: set[str], config: Any) -> Iterator[Recipe]:
    """Sounds as `input_features`, of various lengths or of one."""
    if "input_features" not in names:
        return
    counts = ("num_mel_bins", "feature_projection_input_dim", "feature_size", "input_dim")
    mels = int(config_value(config, *counts, default=MELS))
    mask = features_mask(names)
    masks = {"input_features": mask} if mask else {}

    def mel(g: torch.Generator) -> Sample:
        return {"input_features": noise(g, integer(g, 60, 100), mels)}

    yield Recipe("spectrograms", mel, Batching({"input_features": 0.0}, masks=masks))
    length = 2 * int(config_value(config, "max_source_positions", default=32))
    heard = {"input_features_mask": torch.ones(length, dtype=torch.long)}
    heard = heard if "input_features_mask" in names else {}
    for shape in ((mels, length), (length, mels)):

        def fixed(g: torch.Generator, shape: tuple[int, int] = shape) -> Sample:
            return {"input_features": noise(g, *shape)} | heard

        yield Recipe("spectrograms of one length", fixed, Batching())


def features_mask(names: set[str]) -> str:
    """The mask of a spectrogram's frames that the model takes, "" if it takes none."""
    return next((m for m in ("attention_mask", "input_features_mask") if m in names), "")


def rare_sounds(names: set[str], config: Any) -> Iterator[Recipe]:
    """Waves with spectrograms or clips, longer waves, and spectrograms with several frames in one."""
    if {"input_values", "input_features"} <= names:
        bins = int(config_value(config, "feature_projection_input_dim", default=MELS))

        def both(g: torch.Generator) -> Sample:
            return {"input_values": noise(g, 1, 3200), "input_features": noise(g, 10, bins)}

        yield Recipe("sounds and spectrograms", both, Batching())
    elif {"input_values", "pixel_values_videos"} <= names:
        channels, height, width = image_shape(config)

        def heard_and_seen(g: torch.Generator) -> Sample:
            clip = noise(g, FRAMES, channels, height, width)
            return {"input_values": noise(g, 1, LONGER), "pixel_values_videos": clip}

        yield Recipe("sounds and clips", heard_and_seen, Batching())
    if "input_features" in names:
        yield from _stacked_spectrograms(names, config)


def rare_spectrograms(names: set[str], config: Any) -> Iterator[Recipe]:
    """Spectrograms under other names or with a channel, and spectrograms that a text is spoken as."""
    if "audio_mel" in names:
        bins = int(config_value(config, "input_feat_size", default=MELS))

        def mel(g: torch.Generator) -> Sample:
            return {"audio_mel": noise(g, 64, bins), "audio_mel_mask": torch.zeros(64, dtype=torch.bool)}

        yield Recipe("spectrograms and masks", mel, Batching())
    if "is_longer" in names:
        yield from _with_channel(names, config)
    if "spectrogram_labels" in names:
        bins = int(config_value(config, "num_mel_bins", default=MELS))

        def spoken(g: torch.Generator) -> Sample:
            return {
                "input_ids": words(g, FIXED),
                "duration_labels": torch.full((FIXED[0],), 2),
                "spectrogram_labels": noise(g, 2 * FIXED[0], bins),
                "pitch_labels": noise(g, FIXED[0], 1),
                "energy_labels": noise(g, FIXED[0], 1),
            }

        yield Recipe("text, durations, pitches and spectrograms", spoken, Batching())


def _with_channel(names: set[str], config: Any) -> Iterator[Recipe]:
    """Spectrograms with a channel, which are longer than the model's window, and a text if it takes one."""
    bins = int(config_value(config, "num_mel_bins", default=MELS))
    for length in (64, 256):

        def longer(g: torch.Generator, length: int = length) -> Sample:
            sample: Sample = {"input_ids": words(g, FIXED)} if "input_ids" in names else {}
            features = noise(g, 1, length, bins)
            return sample | {"input_features": features, "is_longer": torch.tensor([True])}

        yield Recipe("spectrograms with a channel", longer, Batching())


def _stacked_spectrograms(names: set[str], config: Any) -> Iterator[Recipe]:
    """Spectrograms with several frames in one, or of a long window, with the mask that the model takes."""
    bins = int(config_value(config, "num_mel_bins", "feature_size", default=MELS))
    mask = features_mask(names)
    stacked = int(config_value(config, "num_stacked_frames", default=2))
    window = 2 * int(config_value(config, "n_window", default=50))
    for shape in ((64, stacked * bins), (64, 2 * bins), (64, 4 * bins), (bins, 2 * window)):
        length = max(shape) if shape[0] == bins else shape[0]

        def stacked_frames(
            g: torch.Generator, shape: tuple[int, int] = shape, length: int = length
        ) -> Sample:
            heard = {"input_features": noise(g, *shape)}
            return heard | ({mask: torch.ones(length, dtype=torch.long)} if mask else {})

        yield Recipe("stacked spectrograms", stacked_frames, Batching())
