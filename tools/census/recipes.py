"""What the samples of a task look like for one model: a short list of recipes, the likeliest first.

`find_recipe` takes the first one that plain PyTorch trains. Recipes read the model's configuration and the
names of forward's parameters; what an image or a sound becomes is asked of the model itself.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tools.census.batches import (
    LENGTHS,
    WORDS,
    Batching,
    Draw,
    boxes,
    labelled_words,
    noise,
    sometimes,
    words,
)
from tools.census.documented import documented_inputs
from tools.census.small_configs import HIDDEN, IMAGE, LABELS, MELS, PATCH
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import IGNORED, integer

FIXED = (16, 17)  # texts of one length
END = 2  # the token behind a text
TRIED_BATCH = 12
MOST_WORDS = 128  # of a text as long as a model takes


@dataclass(frozen=True)
class Recipe:
    """One way to draw samples; `name` says which for the table."""

    name: str
    draw: Draw
    batching: Batching


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


class RecipeError(Exception):
    """No recipe trains in plain PyTorch; the message is the first one's error."""


def config_value(config: Any, *names: str, default: Any = None) -> Any:
    """The first of `names` that the configuration or one of its parts has as a number."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    parts += [v for p in parts[1:] for v in vars(p).values() if hasattr(v, "model_type")]
    for name in names:
        for part in parts:
            value = getattr(part, name, None) if name in vars(part) or hasattr(type(part), name) else None
            if isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
    return default


def find_recipe(task: str, model: nn.Module) -> Recipe:
    """The first recipe of `task` that plain PyTorch trains on `model`. Raises RecipeError, with the error
    of the first, if none does; of one that ran without giving a loss, if there is one."""
    error: Exception | None = None
    for recipe in recipes(task, model):
        try:
            try_recipe(model, recipe)
            return recipe
        except Exception as failed:  # whatever the model's code raises
            error = failed if error is None or "no loss that trains" in str(failed) else error
    error = error or RecipeError(f"no recipe for {task}")
    raise RecipeError(f"{type(error).__name__}: {error}") from error


def try_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Trains a batch, and a sample alone, in plain PyTorch. Raises whatever fails. A group norm over a
    feature map of one pixel, for example, takes batches only, so larger images are drawn then."""
    samples = [recipe.draw(torch.Generator().manual_seed(i)) for i in range(TRIED_BATCH)]
    for batch in (samples, samples[:1]):
        loss = loss_of(model(**recipe.batching.collate(batch)))
        if not torch.isfinite(loss):
            raise RecipeError(f"the loss is {float(loss)}")
    loss.backward()
    model.zero_grad(set_to_none=True)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in forward's output. Raises RecipeError if there is none that trains."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise RecipeError("forward returns no loss that trains")
    return loss.mean() if loss.dim() else loss


def parameters_of(model: nn.Module) -> set[str]:
    """The names of forward's parameters; for a wrapper those of the model inside."""
    return set(inspect.signature(getattr(model, "wrapped", model).forward).parameters)


