"""Random samples in the forms that multimodal models take: ragged text, with placeholder tokens where images,
clips or sounds go.

Every builder draws from the generator it is given and from nothing else, so that a sample is the same
wherever it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

Sample = dict[str, Any]

WORDS = 100  # ordinary tokens are 3 ... WORDS - 1
VOCABULARY = 120
IMAGE, VIDEO, AUDIO, START, END = 119, 118, 117, 116, 115
IGNORED = -100


def integer(g: torch.Generator, low: int, high: int) -> int:
    """A random integer, low <= n < high."""
    return int(torch.randint(low, high, (), generator=g))


def chance(g: torch.Generator, share: float = 0.5) -> bool:
    """True for `share` of the draws."""
    return torch.rand((), generator=g).item() < share


def words(g: torch.Generator, shortest: int = 5, longest: int = 18) -> torch.Tensor:
    """A text of random length, 1-D."""
    return torch.randint(3, WORDS, (integer(g, shortest, longest),), generator=g)


def after(placeholders: torch.Tensor | Sequence[int], text: torch.Tensor) -> Sample:
    """`input_ids` and `labels` of a text behind placeholders, which carry no label."""
    before = torch.as_tensor(placeholders, dtype=torch.long)
    return {
        "input_ids": torch.cat([before, text]),
        "labels": torch.cat([torch.full_like(before, IGNORED), text]),
    }


def blanks(count: int, token: int = IMAGE) -> torch.Tensor:
    """`count` placeholder tokens."""
    return torch.full((count,), token)


def pictures(
    tokens: int, size: int = 32, most: int = 1, share: float = 0.5, token: int = IMAGE
) -> Callable[[torch.Generator], Sample]:
    """Texts of which `share` have up to `most` square images of `size` pixels, each with `tokens`
    placeholders before the text."""

    def make(g: torch.Generator) -> Sample:
        count = integer(g, 1, most + 1) if chance(g, share) else 0
        sample = after(blanks(tokens * count, token), words(g))
        if count:
            sample["pixel_values"] = torch.randn(count, 3, size, size, generator=g)
        return sample

    return make


def text_only(g: torch.Generator) -> Sample:
    """A text that is its own label."""
    return after([], words(g, 5, 24))


def padded(samples: Sequence[Sample], keys: dict[str, int], mask: str = "") -> Sample:
    """1-D keys padded on the right with their values; with `mask`, that key says which positions of the first
    key are real."""
    batch = {
        k: pad_sequence([s[k] for s in samples], batch_first=True, padding_value=v) for k, v in keys.items()
    }
    if mask:
        first = next(iter(keys))
        batch[mask] = pad_sequence([torch.ones_like(s[first]) for s in samples], batch_first=True)
    return batch


def joined(samples: Sequence[Sample], keys: Sequence[str]) -> Sample:
    """Keys whose rows stand one after another, of the samples that have them."""
    return {k: torch.cat(found) for k in keys if (found := [s[k] for s in samples if k in s])}
