"""The inputs of a model, described by symbols: which dim of which key is a constant, a number of rows, or a
padded width.

Nothing is asked of the user: the batches of `collate` over many sets of samples are compared with those of
the single samples. A dim that never moves is a constant, one that adds up over the samples counts *rows* (`B`
if it is the number of samples), one that is the largest of the samples is a *width*. What fits none of these
cannot be cut into micro-batches, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secc.errors import UserError
from secc.frontend.dataset.dim_rules import Extents, Observation, explain
from secc.frontend.dataset.padding_rules import find_pads
from secc.frontend.dataset.survey import Sample, Survey
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan import schema

LABELS = "labels"
IGNORED = -100


@dataclass(frozen=True)
class Inputs:
    """The symbols, `B` first, the tensors of a batch, and the key whose entries other than -100 count as
    tokens ("" without labels).

    `sizes` are the symbols of each sample that is known (of the survey, in its order, unless `sizes(i)` tells
    of more), `patterns` their patterns. `given` are the statistics of a file: (pattern, share of the samples,
    mean of each symbol).
    """

    symbols: tuple[schema.Symbol, ...]
    inputs: tuple[schema.Input, ...]
    labels_key: str
    sizes: tuple[Mapping[str, int], ...]
    patterns: tuple[frozenset[str], ...]
    given: tuple[tuple[frozenset[str], float, tuple[tuple[str, float], ...]], ...] = ()


def describe(user: UserModel, survey: Survey) -> Inputs:
    """Symbols and inputs of the model, from the survey's samples and micro-batches.

    Raises UserError, naming key and dim, for values that are not tensors but change, for dims that follow no
    rule, and for a collate that does not keep its samples in order.
    """
    where = user.place("collate") if user.has("collate") else user.place("dataset")
    batches = [batch for pattern in survey.unions() for batch in survey.batches(pattern)]
    values = _Values(where)
    observations = [
        Observation(values.shapes(b), tuple(values.shapes(s) for s in singles))
        for b, singles in _collated(user, batches)
    ]
    tensors = values.dtypes
    for d in survey.drawn:
        shapes = {key: shape for key, shape in d.shapes.items() if key in tensors}
        observations.append(Observation(shapes, (shapes,)))
    extents = explain(
        observations, [key for key, dtype in tensors.items() if not dtype.is_floating_point], where
    )
    pads = find_pads(extents, _collated(user, batches), where)
    inputs = tuple(
        schema.Input(key, _name(dtype), extents.dims_of(key), key in survey.optional, pads.get(key, ()))
        for key, dtype in tensors.items()
    )
    sizes = tuple(_sizes(extents, d.shapes) for d in survey.drawn)
    return Inputs(
        tuple(extents.symbols), inputs, _labels_key(inputs), sizes, tuple(d.pattern for d in survey.drawn)
    )


def _labels_key(inputs: Sequence[schema.Input]) -> str:
    """`labels`, else the first key that collate pads with the index that losses ignore."""
    if any(i.key == LABELS for i in inputs):
        return LABELS
    return next((i.key for i in inputs if any(value == IGNORED for _, _, value in i.pads)), "")


class _Values:
    """The dtypes of a batch's tensors, and what else batches hold, which must never change."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.dtypes: dict[str, torch.dtype] = {}
        self.constants: dict[str, Any] = {}

    def shapes(self, batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of a batch's tensors. Raises UserError for a change of dtype or of a value that is no
        tensor."""
        for key, value in batch.items():
            known: dict[str, Any] = self.dtypes if isinstance(value, torch.Tensor) else self.constants
            now = value.dtype if isinstance(value, torch.Tensor) else value
            if (key in self.dtypes or key in self.constants) and (
                key not in known or not _equal(known[key], now)
            ):
                was = _name(self.dtypes[key] if key in self.dtypes else self.constants[key])
                what = (
                    f"is {was} in one batch and {_name(now)} in another"
                    if was != _name(now)
                    else "changes and is no tensor"
                )
                raise UserError(
                    f"{key!r} {what}",
                    self.where,
                    "let collate() make it a tensor of one dtype, or leave it out",
                )
            known[key] = now
        return {key: tuple(value.shape) for key, value in batch.items() if isinstance(value, torch.Tensor)}


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _collated(
    user: UserModel, batches: Sequence[Sequence[Sample]]
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each batch collated, and its samples collated alone, one batch at a time, since images take memory."""
    for samples in batches:
        yield user.collate(samples), [user.collate([s]) for s in samples]


def _sizes(extents: Extents, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The symbols of one sample; a symbol without a key is the number of samples, 1."""
    return {s.name: (shapes[s.key][s.dim] if s.key in shapes else 0) if s.key else 1 for s in extents.symbols}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else type(dtype).__name__
