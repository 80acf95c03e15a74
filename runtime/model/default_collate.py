"""The collate function of models that bring none: samples to forward's keyword arguments, samples in order.

What to do with a key must not depend on which samples happen to share a micro-batch: two images of equal size
in a micro-batch of two must be treated as in the global batch. So the decision is made once, from many
samples or from the plan's inputs, and its whole content is the number of dims that each key has in a batch:
one more than in a sample means *stack* (1-D: pad to the longest first), as many means *concatenate along dim
0*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from secc.runtime.errors import UserError
from secc.runtime.plan import schema

Sample = Mapping[str, Any]

TEXT_KEY = "input_ids"
MASK_KEY = "attention_mask"
WRITE_COLLATE_REMEDY = "write `collate(samples) -> dict` in the model file"


class DefaultCollate:
    """Samples to a batch by fixed rules for each key.

    `ndims` is the number of dims of each key in a batch; keys it lacks are treated as inputs that only some
    samples have. `mask` says whether an `attention_mask` of the padding of `input_ids` is added where no
    sample brings one.
    """

    def __init__(self, ndims: Mapping[str, int], mask: bool) -> None:
        self.ndims, self.adds_mask = dict(ndims), mask

    @classmethod
    def fit(cls, samples: Sequence[Sample], forward_names: Collection[str]) -> DefaultCollate:
        """The rules that suit `samples`; `forward_names` are the arguments that forward names."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for sample in samples:
            for key, value in sample.items():
                if not _is_text(value):
                    shapes.setdefault(key, []).append(tuple(value_to_tensor(key, value).shape))
        ndims = {
            key: _choose_batch_ndim(seen, optional=len(seen) < len(samples)) for key, seen in shapes.items()
        }
        return cls(ndims, mask=MASK_KEY in forward_names and MASK_KEY not in shapes)

    @classmethod
    def from_inputs(cls, inputs: Iterable[schema.Input]) -> DefaultCollate:
        """The rules that a plan was made with. A mask that the samples bring themselves is never made, so
        `mask` only needs the key."""
        ndims = {i.key: len(i.dims) for i in inputs}
        return cls(ndims, mask=MASK_KEY in ndims)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The batch of `samples`, which must not be empty. A key that only some samples have holds the
        entries of those alone.

        Raises UserError for a value that is no tensor, array, number, text or list of numbers, and for shapes
        that fit no rule.
        """
        keys = dict.fromkeys(key for sample in samples for key in sample)
        batch = {key: self._merge_values(key, [s[key] for s in samples if key in s]) for key in keys}
        if self.adds_mask and MASK_KEY not in batch:
            texts = [value_to_tensor(TEXT_KEY, s[TEXT_KEY]) for s in samples if TEXT_KEY in s]
            if texts and texts[0].ndim == 1:
                batch[MASK_KEY] = _pad_sequences([torch.ones_like(t, dtype=torch.long) for t in texts], 0)
        return batch

    def _merge_values(self, key: str, values: list[Any]) -> Any:
        if any(_is_text(v) for v in values):
            return values
        tensors = _promote_dtypes([value_to_tensor(key, v) for v in values])
        ndim = tensors[0].ndim
        if any(t.ndim != ndim for t in tensors):
            raise _shape_mismatch_error(key, tensors)
        if self.ndims.get(key, _choose_batch_ndim([tuple(tensors[0].shape)], optional=True)) == ndim:
            if len({t.shape[1:] for t in tensors}) > 1:
                raise _shape_mismatch_error(key, tensors)
            return torch.cat(tensors)
        if ndim == 1:
            return _pad_sequences(tensors, -100 if key == "labels" else 0)
        if len({t.shape for t in tensors}) > 1:
            raise _shape_mismatch_error(key, tensors)
        return torch.stack(tensors)


def default_collate(samples: Sequence[Sample], forward_names: Collection[str]) -> dict[str, Any]:
    """A batch by rules that are fitted to these samples alone: for a whole data set in one batch, and for
    tests."""
    return DefaultCollate.fit(samples, forward_names)(samples)


def value_to_tensor(key: str, value: Any) -> torch.Tensor:
    """A tensor, array, number, list of numbers or list of equal tensors as one tensor. Raises UserError
    naming `key` for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, (list, tuple)):
            return (
                torch.stack(list(value))
                if value and isinstance(value[0], torch.Tensor)
                else torch.tensor(value)
            )
        if isinstance(value, Number) or hasattr(value, "__array__"):
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the value of key {key!r} cannot be made a tensor: {error}", remedy=WRITE_COLLATE_REMEDY
        ) from None
    absent = "leave the key out of samples that lack it" if value is None else WRITE_COLLATE_REMEDY
    raise UserError(
        f"the value of key {key!r} is of type {type(value).__name__}, not a tensor, array or number",
        remedy=absent,
    )


def _choose_batch_ndim(shapes: list[tuple[int, ...]], optional: bool) -> int:
    """Concatenate stacks of images: of ragged number, or, where only some samples have them, all but one
    image of 3 or 4 channels."""
    ndim = len(shapes[0])
    ragged = len({shape[:1] for shape in shapes}) > 1
    one_image = ndim == 3 and shapes[0][0] in (3, 4)
    return ndim if ndim >= 2 and (ragged or (optional and not one_image)) else ndim + 1


def _pad_sequences(tensors: list[torch.Tensor], value: float) -> torch.Tensor:
    """1-D tensors as [samples, longest], filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def _promote_dtypes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of their common dtype; an empty list, which is a float tensor by default only, has no say in
    it."""
    dtypes = [t.dtype for t in tensors if t.numel()] or [tensors[0].dtype]
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return [t.to(common) for t in tensors]


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, bytes))


def _shape_mismatch_error(key: str, tensors: list[torch.Tensor]) -> UserError:
    shapes = ", ".join(str(list(s)) for s in dict.fromkeys(tuple(t.shape) for t in tensors))
    return UserError(
        f"samples have {key!r} of shapes {shapes}, which can be neither stacked nor concatenated",
        remedy=WRITE_COLLATE_REMEDY,
    )
