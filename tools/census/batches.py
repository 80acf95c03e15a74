"""Random samples for any model, from the names that its forward takes.

A recipe says how one input is drawn and joined into batches: texts are ragged, every second sample has its
optional image or sound, and special tokens stand where features go, as many as the model's own
`get_image_features` gives. Models of one input in several forms are tried in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import IGNORED, chance, integer

FIRST_WORD, WORDS = 3, 100
LENGTHS = (5, 18)  # of a text


@dataclass(frozen=True)
class Batching:
    """How samples become a batch: 1-D keys in `padded` (with their value) are padded on the right, keys in
    `joined` are concatenated along dim 0, in `lined_up` along the last dim, keys in `listed` stay lists, all
    others are stacked. `masks` gives the padding mask of a padded key. A joined key in `places` counts rows
    of another one, its first two dims taken together; -1 is no place. Keys that a sample lacks are
    optional."""

    padded: Mapping[str, float] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    lined_up: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()
    masks: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def collate(self, samples: Sequence[Sample]) -> Sample:
        """The batch of `samples`."""
        batch = dict[str, Any]()
        for key in dict.fromkeys(k for s in samples for k in s):
            values = [s[key] for s in samples if key in s]
            if key in self.padded:
                batch[key] = pad_sequence(values, batch_first=True, padding_value=self.padded[key])
            elif key in self.places:
                counts = [s[self.places[key]].flatten(0, 1).shape[0] for s in samples if key in s]
                batch[key] = torch.cat(_shifted(values, counts))
            elif key in self.joined:
                batch[key] = _concatenate(values)
            elif key in self.lined_up:
                batch[key] = torch.cat(values, -1)
            elif key in self.listed:
                batch[key] = values
            else:
                batch[key] = torch.stack(values)
            if key in self.masks:
                ones = [torch.ones(len(v), dtype=torch.long) for v in values]
                batch[self.masks[key]] = pad_sequence(ones, batch_first=True)
        return batch


def _shifted(values: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Places among the rows of a sample as places among those of the batch."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [torch.where(v >= 0, v + start, v) for v, start in zip(values, starts, strict=True)]


def _concatenate(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates along dim 0, on a canvas as large as the largest in the other dims."""
    largest = [max(v.shape[d] for v in values) for d in range(1, values[0].dim())]
    if all(list(v.shape[1:]) == largest for v in values):
        return torch.cat(list(values))
    out = values[0].new_zeros(sum(len(v) for v in values), *largest)
    start = 0
    for v in values:
        out[(slice(start, start + len(v)), *(slice(0, n) for n in v.shape[1:]))] = v
        start += len(v)
    return out


Draw = Callable[[torch.Generator], Sample]


def words(g: torch.Generator, lengths: tuple[int, int] = LENGTHS) -> torch.Tensor:
    """A text of random length, `lengths[0] <= n < lengths[1]`."""
    return torch.randint(FIRST_WORD, WORDS, (integer(g, *lengths),), generator=g)


def labelled_words(g: torch.Generator, text: torch.Tensor, share: float) -> torch.Tensor:
    """Labels of a text: `share` of the words are labelled, at least one."""
    kept = torch.rand(len(text), generator=g) < share
    kept[integer(g, 0, len(text))] = True
    return torch.where(kept, text, torch.full_like(text, IGNORED))


def noise(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal random numbers."""
    return torch.randn(*shape, generator=g)


def boxes(g: torch.Generator, count: int) -> torch.Tensor:
    """`count` boxes (center x, center y, width, height) inside the unit square."""
    return 0.2 + 0.3 * torch.rand(count, 4, generator=g)


def sometimes(g: torch.Generator) -> bool:
    """Whether a sample has an optional input."""
    return chance(g, 0.5)
