"""Texts of language models, with optional images and sounds where the model takes any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tools.census.batches import LENGTHS, Batching, Draw, labelled_words, sometimes, words
from tools.census.recipes.modalities import MODAL, Modality, modalities
from tools.census.recipes.recipe import END, FIXED, Recipe, config_value
from tools.census.recipes.texts import text_masks, word_boxes
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import IGNORED

MOST_WORDS = 128  # of a text as long as a model takes
_PADDED = {"input_ids": 0, "labels": IGNORED, "token_type_ids": 0, "mm_token_type_ids": 0, "bbox": 0}


def language(task: str, names: set[str], config: Any, model: nn.Module) -> Iterator[Recipe]:
    """Texts of various lengths, of one, or as long as the model takes, with each choice of modalities."""
    choices = [[]] if task != "multimodal" else []
    if task in ("causal", "multimodal", "seq2seq") and names & MODAL:
        choices = [*modalities(names, config, model), *choices]
    for optional in choices or [[]]:
        full = int(config_value(config, "max_position_embeddings", default=FIXED[0]))
        whole = ((full, full + 1),) if task == "masked" and full <= MOST_WORDS else ()
        for lengths in (LENGTHS, FIXED, *whole):
            draw = _text(task, names, lengths, optional)
            joined = frozenset(k for m in optional for k in m.joined)
            names_of_lengths: dict[tuple[int, int], str] = {LENGTHS: "text", FIXED: "fixed text"}
            text_name = names_of_lengths.get(lengths, "text of full length")
            name = " and ".join([text_name, *(m.name for m in optional)])
            yield Recipe(name, draw, Batching(_PADDED, joined, masks=text_masks(names)))
            if task == "seq2seq" and "decoder_input_ids" in names:
                both = Batching(_PADDED | {"decoder_input_ids": 0}, joined, masks=text_masks(names))
                yield Recipe(f"{name} and decoder text", _with_decoder_text(draw), both)


def _text(task: str, names: set[str], lengths: tuple[int, int], optional: Sequence[Modality]) -> Draw:
    """A labelled text; before it the tokens of the images and sounds that a sample has."""

    def draw(g: torch.Generator) -> Sample:
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
            sample["bbox"] = word_boxes(g, len(ids))
        return sample

    return draw


def _with_decoder_text(draw: Draw) -> Draw:
    """Samples with the labels one step later as the decoder's text, for models that do not shift them."""

    def shifted(g: torch.Generator) -> Sample:
        sample = draw(g)
        return sample | {"decoder_input_ids": torch.cat([torch.tensor([END]), sample["labels"][:-1]])}

    return shifted
