"""Labels of a task for samples that have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tools.census.batches import WORDS, boxes, words
from tools.census.recipes.recipe import Recipe, config_value
from tools.census.small_configs import LABELS
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import IGNORED, integer

Label = Callable[[torch.Generator, Sample, Any], Sample]  # the labels of a sample, by the configuration


def label_of(task: str, names: set[str]) -> Label | None:
    """How samples of a task are labelled for a model with these inputs; None if the task's samples have
    labels already."""
    if task == "ctc" and "decoder_input_ids" in names:
        return _transducer_labels
    if task == "span" and "start_positions" not in names:
        return _label
    return _LABELS.get(task)


def with_labels(base: Recipe, label: Label, config: Any) -> Recipe:
    """The samples of a recipe with labels of a task in place of their own."""

    def draw(g: torch.Generator) -> Sample:
        sample = {k: v for k, v in base.draw(g).items() if k != "labels"}
        return sample | label(g, sample, config)

    batching = base.batching
    padded = {k: v for k, v in batching.padded.items() if k != "labels"}
    ragged = label in (_token_labels, _ctc_labels)
    return Recipe(
        base.name,
        draw,
        replace(
            batching,
            padded={**padded, "labels": IGNORED} if ragged else padded | _transducer_padding(label, config),
            listed=batching.listed | (_LISTED_KEYS if label in _LISTED else frozenset()),
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
    seen = sample.get("pixel_values", sample.get("pixel_values_videos"))
    assert isinstance(seen, torch.Tensor)
    count, size = integer(g, 1, 3), seen.shape[-2:]
    masks = (torch.rand(count, *size, generator=g) < 0.5).float()
    return {"mask_labels": masks, "class_labels": torch.randint(0, LABELS, (count,), generator=g)}


_LISTED, _LISTED_KEYS = (_objects, _segments), frozenset({"labels", "mask_labels", "class_labels"})
_LABELS: dict[str, Label] = {
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
