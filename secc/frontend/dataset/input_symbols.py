"""Describes the inputs of a model by symbols: each dim of each key is constant, a number of rows, or a padded
width.

The user declares nothing: batches of `collate` over many sets of samples are compared with the same
samples collated alone. A dim that never changes is constant, one that adds up over the samples counts
*rows* (`B` if it is the number of samples), and one that is the maximum over the samples is a *width*. Any
other dim cannot be cut into micro-batches and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secc.errors import UserError
from secc.frontend.dataset.dim_rules import DimRules, ShapeObservation, explain_dims
from secc.frontend.dataset.padding_rules import find_pads
from secc.frontend.dataset.survey import DatasetSurvey, Sample
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan import schema

LABELS_KEY = "labels"
IGNORED_LABEL = -100
_ROUNDING = 1e-5  # relative; of a sum of floats that collate makes


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model.

    symbols: `B` first. inputs: the tensors of a batch. labels_key: the key with labels, where entries other
    than -100 count as tokens, "" without labels. sample_sizes, sample_patterns: symbol values and pattern of
    each known sample (the survey's, in order, unless the model file's `sizes(i)` gives more).
    largest_samples: pattern and symbol values of larger ones, which memory must have room for.
    given_statistics: from a file, (pattern, share of the samples, mean of each symbol). summed: keys of
    numbers that add up over samples, such as a number of labels that collate counts.
    """

    symbols: tuple[schema.Symbol, ...]
    inputs: tuple[schema.Input, ...]
    labels_key: str
    sample_sizes: tuple[Mapping[str, int], ...]
    sample_patterns: tuple[frozenset[str], ...]
    given_statistics: tuple[tuple[frozenset[str], float, tuple[tuple[str, float], ...]], ...] = ()
    largest_samples: tuple[tuple[frozenset[str], Mapping[str, int]], ...] = ()
    summed: frozenset[str] = frozenset()


def describe_inputs(user: UserModel, survey: DatasetSurvey) -> ModelInputs:
    """Finds symbols and inputs of the model from the survey's samples and micro-batches.

    Raises UserError, naming key and dim, for values that change and are no tensors, for dims that follow
    no rule, and for a collate that does not keep its samples in order.
    """
    where = (
        user.function_source_line("collate")
        if user.defines("collate")
        else user.function_source_line("dataset")
    )
    batches = [
        batch for pattern in survey.micro_batch_patterns() for batch in survey.compose_batches(pattern)
    ]
    values = _BatchValues(where)
    observations = [
        ShapeObservation(
            values.check_and_get_shapes(b), tuple(values.check_and_get_shapes(s) for s in singles)
        )
        for b, singles in _collate_batches(user.collate_shapes, batches)
    ]
    tensors = values.dtypes
    for d in survey.drawn_samples:
        shapes = {key: shape for key, shape in d.shapes.items() if key in tensors}
        observations.append(ShapeObservation(shapes, (shapes,)))
    extents = explain_dims(
        observations, [key for key, dtype in tensors.items() if not dtype.is_floating_point], where
    )
    pads = find_pads(extents, _collate_batches(user.collate, batches), where)
    inputs = tuple(
        schema.Input(
            key, _type_name(dtype), extents.dims_of(key), key in survey.optional_keys, pads.get(key, ())
        )
        for key, dtype in tensors.items()
    )
    sizes = tuple(_symbol_sizes(extents, d.shapes) for d in survey.drawn_samples)
    return ModelInputs(
        tuple(extents.symbols),
        inputs,
        _labels_key(inputs),
        sizes,
        tuple(d.pattern for d in survey.drawn_samples),
        summed=_find_summed(user, batches, [i.key for i in inputs if not i.dims]),
    )


def _find_summed(
    user: UserModel, batches: Sequence[Sequence[Sample]], numbers: Collection[str]
) -> frozenset[str]:
    """Returns which of these keys, tensors without dims, hold for every batch the sum of what they hold for
    its samples alone, and not one value for all batches."""
    found = set(numbers)
    values = {key: set[float]() for key in numbers}
    for batch, singles in _collate_batches(user.collate, batches) if found else ():
        for key in [k for k in found if k in batch]:
            total = float(batch[key])
            values[key].add(total)
            if abs(total - sum(float(s[key]) for s in singles if key in s)) > _ROUNDING * abs(total):
                found.discard(key)
    return frozenset(key for key in found if len(values[key]) > 1)


def _labels_key(inputs: Sequence[schema.Input]) -> str:
    """Returns `labels`, or else the first key that collate pads with the index that losses ignore; "" for
    none."""
    if any(i.key == LABELS_KEY for i in inputs):
        return LABELS_KEY
    return next((i.key for i in inputs if any(value == IGNORED_LABEL for _, _, value in i.pads)), "")


class _BatchValues:
    """Dtypes of a batch's tensors, and its other values. These must never change, but for integers: a number
    of samples or a padded length is explained by sizes wherever forward uses it."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.dtypes: dict[str, torch.dtype] = {}
        self.constants: dict[str, Any] = {}

    def check_and_get_shapes(self, batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a batch's tensors. Raises UserError if a dtype or a value that is no
        tensor differs from earlier batches."""
        for key, value in batch.items():
            known: dict[str, Any] = self.dtypes if isinstance(value, torch.Tensor) else self.constants
            current = value.dtype if isinstance(value, torch.Tensor) else value
            if (key in self.dtypes or key in self.constants) and (
                key not in known or not _is_same_value(known[key], current)
            ):
                previous = _type_name(self.dtypes[key] if key in self.dtypes else self.constants[key])
                change = (
                    f"is {previous} in one batch and {_type_name(current)} in another"
                    if previous != _type_name(current)
                    else "changes and is no tensor"
                )
                raise UserError(
                    f"{key!r} {change}",
                    self.where,
                    "let collate() make it a tensor of one dtype, or leave it out",
                )
            known[key] = current
        return {key: tuple(value.shape) for key, value in batch.items() if isinstance(value, torch.Tensor)}


def _is_same_value(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (type(a) is int or bool(a == b))


def _collate_batches(
    collate: Callable[[Sequence[Sample]], dict[str, Any]], batches: Sequence[Sequence[Sample]]
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yields each batch collated and its samples collated alone; one batch at a time, since images take
    memory."""
    for samples in batches:
        yield collate(samples), [collate([s]) for s in samples]


def _symbol_sizes(extents: DimRules, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the symbol values of one sample; a symbol without a key is the number of samples, 1."""
    return {s.name: (shapes[s.key][s.dim] if s.key in shapes else 0) if s.key else 1 for s in extents.symbols}


def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else type(dtype).__name__
