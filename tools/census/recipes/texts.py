"""Texts, codes of several codebooks, and texts with one image or another input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tools.census.batches import LENGTHS, Batching, Draw, noise, words
from tools.census.recipes.images import image_shape
from tools.census.recipes.recipe import END, FIXED, Recipe, config_value
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import integer


def text_masks(names: set[str]) -> dict[str, str]:
    """The mask of padded texts, if the model takes one."""
    return {"input_ids": "attention_mask"} if "attention_mask" in names else {}


def texts(names: set[str], config: Any, choices: int) -> Iterator[Recipe]:
    """Texts, of various lengths or of one, with a token at the end or with three separators; `choices` of one
    length each if that is not 0."""
    masked = text_masks(names)
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
                sample["bbox"] = word_boxes(g, len(ids))
            return sample

        if not choices:
            yield Recipe(name, text, Batching({"input_ids": 0, "bbox": 0}, masks=masked))
        elif lengths == FIXED:
            yield Recipe(name, text, Batching())


def word_boxes(g: torch.Generator, count: int) -> torch.Tensor:
    """A box on the page (left, top, right, bottom) for each of `count` words."""
    corners = torch.randint(0, 50, (count, 2), generator=g)
    return torch.cat([corners, corners + 20], 1)


def texts_with_image(names: set[str], config: Any) -> Iterator[Recipe]:
    """A text and an image or a clip, of three sizes."""
    key = "pixel_values" if "pixel_values" in names else "image"
    channels, height, _ = image_shape(config)
    frames = config_value(config, "num_frames")
    clip = (int(frames),) if frames is not None else ()
    for size in dict.fromkeys((height, 64, 128)):

        def pair(g: torch.Generator, size: int = size) -> Sample:
            ids = words(g)
            sample = {"input_ids": ids, key: noise(g, *clip, channels, size, size)}
            if "bbox" in names:
                sample["bbox"] = word_boxes(g, len(ids))
            return sample

        yield Recipe("text and image", pair, Batching({"input_ids": 0, "bbox": 0}, masks=text_masks(names)))


def with_text(base: Recipe) -> Recipe:
    """The inputs of a recipe with a text of one length."""

    def draw(g: torch.Generator) -> Sample:
        return {"input_ids": words(g, FIXED)} | base.draw(g)

    return Recipe(f"fixed text and {base.name}", draw, base.batching)


def named_classes(config: Any) -> Recipe:
    """An image, a task as a text, and one to three classes to find as texts of one length."""
    channels, height, width = image_shape(config)

    def named(g: torch.Generator) -> Sample:
        count = integer(g, 1, 4)
        classes = torch.stack([words(g, FIXED) for _ in range(count)])
        return {
            "pixel_values": noise(g, channels, height, width),
            "classes_input_ids": classes,
            "classes_attention_mask": torch.ones_like(classes),
            "tasks_input_ids": words(g, FIXED),
            "tasks_attention_mask": torch.ones(FIXED[0], dtype=torch.long),
            "classes_structure": torch.tensor(count),
        }

    joined = frozenset({"classes_input_ids", "classes_attention_mask"})
    return Recipe("images, tasks and classes", named, Batching(joined=joined))


def labelled_codes(config: Any) -> Draw:
    """Codes of several codebooks, a row for each, and a label for each step and codebook."""

    def codes(g: torch.Generator) -> Sample:
        ids = torch.stack([words(g, FIXED) for _ in range(config.num_codebooks)])
        return {"input_ids": ids, "labels": ids.T.contiguous()}

    return codes


def codes_of_steps(names: set[str], config: Any) -> Iterator[Recipe]:
    """Codes of several codebooks, a row for each step."""
    books = int(config_value(config, "num_codebooks", default=0))
    if "input_ids" not in names or not books:
        return
    for count in (books, books + 1):

        def codes(g: torch.Generator, count: int = count) -> Sample:
            return {"input_ids": torch.stack([words(g, FIXED) for _ in range(count)], 1)}

        yield Recipe("codes of each step", codes, Batching())
