"""A small vision-language model that learns to caption handwritten digits, and the language of Python's
manual.

The images are scikit-learn's bundled digits, the texts the standard library's `pydoc_data.topics`; bytes are
tokens, nothing is downloaded. About half of the samples have an image, so the vision tower has work for half
of a batch only: that is what secc plans for. Train it with

    secc compile examples/vlm_digits.py -o plan_digits/
    secc run plan_digits/ --steps 400 --save runs/digits
    secc export runs/digits -o runs/digits.safetensors
    python examples/eval_digits.py runs/digits.safetensors
"""

from __future__ import annotations

import random
from functools import cache
from importlib.metadata import distribution
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import transformers as T
from torch import nn
from torch.utils.data import Dataset

IMAGE, END, VOCABULARY = (
    256,
    257,
    260,
)  # in addition to the 256 bytes: an image's placeholder, the end of a caption; 0 pads
SIDE, PATCH = 16, 4
PATCHES = (SIDE // PATCH) ** 2
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 5  # every fifth digit is never trained on


def model() -> nn.Module:
    vision = T.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        num_channels=1,
        initializer_range=0.08,
    )
    text = T.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.08,  # the usual 0.02 suits widths of thousands
        use_cache=False,
    )
    config = T.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return T.LlavaForConditionalGeneration(config)


@cache
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """All digits as [n, 1, SIDE, SIDE] in [-1, 1], and their values [n]."""
    # The file of sklearn.datasets.load_digits: importing sklearn takes a second, in every process.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(str(file), np.int64, delimiter=","))  # 8x8 pixels up to 16, the value
    small = rows[:, :-1].float().unflatten(1, (1, 8, 8)) / 8 - 1
    return nn.functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear"), rows[:, -1]


@cache
def manual() -> bytes:
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def prompt() -> torch.Tensor:
    """What comes before every caption."""
    return torch.tensor([IMAGE] * PATCHES + list(b"A handwritten "))


def caption(value: int) -> torch.Tensor:
    return torch.tensor([*NAMES[value].encode(), END])


class Captions(Dataset):
    """Sample i is a digit with its caption or a piece of text, decided by i alone."""

    def __init__(self, size: int = 16384) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Any]:
        choice = random.Random(i)
        return self.digit(choice) if choice.random() < 0.5 else self.text(choice)

    def digit(self, choice: random.Random) -> dict[str, Any]:
        images, values = pictures()
        j = choice.randrange(len(values))
        while j % HELD_OUT == 0:
            j = choice.randrange(len(values))
        before, after = prompt(), caption(int(values[j]))
        labels = torch.cat([torch.full_like(before, -100), after])
        return {"input_ids": torch.cat([before, after]), "labels": labels, "pixel_values": images[j : j + 1]}

    def text(self, choice: random.Random) -> dict[str, Any]:
        length = choice.randrange(16, 64)
        start = choice.randrange(len(manual()) - length)
        ids = torch.tensor(list(manual()[start : start + length]))
        return {"input_ids": ids, "labels": ids.clone()}


def dataset() -> Dataset:
    return Captions()


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95))


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """A short warm-up, then constant, then falling with the square root of the step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1.0, (200 / (step + 1)) ** 0.5)
    )