def recipes(task: str, model: nn.Module) -> Iterator[Recipe]:
    """The recipes of a task."""
    names, config = parameters_of(model), getattr(model, "wrapped", model).config
    text = "input_ids" in names
    if type(getattr(model, "wrapped", model)).forward is nn.Module.forward:
        raise NotImplementedError("the class has no forward")
    if "inference_session" in names:
        raise NotImplementedError("forward takes a session of inference")
    if task == "hidden":
        yield from _plain_inputs(names, config)
        yield from _rare_inputs(names, config)
        for name, draw in documented_inputs(getattr(model, "wrapped", model), config):
            yield Recipe(name, draw, Batching())
        return
    label = _LABELS.get(task)
    if task == "causal" and "num_codebooks" in vars(config):
        yield Recipe("codes", _codes(config), Batching(joined=frozenset({"input_ids"})))
    if task == "seq2seq" and "decoder_input_ids" not in names:
        task = "multimodal"
    if task in ("causal", "masked", "seq2seq", "multimodal"):
        yield from _language(task, names, config, model)
        yield from _rare_language(names, config, model)
        if task != "seq2seq" and "decoder_input_ids" in names:
            yield from _language("seq2seq", names, config, model)
        if "labels" in names and not text:
            yield from _speech(names, config)
    elif task == "speech":
        yield from _speech(names, config)
        yield from _language("multimodal", names, config, model)
    elif label is not None:
        if text and names & _MODAL:
            for base in _language("multimodal", names, config, model):
                yield _with_labels(base, label, config)
        if task == "ctc" and "decoder_input_ids" in names:
            label = _transducer_labels
        if task == "span" and "start_positions" not in names:
            label = _label
        given = names - {"decoder_input_ids"}
        for base in _plain_inputs(given, config, choices=2 if task == "choice" else 0):
            yield _with_labels(base, label, config)
        for base in _rare_inputs(given, config):
            yield _with_labels(base, label, config)
        for name, draw in documented_inputs(model, config):
            yield _with_labels(Recipe(name, draw, Batching()), label, config)


def _rare_inputs(names: set[str], config: Any) -> Iterator[Recipe]:
    """Inputs that few models take: pairs of images, patches with places, sounds of codecs, hidden states."""
    channels, size, _ = image_shape(config)
    places = next((k for k in ("pixel_position_ids", "image_position_ids") if k in names), None)
    if places is not None:
        draw = _placed_patches(config, places)
        yield Recipe("images as padded patches", draw, Batching(joined=frozenset({"pixel_values", places})))
    elif "pixel_values" in names:
        for side in dict.fromkeys((size, 64)):
            yield Recipe("pairs of images", _drawn("pixel_values", 2, channels, side, side), Batching())
    if {"input_values", "input_features"} <= names:
        bins = int(config_value(config, "feature_projection_input_dim", default=MELS))

        def both(g: torch.Generator) -> Sample:
            return {"input_values": noise(g, 1, 3200), "input_features": noise(g, 10, bins)}

        yield Recipe("sounds and spectrograms", both, Batching())
    elif "input_values" in names:
        yield Recipe("longer sounds with a channel", _drawn("input_values", 1, 3840), Batching())
    if "input_features" in names:
        yield from _stacked_spectrograms(names, config)
    if "input_ids" in names and (books := int(config_value(config, "num_codebooks", default=0))):
        for count in (books, books + 1):

            def codes(g: torch.Generator, count: int = count) -> Sample:
                return {"input_ids": torch.stack([words(g, FIXED) for _ in range(count)], 1)}

            yield Recipe("codes of each step", codes, Batching())
    if "audio_mel" in names:
        bins = int(config_value(config, "input_feat_size", default=MELS))

        def mel(g: torch.Generator) -> Sample:
            return {"audio_mel": noise(g, 64, bins), "audio_mel_mask": torch.zeros(64, dtype=torch.bool)}

        yield Recipe("spectrograms and masks", mel, Batching())
    if "is_longer" in names:
        bins = int(config_value(config, "num_mel_bins", default=MELS))
        for length in (64, 256):

            def longer(g: torch.Generator, length: int = length) -> Sample:
                sample: Sample = {"input_ids": words(g, FIXED)} if "input_ids" in names else {}
                return sample | {
                    "input_features": noise(g, 1, length, bins),
                    "is_longer": torch.tensor([True]),
                }

            yield Recipe("spectrograms with a channel", longer, Batching())
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
    if "hidden_states" in names and "pixel_values" not in names:
        hidden = int(config_value(config, "hidden_size", default=HIDDEN))
        for shape in ((16, hidden), (hidden, 16), (1, 640)):
            yield Recipe("hidden states", _drawn("hidden_states", *shape), Batching())


