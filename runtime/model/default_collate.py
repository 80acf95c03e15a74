"""Collates samples of model files that define no `collate`.

What happens to a key must not depend on which samples share a micro-batch: two images of equal size in a
micro-batch of two must be treated as in the global batch. So the rule is fixed once, from many samples or
from the plan's inputs. It is the number of dims that the key has in a batch: one more than in a sample means
*stack* (1-D tensors are padded to the longest first), the same number means *concatenate along dim 0*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, cast

import torch

from secc.runtime.errors import UserError
from secc.runtime.model.nested_batch import KEY_SEPARATOR, check_batch_key
from secc.runtime.plan import schema

Sample = Mapping[str, Any]

TEXT_KEY = "input_ids"
MASK_KEY = "attention_mask"
WRITE_COLLATE_REMEDY = "write `collate(samples) -> dict` in the model file"


class DefaultCollate:
    """Collates samples by one fixed rule per key.

    `ndims` is the number of dims of each key in a batch; keys it lacks are treated as inputs that only some
    samples have. `mask` says whether an `attention_mask` of the padding of `input_ids` is added where no
    sample has one.
    """

    def __init__(self, ndims: Mapping[str, int], mask: bool) -> None:
        self.ndims, self.adds_mask = dict(ndims), mask

    @classmethod
    def fit(cls, samples: Sequence[Sample], forward_names: Collection[str]) -> DefaultCollate:
        """Choose the rules from samples that represent the dataset; `forward_names` are the arguments that
        forward names."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for sample in map(open_dicts, samples):
            for key, value in sample.items():
                if not _is_text(value):
                    shapes.setdefault(key, []).append(tuple(value_to_tensor(key, value).shape))
        ndims = {
            key: _choose_batch_ndim(seen, optional=len(seen) < len(samples)) for key, seen in shapes.items()
        }
        return cls(ndims, mask=MASK_KEY in forward_names and MASK_KEY not in shapes)

    @classmethod
    def from_inputs(cls, inputs: Iterable[schema.Input]) -> DefaultCollate:
        """Take the rules from a plan's inputs. A mask that samples have themselves is never replaced, so the
        key alone decides `mask`."""
        ndims = {i.key: len(i.dims) for i in inputs}
        return cls(ndims, mask=MASK_KEY in ndims)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate `samples` (at least one) in their order. A key that only some samples have holds the
        entries of those samples.

        Raises UserError for a key that plans cannot name, for a value that is no tensor, array, number, text,
        list of numbers or dict of these, and for shapes that can be neither stacked nor concatenated.
        """
        samples = [open_dicts(sample) for sample in samples]
        keys = dict.fromkeys(key for sample in samples for key in sample)
        for key in keys:
            for place, name in enumerate(key.split(KEY_SEPARATOR) if isinstance(key, str) else [key]):
                check_batch_key(name, inside=place > 0)
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
    """Collate by rules that are fitted to these samples alone: for a whole dataset in one batch, and for
    tests."""
    return DefaultCollate.fit(samples, forward_names)(samples)


def find_joined_key(sample: Mapping[Any, Any]) -> str | None:
    """Return a key of a sample, or of a dict in it, that could be one of an opened dict. None if there is
    none."""
    for key, value in sample.items():
        if isinstance(key, str) and KEY_SEPARATOR in key:
            return key
        if isinstance(value, Mapping) and (inner := find_joined_key(cast("Mapping[Any, Any]", value))):
            return inner
    return None


def open_dicts(sample: Sample) -> dict[str, Any]:
    """Return a sample with the entries of dicts in it under keys of their own, as nested batches have them:
    `box.size` for `{"box": {"size": …}}`."""
    opened = dict[str, Any]()
    for key, value in sample.items():
        if isinstance(value, Mapping):
            inner = open_dicts(cast("Sample", value))
            opened |= {f"{key}{KEY_SEPARATOR}{name}": entry for name, entry in inner.items()}
        else:
            opened[key] = value
    return opened


def value_to_tensor(key: str, value: Any) -> torch.Tensor:
    """Convert a tensor, array, number, list of numbers or list of equally shaped tensors to one tensor.
    Raises UserError that names `key` for anything else."""
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


def drop_values(sample: Sample) -> dict[str, Any]:
    """Return the sample with its tensors on the meta device: shapes and dtypes without values."""
    return {k: v if _is_text(v) else value_to_tensor(k, v).to("meta") for k, v in sample.items()}


def _choose_batch_ndim(shapes: list[tuple[int, ...]], optional: bool) -> int:
    """Number of dims in a batch. Stacks of images are concatenated: those of varying number, those of one
    image each (`[1, channels, height, width]`, as image processors return), and, where only some samples have
    the key, all but a single image with 3 or 4 channels."""
    ndim = len(shapes[0])
    leading = {shape[:1] for shape in shapes}
    ragged, single = len(leading) > 1, ndim == 4 and leading == {(1,)}
    one_image = ndim == 3 and shapes[0][0] in (3, 4)
    return ndim if ndim >= 2 and (ragged or single or (optional and not one_image)) else ndim + 1


def _pad_sequences(tensors: list[torch.Tensor], value: float) -> torch.Tensor:
    """Pad 1-D tensors on the right to [samples, longest]."""
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def _promote_dtypes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Convert tensors to their common dtype. Empty ones do not count: torch.tensor([]) is float by default
    only."""
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
