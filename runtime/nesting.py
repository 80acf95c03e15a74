"""Batches whose values are dicts or lists of tensors, in the flat form in which everything but forward knows them.

`{"text": {"ids": …, "mask": …}}` has the keys `text.ids` and `text.mask`. A list of tensors has numbers in place of names (`levels.0`), and
must have as many in every batch. `flat` and `nested` undo each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from secc.runtime.errors import UserError

SEPARATOR = "."


def flat(batch: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """A batch without nesting. Values that are None are left out, as missing ones are.

    `where` is collate's place. Raises UserError for a key that could not be told from those of nested values.
    """
    found: dict[str, Any] = {}
    for key, value in batch.items():
        found |= _leaves(_checked(key, False, where), value, where)
    return found


def nested(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as forward takes it."""
    found: dict[str, Any] = {}
    for key, value in batch.items():
        *path, last = key.split(SEPARATOR)
        inner = found
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return {key: _lists(value) for key, value in found.items()}


def argument(key: str) -> str:
    """The argument of forward that a key of a flat batch belongs to."""
    return key.partition(SEPARATOR)[0]


def _leaves(key: str, value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not any(True for _ in _tensors(value)) or isinstance(value, torch.Tensor):
        return {key: value}
    steps = value.items() if isinstance(value, Mapping) else ((str(i), v) for i, v in enumerate(value))
    inside = isinstance(value, Mapping)
    found: dict[str, Any] = {}
    for step, child in steps:
        found |= _leaves(f"{key}{SEPARATOR}{_checked(step, True, where) if inside else step}", child, where)
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in dicts, lists and tuples; named tuples and other objects are leaves."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _tensors(child)
    elif type(value) in (list, tuple):
        for child in value:
            yield from _tensors(child)


def _checked(key: Any, inside: bool, where: str) -> str:
    if not isinstance(key, str) or SEPARATOR in key or (inside and key.isdecimal()):
        raise UserError(f"a batch has the key {key!r}", where, f"let the keys of a batch be names without {SEPARATOR!r}")
    return key


def _lists(value: Any) -> Any:
    """Dicts whose keys are numbers as lists."""
    if not isinstance(value, dict):
        return value
    made = {key: _lists(child) for key, child in value.items()}
    return list(made.values()) if all(key.isdecimal() for key in made) else made