def _rare_language(names: set[str], config: Any, model: nn.Module) -> Iterator[Recipe]:
    """Texts of one length with inputs that few language models take."""
    channels, height, width = image_shape(config)
    text_length = FIXED[0]
    if "image_attention_mask" in names:

        def attended(g: torch.Generator) -> Sample:
            text = words(g, FIXED)
            sample = {"input_ids": text, "labels": text, "pixel_values": noise(g, 1, channels, height, width)}
            return sample | {"image_attention_mask": torch.ones(text_length, 1, dtype=torch.long)}

        yield Recipe("fixed text and attended images", attended, Batching())
    if "input_ids" in names and (books := int(config_value(config, "num_codebooks", default=0))):

        def codes(g: torch.Generator) -> Sample:
            ids = torch.stack([words(g, FIXED) for _ in range(books + 1)], 1)
            return {"input_ids": ids, "labels": ids[:, 0].clone()}

        yield Recipe("a text and codes of each step", codes, Batching())
    if {"state", "actions"} <= names:
        yield from _robot_steps(config, model)
    if "encoder_inputs_embeds" in names and "input_features" in names:
        bins = int(config_value(config, "num_mel_bins", default=MELS))
        heard = _drawn("input_features", 1, bins, 64)
        count = _feature_count(model, "get_audio_features", heard)
        if count is not None:

            def spoken(g: torch.Generator) -> Sample:
                sample = heard(g)
                text = words(g, (count(sample), count(sample) + 1))
                return {"input_ids": text, "labels": text} | sample

            yield Recipe("a word for each frame", spoken, Batching(joined=frozenset({"input_features"})))
    if "qformer_input_ids" in names:
        token = int(config_value(config, "video_token_id", "video_token_index", default=-1))
        queries, frames = int(config.num_query_tokens), 2

        def asked(g: torch.Generator) -> Sample:
            text, query = words(g, FIXED), words(g, FIXED)
            before = torch.full((queries * frames,), token)
            labels = torch.cat([torch.full_like(before, IGNORED), text])
            pixels = noise(g, frames, channels, height, width)
            ids = torch.cat([before, text])
            return {"input_ids": ids, "labels": labels, "qformer_input_ids": query, "pixel_values": pixels}

        if token >= 0:
            yield Recipe("fixed text, question and clips", asked, Batching())


def _robot_steps(config: Any, model: nn.Module) -> Iterator[Recipe]:
    """A text with an image of one camera, a robot's state, and its next actions with noise and time."""
    channels, height, width = image_shape(config)
    token = int(config_value(config, "image_token_id", "image_token_index", default=-1))
    seen = _drawn("pixel_values", 1, channels, height, width)
    towers = [m for m in model.modules() if hasattr(m, "get_image_features")]
    count = _feature_count(towers[-1], "get_image_features", seen) if towers else None
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


def _stacked_spectrograms(names: set[str], config: Any) -> Iterator[Recipe]:
    """Spectrograms with several frames in one, or of a long window, with the mask that the model takes."""
    bins = int(config_value(config, "num_mel_bins", "feature_size", default=MELS))
    mask = next((m for m in ("attention_mask", "input_features_mask") if m in names), "")
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


def _with_labels(
    base: Recipe, label: Callable[[torch.Generator, Sample, Any], Sample], config: Any
) -> Recipe:
    def draw(g: torch.Generator) -> Sample:
        sample = {k: v for k, v in base.draw(g).items() if k != "labels"}
        return sample | label(g, sample, config)

    batching = base.batching
    padded = {k: v for k, v in batching.padded.items() if k != "labels"}
    ragged = label in (_token_labels, _ctc_labels)
    return Recipe(
        base.name,
        draw,
        Batching(
            {**padded, "labels": IGNORED} if ragged else padded | _transducer_padding(label, config),
            batching.joined,
            batching.listed | ({"labels", "mask_labels", "class_labels"} if label in _LISTED else set()),
            batching.masks,
        ),
    )


