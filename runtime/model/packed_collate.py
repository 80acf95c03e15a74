"""Collates samples side by side in one row, without padding, for model files that define no `collate`.

`input_ids`, and every other key with one entry for each token, become [1, tokens of all samples].
`position_ids` start at 0 in each sample: transformers limits attention to samples by them if there is no
`attention_mask`. The first label of each sample is ignored, as it is in a padded batch of a model that
predicts the next token. Other keys are collated as `DefaultCollate` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from secc.runtime.errors import UserError
from secc.runtime.model.default_collate import (
    MASK_KEY,
    TEXT_KEY,
    WRITE_COLLATE_REMEDY,
    DefaultCollate,
    Sample,
    value_to_tensor,
)
from secc.runtime.plan import schema

POSITIONS_KEY = "position_ids"
LABELS_KEY = "labels"
IGNORED_LABEL = -100
_ONE_ROW = "1"  # the first dim of a packed input in plan.json


class PackedCollate(DefaultCollate):
    """Collates samples by one fixed rule per key: `packed` keys side by side, others by their number of dims
    in a batch."""

    def __init__(self, ndims: Mapping[str, int], packed: Collection[str]) -> None:
        super().__init__(ndims, mask=False)
        self._packed = frozenset(packed)

    @classmethod
    def fit(cls, samples: Sequence[Sample], forward_names: Collection[str]) -> PackedCollate:
        """Choose the rules from samples that represent the dataset. Raises UserError if a sample has no text,
        or forward names no `position_ids`."""
        if POSITIONS_KEY not in forward_names:
            raise UserError(
                f"samples cannot be packed: forward takes no {POSITIONS_KEY}, which say where each begins",
                remedy=f"add the argument {POSITIONS_KEY} to forward and give it to the decoder, or leave"
                " --pack out",
            )
        shapes = [
            {key: tuple(value_to_tensor(key, value).shape) for key, value in sample.items()}
            for sample in samples
        ]
        if any(len(shape.get(TEXT_KEY, ())) != 1 for shape in shapes):
            raise UserError(
                f"samples cannot be packed: not all of them have {TEXT_KEY} with one entry for each token",
                remedy="leave --pack out",
            )
        keys = {key for shape in shapes for key in shape}
        packed = {key for key in keys if all(s.get(key, s[TEXT_KEY]) == s[TEXT_KEY] for s in shapes)}
        return cls(DefaultCollate.fit(samples, forward_names).ndims, packed | {POSITIONS_KEY, MASK_KEY})

    @classmethod
    def from_inputs(cls, inputs: Iterable[schema.Input]) -> PackedCollate:
        """Take the rules from a plan's inputs."""
        dims = {i.key: i.dims for i in inputs}
        packed = {key for key, sizes in dims.items() if len(sizes) == 2 and sizes[0] == _ONE_ROW}
        return cls({key: len(sizes) for key, sizes in dims.items()}, packed | {MASK_KEY})

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate `samples` (at least one) in their order. Raises UserError for a sample that has padding of
        its own, and as `DefaultCollate` does."""
        batch = super().__call__([{k: v for k, v in s.items() if k not in self._packed} for s in samples])
        rows = [{k: value_to_tensor(k, v) for k, v in s.items() if k in self._packed} for s in samples]
        for row in rows:
            length = len(row[TEXT_KEY])
            if not bool(row.pop(MASK_KEY, torch.ones(1)).all()):
                raise UserError(f"a sample has padding in its {MASK_KEY}", remedy="leave --pack out")
            for key, value in row.items():
                if value.shape != (length,):
                    message = f"a sample has {length} {TEXT_KEY}, but {key} of shape {list(value.shape)}"
                    raise UserError(message, remedy=WRITE_COLLATE_REMEDY)
            row.setdefault(POSITIONS_KEY, torch.arange(length))
            if LABELS_KEY in row:
                row[LABELS_KEY] = row[LABELS_KEY].clone()
                row[LABELS_KEY][:1] = IGNORED_LABEL
        return batch | {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}


def is_packed(inputs: Iterable[schema.Input]) -> bool:
    """Return whether a plan's samples lie side by side in one row."""
    return any(i.key == TEXT_KEY and len(i.dims) == 2 and i.dims[0] == _ONE_ROW for i in inputs)
