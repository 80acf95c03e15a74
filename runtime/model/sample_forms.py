"""Samples that are no dicts. If the model file has a `collate`, its dataset may give tuples, as torchvision's
datasets do, or objects of any class. Everything but `collate` sees such a sample as a dict, with names that
no key of a user has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

_WHOLE = "[object]"
_NO_SAMPLE = (str, bytes, bool, int, float, complex)


def sample_as_dict(item: Any) -> dict[str, Any] | None:
    """A sample as a dict: the entries of a plain tuple or list by their places (`[0]`, `[1]`), any other
    object as a single entry. None for what cannot be a sample: None, a text, a number."""
    if isinstance(item, Mapping):
        return dict(cast("Mapping[str, Any]", item))
    if type(item) in (tuple, list) and item:
        return {f"[{i}]": value for i, value in enumerate(cast("Sequence[Any]", item))}
    return None if item is None or isinstance(item, _NO_SAMPLE) or item == () else {_WHOLE: item}


def has_names(sample: Mapping[str, Any]) -> bool:
    """Whether a sample was a dict in the dataset."""
    return _WHOLE not in sample and "[0]" not in sample


def original_sample(sample: Mapping[str, Any]) -> Any:
    """The sample as the dataset gave it, of a dict from `sample_as_dict`; lists become tuples."""
    if _WHOLE in sample:
        return sample[_WHOLE]
    return sample if has_names(sample) else tuple(sample.values())