def _label(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    return {"labels": torch.tensor(integer(g, 0, LABELS))}


def _next_sentence(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    return {"labels": torch.tensor(integer(g, 0, 2))}


def _token_labels(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    first = sample.get("input_ids", next(iter(sample.values())))
    return {"labels": torch.randint(0, LABELS, (len(first),), generator=g)}


def _choice(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    return {"labels": torch.tensor(integer(g, 0, 2))}


def _span(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    length = len(sample["input_ids"])
    start = integer(g, 0, length)
    end = integer(g, start, length)
    return {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}


def _ctc_labels(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    classes = int(config_value(config, "vocab_size", default=WORDS))
    return {"labels": torch.randint(3, min(classes, WORDS), (integer(g, 1, 4),), generator=g)}


def _transducer_labels(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    labels = words(g, (1, 4))
    first = torch.tensor([config.blank_token_id])
    return {"labels": labels, "decoder_input_ids": torch.cat([first, labels])}


def _transducer_padding(label: Any, config: Any) -> dict[str, float]:
    """What labels of a transducer are padded with: a model that predicts durations tells them by its padding
    token, another one by the blank."""
    if label is not _transducer_labels:
        return {}
    end = config.pad_token_id if getattr(config, "durations", None) else config.blank_token_id
    return {"labels": end, "decoder_input_ids": config.blank_token_id}


def _pixel_labels(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    size = sample["pixel_values"].shape[-2:]
    return {"labels": torch.randint(0, LABELS, tuple(size), generator=g)}


def _depth(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    return {"labels": torch.rand(*sample["pixel_values"].shape[-2:], generator=g) + 0.5}


def _objects(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    count = integer(g, 1, 4)
    classes = torch.randint(0, LABELS, (count,), generator=g)
    return {"labels": {"class_labels": classes, "boxes": boxes(g, count)}}


def _segments(g: torch.Generator, sample: Sample, config: Any) -> Sample:
    count, size = integer(g, 1, 3), sample["pixel_values"].shape[-2:]
    masks = (torch.rand(count, *size, generator=g) < 0.5).float()
    return {"mask_labels": masks, "class_labels": torch.randint(0, LABELS, (count,), generator=g)}


_LISTED = (_objects, _segments)
_LABELS: dict[str, Callable[[torch.Generator, Sample, Any], Sample]] = {
    "classes": _label,
    "tokens": _token_labels,
    "choice": _choice,
    "span": _span,
    "sentence": _next_sentence,
    "ctc": _ctc_labels,
    "segmentation": _pixel_labels,
    "depth": _depth,
    "detection": _objects,
    "masks": _segments,
}


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    size = config_value(config, "image_size", "max_img_size", default=IMAGE)
    channels = config_value(config, "num_channels", "in_channels", "in_chans", default=3)
    return int(channels), int(size), int(size)


_HEARD = {"input_features", "input_values"}
_SEEN = {"pixel_values", "image", "pixel_values_videos", *_HEARD}


def _plain_inputs(names: set[str], config: Any, choices: int = 0) -> Iterator[Recipe]:
    """Inputs without labels, by forward's parameters: text, boxes of words, images, clips, sounds."""
    channels, height, _ = image_shape(config)
    masked = {"input_ids": "attention_mask"} if "attention_mask" in names else {}
    if "input_ids" in names and not names & _SEEN:
        yield from _texts(names, config, choices)
        return
    if "input_ids" in names and ("pixel_values" in names or "image" in names):
        key = "pixel_values" if "pixel_values" in names else "image"

        frames = config_value(config, "num_frames")
        clip = (int(frames),) if frames is not None else ()
        for size in dict.fromkeys((height, 64, 128)):

            def pair(g: torch.Generator, size: int = size) -> Sample:
                ids = words(g)
                sample = {"input_ids": ids, key: noise(g, *clip, channels, size, size)}
                if "bbox" in names:
                    corners = torch.randint(0, 50, (len(ids), 2), generator=g)
                    sample["bbox"] = torch.cat([corners, corners + 20], 1)
                return sample

            yield Recipe("text and image", pair, Batching({"input_ids": 0, "bbox": 0}, masks=masked))
        yield from _texts(names, config, choices)
        return
    if {"input_ids", "pixel_values_videos"} <= names and "pixel_values" not in names:
        for seen in _plain_inputs(names - {"input_ids"}, config):
            yield _with_text(seen)
        return
    if "input_ids" in names and names & _HEARD and "pixel_values" not in names:
        for heard in _plain_inputs(names - {"input_ids"}, config):
            yield _with_text(heard)
        return
    yield from _patches_with_grids(names, config)
    if {"pixel_attention_mask", "spatial_shapes"} <= names:
        yield Recipe("images as padded patches", _masked_patches(config), Batching())
    for size in dict.fromkeys((height, 32, 64, 224)):
        if "pixel_values" in names:
            if config_value(config, "num_frames") is not None:
                frames = int(config_value(config, "num_frames"))
                yield Recipe(
                    f"clips of {size}", _drawn("pixel_values", frames, channels, size, size), Batching()
                )
            yield Recipe(f"images of {size}", _drawn("pixel_values", channels, size, size), Batching())
        elif "pixel_values_videos" in names:
            key, frames = "pixel_values_videos", int(config_value(config, "frames_per_clip", default=4))
            yield Recipe(f"clips of {size}", _drawn(key, frames, channels, size, size), Batching())
    if "input_values" in names:
        mels = int(config_value(config, "num_mel_bins", default=0))
        length = int(config_value(config, "max_length", default=64))
        if mels:
            yield Recipe("spectrograms", _drawn("input_values", length, mels), Batching())

        def wave(g: torch.Generator) -> Sample:
            return {"input_values": noise(g, integer(g, 1200, 2000))}

        mask = {"input_values": "attention_mask"} if "attention_mask" in names else {}
        yield Recipe("sounds", wave, Batching({"input_values": 0.0}, masks=mask))
        yield Recipe("sounds of one length", _drawn("input_values", 1600), Batching())
        yield Recipe("sounds with a channel", _drawn("input_values", 1, 1600), Batching())
        if "padding_mask" in names:
            whole = torch.ones(1600, dtype=torch.long)

            def masked_sound(g: torch.Generator) -> Sample:
                return {"input_values": noise(g, 1, 1600), "padding_mask": whole}

            yield Recipe("sounds with a channel and a mask", masked_sound, Batching())
    if "input_features" in names:
        mels = int(
            config_value(
                config,
                "num_mel_bins",
                "feature_projection_input_dim",
                "feature_size",
                "input_dim",
                default=MELS,
            )
        )
        mask = next((m for m in ("attention_mask", "input_features_mask") if m in names), "")
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
    if "past_values" in names:
        length = int(config_value(config, "context_length", default=32))
        inputs = int(config_value(config, "num_input_channels", default=1))
        if "past_time_features" in names:
            yield Recipe("series with features of time", _forecast(config), Batching())
        yield Recipe("series", _drawn("past_values", length, inputs), Batching())
        if {"past_values_padding", "freq"} <= names:
            steps = 2 * int(config_value(config, "patch_length", default=32))

            def padded_series(g: torch.Generator) -> Sample:
                padding = torch.zeros(steps, dtype=torch.long)
                kind = torch.randint(0, 3, (1,), generator=g)
                return {"past_values": noise(g, steps), "past_values_padding": padding, "freq": kind}

            yield Recipe("series of three frequencies", padded_series, Batching())


def _codes(config: Any) -> Draw:
    """Codes of several codebooks, a row for each, and a label for each step and codebook."""

    def codes(g: torch.Generator) -> Sample:
        ids = torch.stack([words(g, FIXED) for _ in range(config.num_codebooks)])
        return {"input_ids": ids, "labels": ids.T.contiguous()}

    return codes


def _forecast(config: Any) -> Draw:
    """A series and what follows it, with features of each time."""
    length = config.context_length + max(config.lags_sequence)

    def series(g: torch.Generator) -> Sample:
        sample: Sample = {}
        for name, count in (("past", length), ("future", config.prediction_length)):
            sample[f"{name}_values"] = noise(g, count)
            sample[f"{name}_time_features"] = noise(g, count, config.num_time_features)
        return sample | {"past_observed_mask": torch.ones(length)}

    return series


def _with_text(base: Recipe) -> Recipe:
    """The inputs of a recipe with a text of one length."""

    def draw(g: torch.Generator) -> Sample:
        return {"input_ids": words(g, FIXED)} | base.draw(g)

    return Recipe(f"fixed text and {base.name}", draw, base.batching)


def _texts(names: set[str], config: Any, choices: int) -> Iterator[Recipe]:
    """Texts, of various lengths or of one, with a token at the end or with three separators; `choices` of one
    length each if that is not 0."""
    masked = {"input_ids": "attention_mask"} if "attention_mask" in names else {}
    separator = int(config_value(config, "sep_token_id", default=END))
    forms = {
        "text": (LENGTHS, []),
        "fixed text": (FIXED, []),
        "text with an end": (LENGTHS, [END]),
        "text with separators": (FIXED if choices else LENGTHS, [separator, separator, 3, separator]),
    }
    for name, (lengths, end) in forms.items():

        def text(g: torch.Generator, lengths: tuple[int, int] = lengths, end: list[int] = end) -> Sample:
            behind = torch.tensor(end, dtype=torch.long)
            ids = torch.cat([words(g, lengths), behind])
            if choices:
                size = len(ids) - len(behind)
                others = (torch.cat([words(g, (size, size + 1)), behind]) for _ in range(choices - 1))
                return {"input_ids": torch.stack([ids, *others])}
            sample: Sample = {"input_ids": ids}
            if "bbox" in names:
                corners = torch.randint(0, 50, (len(ids), 2), generator=g)
                sample["bbox"] = torch.cat([corners, corners + 20], 1)
            return sample

        if not choices:
            yield Recipe(name, text, Batching({"input_ids": 0, "bbox": 0}, masks=masked))
        elif lengths == FIXED:
            yield Recipe(name, text, Batching())


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
    blocks = _image_blocks(config, key, grid)
    yield Recipe("image blocks", blocks, Batching(joined=frozenset({key, grid})))


def _image_blocks(config: Any, key: str, grid: str) -> Draw:
    """Images as one square of pixels, channels last, for each token; grids count tokens."""
    channels = image_shape(config)[0]
    patch = int(config_value(config, "patch_size", default=14))
    merge = int(config_value(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))

    def blocks(g: torch.Generator) -> Sample:
        h, w = integer(g, 1, 3), integer(g, 1, 3)
        return {key: noise(g, h * w, merge * patch, merge * patch, channels), grid: torch.tensor([[1, h, w]])}

    return blocks


def _placed_patches(config: Any, key: str = "image_position_ids") -> Draw:
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


def _drawn(key: str, *shape: int) -> Draw:
    """Samples of one input of normal random numbers."""
    return lambda g: {key: noise(g, *shape)}


def _speech(names: set[str], config: Any) -> Iterator[Recipe]:
    """A sound and its transcript; the decoder shifts the labels."""
    for base in _plain_inputs(names - {"input_ids"}, config):

        def draw(g: torch.Generator, base: Recipe = base) -> Sample:
            return base.draw(g) | {"labels": words(g, (4, 9))}

        batching = Batching({**base.batching.padded, "labels": IGNORED}, masks=base.batching.masks)
        yield Recipe(base.name, draw, batching)


def _language(task: str, names: set[str], config: Any, model: nn.Module) -> Iterator[Recipe]:
    """Texts, with optional images and sounds where the model takes any."""
    masked = {"input_ids": "attention_mask"} if "attention_mask" in names else {}
    padded = {"input_ids": 0, "labels": IGNORED, "token_type_ids": 0, "mm_token_type_ids": 0, "bbox": 0}
    modalities = [[]] if task != "multimodal" else []
    if task in ("causal", "multimodal", "seq2seq") and names & _MODAL:
        modalities = [*_modalities(names, config, model), *modalities]
    for optional in modalities or [[]]:
        full = int(config_value(config, "max_position_embeddings", default=FIXED[0]))
        whole = ((full, full + 1),) if task == "masked" and full <= MOST_WORDS else ()
        for lengths in (LENGTHS, FIXED, *whole):

            def draw(
                g: torch.Generator,
                lengths: tuple[int, int] = lengths,
                optional: list[Modality] = optional,
            ) -> Sample:
                text = words(g, lengths)
                before, types, sample = list[int](), list[int](), Sample()
                for modality in optional:
                    if modality.required or lengths == FIXED or sometimes(g):
                        drawn = modality.draw(g)
                        count = modality.count(drawn)
                        sample |= drawn
                        start, end = modality.around
                        before += [*start, *[modality.token] * count, *end]
                        types += [0] * len(start) + [modality.typed] * count + [0] * len(end)
                ids = torch.cat([torch.tensor(before, dtype=torch.long), text])
                ignored = torch.full((len(before),), IGNORED)
                if task == "seq2seq":
                    labels = words(g, (4, 9))
                else:
                    labels = torch.cat([ignored, text if task != "masked" else labelled_words(g, text, 0.3)])
                sample |= {"input_ids": ids, "labels": labels}
                for key in ("token_type_ids", "mm_token_type_ids"):
                    if optional and key in names:
                        sample[key] = torch.tensor(types + [0] * len(text))
                if "bbox" in names:
                    corners = torch.randint(0, 50, (len(ids), 2), generator=g)
                    sample["bbox"] = torch.cat([corners, corners + 20], 1)
                return sample

            joined = frozenset(k for m in optional for k in m.joined)
            names_of_lengths: dict[tuple[int, int], str] = {LENGTHS: "text", FIXED: "fixed text"}
            text_name = names_of_lengths.get(lengths, "text of full length")
            name = " and ".join([text_name, *(m.name for m in optional)])
            yield Recipe(name, draw, Batching(padded, joined, masks=masked))
            if task == "seq2seq" and "decoder_input_ids" in names:
                both = Batching(padded | {"decoder_input_ids": 0}, joined, masks=masked)
                yield Recipe(f"{name} and decoder text", _with_decoder_text(draw), both)


def _with_decoder_text(draw: Draw) -> Draw:
    """Samples with the labels one step later as the decoder's text, for models that do not shift them."""

    def shifted(g: torch.Generator) -> Sample:
        sample = draw(g)
        return sample | {"decoder_input_ids": torch.cat([torch.tensor([END]), sample["labels"][:-1]])}

    return shifted


_MODAL = {"pixel_values", "input_features", "input_values", "pixel_values_images"}


def _modalities(names: set[str], config: Any, model: nn.Module) -> Iterator[list[Modality]]:
    """Which images and sounds a sample may have, in each of the forms that the names allow."""
    images = [m for m in _image_forms(names, config, model)]
    sounds = [m for m in _sound_forms(names, config, model)]
    for image in images:
        for sound in sounds:
            yield [image, sound]
    for one in (*images, *sounds):
        yield [one]
    if "pixel_values" in names and not images:
        pixels = _drawn("pixel_values", *image_shape(config))
        yield [Modality("an image", pixels, frozenset(), 0, lambda _: 0, required=True)]


def _image_forms(names: set[str], config: Any, model: nn.Module) -> Iterator[Modality]:
    token = config_value(config, "image_token_id", "image_token_index", "image_token")
    if token is None or "pixel_values" not in names:
        return
    channels, height, width = image_shape(config)
    start = config_value(
        config, "vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index"
    )
    end = config_value(config, "vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
    around = ((int(start),) if start is not None else (), (int(end),) if end is not None else ())
    forms: list[tuple[str, Draw]] = []
    if "image_grid_thw" in names:
        patch = int(config_value(config, "patch_size", default=14))
        merge = int(config_value(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))
        for temporal in (int(config_value(config, "temporal_patch_size", default=2)), 1):

            def patches(g: torch.Generator, temporal: int = temporal) -> Sample:
                h, w = merge * integer(g, 1, 3), merge * integer(g, 1, 3)
                pixels = noise(g, h * w, channels * temporal * patch * patch)
                return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, h, w]])}

            forms.append(("image patches", patches))

        def square_patches(g: torch.Generator) -> Sample:
            h, w = merge * integer(g, 1, 3), merge * integer(g, 1, 3)
            pixels = noise(g, h * w, channels, patch, patch)
            return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, h, w]])}

        forms.append(("square image patches", square_patches))
        forms.append(("image blocks", _image_blocks(config, "pixel_values", "image_grid_thw")))
    elif "image_grid_hw" in names:
        patch = int(config_value(config, "patch_size", default=PATCH))

        def flat_patches(g: torch.Generator) -> Sample:
            h, w = 2 * integer(g, 1, 3), 2 * integer(g, 1, 3)
            pixels = noise(g, h * w, channels * patch * patch)
            return {"pixel_values": pixels, "image_grid_hw": torch.tensor([[h, w]])}

        forms.append(("image patches", flat_patches))
    elif "image_position_ids" in names:
        forms.append(("images as padded patches", _placed_patches(config)))
    else:
        extra: Sample = {}
        if "image_sizes" in names:
            extra["image_sizes"] = torch.tensor([[height, width]])
        if "pixel_attention_mask" in names:
            forms.append(
                (
                    "images in samples",
                    lambda g: {
                        "pixel_values": noise(g, 1, 1, channels, height, width),
                        "pixel_attention_mask": torch.ones(1, 1, height, width, dtype=torch.long),
                    },
                )
            )
            forms.append(("masked image tiles", _masked_tiles(channels, height, width)))
        forms.append(("images", lambda g: {"pixel_values": noise(g, 1, channels, height, width)} | extra))
        forms.append(
            ("image tiles", lambda g: {"pixel_values": noise(g, 1, 2, channels, height, width)} | extra)
        )
        forms.append(
            ("clips, channels last", lambda g: {"pixel_values": noise(g, 1, 2, height, width, channels)})
        )
    for name, draw in forms:
        count = _feature_count(model, "get_image_features", draw)
        if count is not None:
            keys = frozenset(draw(torch.Generator().manual_seed(0)))
            yield Modality(name, draw, keys, int(token), count, around)


def _masked_tiles(channels: int, height: int, width: int) -> Draw:
    """Images of one or two tiles, padded to two, and which tiles there are."""

    def tiles(g: torch.Generator) -> Sample:
        mask = torch.arange(2)[None] < integer(g, 1, 3)
        return {
            "pixel_values": noise(g, 1, 2, channels, height, width) * mask[..., None, None, None],
            "pixel_attention_mask": mask,
        }

    return tiles


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

        count = _feature_count(model, "get_audio_features", sound)
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


def _feature_count(model: nn.Module, method: str, draw: Draw) -> Callable[[Sample], int] | None:
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
            listed = features if isinstance(features, list | tuple) else [features]
            known[key] = sum(math.prod(f.shape[:-1]) for f in listed)
        return known[key]

    try:
        count(draw(torch.Generator().manual_seed(0)))
    except Exception:  # not a form that this model takes
        return None
    return count


def expected_tokens(message: str) -> list[int]:
    """Numbers in an error about placeholders and features that do not match."""
    return [int(n) for n in re.findall(r"\d+", message)]
