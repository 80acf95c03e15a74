"""Flattens batches that hold dicts or lists of tensors, and restores them for forward.

Everything but forward knows the flat form. `{"text": {"ids": …, "mask": …}}` has the keys `text.ids` and
`text.mask`. A list of tensors that has the same length in every batch has numbers in place of names
(`levels.0`).

A list that grows with the samples (one picture per sample) becomes up to three tensors. `pictures.*` holds
the entries of all its tensors, concatenated along dim 0, with the leading dims that differ between tensors
flattened into one. `pictures.*sizes` [tensors, dims] has these leading dims of each tensor. `pictures.*most`
has no entries; its shape is the largest of them, which forward may pad to. If no dim differs, the tensors are
stacked in `pictures.*` alone. A growing list of dicts is one list per key: `targets.*.boxes`. A growing list
of lists (the sentences of each sample) is one list of all their tensors, `docs.*.*`, and `docs.*counts` says
how many each has. `flatten_batch` and `unflatten_batch` are inverses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from secc.runtime.errors import UserError
from secc.runtime.model.dataclass_args import built
from secc.runtime.plan.schema import CLASS_KEY, COUNTS_SUFFIX, EACH_SUFFIX, LARGEST_SUFFIX, SIZES_SUFFIX

KEY_SEPARATOR = "."
_SPECIAL_IN_KEYS = frozenset(".[]*")  # what plans name the values inside a batch's values by

GrowingLists = Mapping[
    str, int
]  # the lists that grow with the samples, and the number of leading dims in which their tensors differ
NO_GROWING_LISTS: GrowingLists = {}


def flatten_batch(
    batch: Mapping[str, Any], where: str = "", lists: GrowingLists = NO_GROWING_LISTS
) -> dict[str, Any]:
    """Flatten a batch as collate returns it. Values that are None, and empty lists among `lists`, are left
    out.

    `where` is collate's file:line for messages. Raises UserError for a key that could be confused with those
    of nested values, and for a growing list with tensors that differ in dims that were equal before.
    """
    flattened: dict[str, Any] = {}
    for key, value in batch.items():
        flattened |= _flatten_value(check_batch_key(key, False, where), value, where, lists)
    return flattened


def unflatten_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the nested batch that forward takes from a flat one."""
    arguments: dict[str, Any] = {}
    for key, value in batch.items():
        *path, last = key.split(KEY_SEPARATOR)
        inner = arguments
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return {key: _restore_lists(value) for key, value in arguments.items()}


def check_batch_key(key: Any, inside: bool = False, where: str = "") -> str:
    """Returns a key of a batch, or of a dict `inside` it. Raises UserError, at `where`, for one that plans
    would confuse with others (they join keys by spaces) or that cannot be read."""
    readable = isinstance(key, str) and key.isprintable() and key != "" and " " not in key
    if not readable or _SPECIAL_IN_KEYS & set(key) or (inside and key.isdecimal()):
        remedy = "let the keys of a batch be printable names without spaces and without . [ ] *"
        raise UserError(f"a batch has the key {key!a}", where, remedy)
    return key


def argument_of_key(key: str) -> str:
    """Name of forward's argument that a key of a flat batch belongs to."""
    return key.partition(KEY_SEPARATOR)[0]


def listed(value: Any) -> Any:
    """Restore a block's arguments: lists from `{"*": …, "*sizes": …}`, dataclasses from `{"*class": …}`."""
    match value:
        case {"*class": str() as name}:
            return built(name, {key: listed(child) for key, child in value.items() if key != CLASS_KEY})
        case {"*counts": counts}:
            return _group_list(listed(value[EACH_SUFFIX]) if EACH_SUFFIX in value else [], counts)
        case {"*": dict() as columns}:
            return _dicts_from_columns(listed(columns))
        case {"*": each}:
            return _split_joined_list(each, value.get(SIZES_SUFFIX))
        case dict():
            return {key: listed(child) for key, child in value.items()}
        case list() | tuple() if not hasattr(value, "_fields"):
            return type(value)(listed(child) for child in value)
        case _:
            return value


def find_tensor_lists(batch: Mapping[str, Any]) -> dict[str, Sequence[torch.Tensor]]:
    """Return the lists of tensors in a batch as collate returns it, by their flat keys."""
    tensor_lists: dict[str, Sequence[torch.Tensor]] = {}
    for key, value in batch.items():
        if isinstance(value, Mapping):
            tensor_lists |= {
                f"{key}{KEY_SEPARATOR}{inner}": tensors for inner, tensors in find_tensor_lists(value).items()
            }
        elif type(value) in (list, tuple) and value and all(isinstance(v, torch.Tensor) for v in value):
            tensor_lists[key] = value
        elif (grouped := list_of_lists(value)) is not None:
            tensor_lists[f"{key}{KEY_SEPARATOR}{EACH_SUFFIX}"] = [t for inner in grouped for t in inner]
        elif (columns := dict_list_columns(value)) is not None:
            tensor_lists |= {
                f"{key}{KEY_SEPARATOR}{EACH_SUFFIX}{KEY_SEPARATOR}{inner}": tensors
                for inner, tensors in columns.items()
            }
    return tensor_lists


def list_of_lists(value: Any) -> Sequence[Sequence[torch.Tensor]] | None:
    """Return `value` if it is a list of lists of tensors with at least one tensor, else None. Inner lists may
    be empty."""
    if type(value) not in (list, tuple) or not all(type(inner) in (list, tuple) for inner in value):
        return None
    tensors = [t for inner in value for t in inner]
    return value if tensors and all(isinstance(t, torch.Tensor) for t in tensors) else None


def may_hold_growing_lists(batch: Mapping[str, Any]) -> bool:
    """Whether a batch as collate returns it has lists that might grow. A list without tensors counts: it may
    be of samples that have none."""
    inner = (value for value in batch.values() if isinstance(value, Mapping))
    return (
        bool(find_tensor_lists(batch))
        or any(type(v) in (list, tuple) and not any(True for _ in _iter_leaves(v)) for v in batch.values())
        or any(map(may_hold_growing_lists, inner))
    )


def growing_lists_from_dims(dims: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the growing lists, and their numbers of varying leading dims, from the dims of a flat batch's
    keys."""
    each = [
        key.removesuffix(f"{KEY_SEPARATOR}{EACH_SUFFIX}")
        for key in dims
        if key.endswith(f"{KEY_SEPARATOR}{EACH_SUFFIX}")
    ]
    return {key: int(dims.get(f"{key}{KEY_SEPARATOR}{SIZES_SUFFIX}", ("", "0"))[1]) for key in each}


def find_growing_lists(
    groups: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], where: str
) -> dict[str, int]:
    """Find the lists with a length that is the sum of the samples' lengths.

    `groups` are batches of several samples, each with the batches of its samples collated alone. Returns the
    number of leading dims in which a list's tensors differ, by flat key. Raises UserError if tensors of one
    list have different numbers of dims.
    """
    tensors_by_key: dict[str, list[torch.Tensor]] = {}
    lengths: dict[str, list[tuple[int, list[int]]]] = {}
    fixed = set[str]()  # lists of lists with an outer list that does not grow
    for together, singles in groups:
        single_lists = [find_tensor_lists(s) for s in singles]
        counts = _outer_lengths(together)
        alone = [_outer_lengths(s) for s in singles]
        fixed |= {key for key, n in counts.items() if n != sum(one.get(key, 0) for one in alone)}
        for key, tensors in find_tensor_lists(together).items():
            tensors_by_key.setdefault(key, []).extend(tensors)
            lengths.setdefault(key, []).append(
                (len(tensors), [len(one[key]) for one in single_lists if key in one])
            )
    grown = [
        key
        for key, seen in lengths.items()
        if all(n == sum(parts) for n, parts in seen)
        and any(len(parts) > 1 for _, parts in seen)
        and key not in fixed
    ]
    return {key: _count_varying_leading_dims(key, tensors_by_key[key], where) for key in grown}


def _outer_lengths(batch: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return the lengths of lists that may hold lists, by the flat keys of what these hold."""
    lengths = dict[str, int]()
    for key, value in batch.items():
        if isinstance(value, Mapping):
            lengths |= _outer_lengths(value, f"{prefix}{key}{KEY_SEPARATOR}")
        elif type(value) in (list, tuple) and all(type(inner) in (list, tuple) for inner in value):
            lengths[f"{prefix}{key}{KEY_SEPARATOR}{EACH_SUFFIX}"] = len(value)
    return lengths


def _count_varying_leading_dims(key: str, tensors: Sequence[torch.Tensor], where: str) -> int:
    """Number of leading dims up to the last one that differs between the tensors."""
    if len({t.ndim for t in tensors}) > 1:
        raise UserError(
            f"the tensors in the list {key!r} have different numbers of dims",
            where,
            "let all of them have as many",
        )
    return max((d + 1 for d in range(tensors[0].ndim) if len({t.shape[d] for t in tensors}) > 1), default=0)


def _flatten_value(key: str, value: Any, where: str, lists: GrowingLists) -> dict[str, Any]:
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        raise UserError(
            f"collate() returns a NumPy array for {key!r}, expected a tensor", where, "use torch.from_numpy()"
        )
    if value is None or (key in lists and not value):
        return {}
    if key in lists and isinstance(value, (list, tuple)):
        return _join_list(key, value, lists[key], where)
    inside = f"{key}{KEY_SEPARATOR}{EACH_SUFFIX}"
    if inside in lists and type(value) in (list, tuple):
        if not value:
            return {}
        counts = {f"{key}{KEY_SEPARATOR}{COUNTS_SUFFIX}": torch.tensor([len(inner) for inner in value])}
        return counts | _flatten_value(inside, [t for inner in value for t in inner], where, lists)
    holds_lists = isinstance(value, Mapping) and any(n.startswith(f"{key}{KEY_SEPARATOR}") for n in lists)
    if isinstance(value, torch.Tensor) or not (holds_lists or any(True for _ in _iter_tensors(value))):
        return {} if value == [] and _is_list_of_dicts(key, lists) else {key: value}
    if _is_list_of_dicts(key, lists) and (columns := dict_list_columns(value)) is not None:
        each = f"{key}{KEY_SEPARATOR}{EACH_SUFFIX}{KEY_SEPARATOR}"
        return {
            k: v
            for inner, tensors in columns.items()
            for name in [each + check_batch_key(inner, True, where)]
            for k, v in _flatten_value(name, tensors, where, lists).items()
        }
    named = isinstance(value, Mapping)
    steps = value.items() if named else ((str(i), v) for i, v in enumerate(value))
    flattened: dict[str, Any] = {}
    for step, child in steps:
        name = check_batch_key(step, True, where) if named else step
        flattened |= _flatten_value(f"{key}{KEY_SEPARATOR}{name}", child, where, lists)
    return flattened


def _is_list_of_dicts(key: str, lists: GrowingLists) -> bool:
    return any(name.startswith(f"{key}{KEY_SEPARATOR}{EACH_SUFFIX}{KEY_SEPARATOR}") for name in lists)


def dict_list_columns(value: Any) -> dict[str, list[torch.Tensor]] | None:
    """Return the columns of a list of dicts with equal keys and tensor values; None for any other value."""
    if (
        type(value) not in (list, tuple)
        or not value
        or not all(isinstance(v, Mapping) and v.keys() == value[0].keys() for v in value)
    ):
        return None
    columns = {key: [v[key] for v in value] for key in value[0]}
    return (
        columns if all(isinstance(t, torch.Tensor) for tensors in columns.values() for t in tensors) else None
    )


def _dicts_from_columns(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Restore a list of dicts from its columns."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _join_list(key: str, tensors: Sequence[torch.Tensor], leading: int, where: str) -> dict[str, Any]:
    """Concatenate the tensors of a growing list, and record their sizes."""
    first = tensors[0]
    if any(t.ndim != first.ndim or t.shape[leading:] != first.shape[leading:] for t in tensors):
        shapes = ", ".join(str(list(s)) for s in dict.fromkeys(t.shape for t in tensors))
        message = (
            f"the list {key!r} has tensors of the shapes {shapes}, "
            "which differ in dims that were the same in all samples drawn"
        )
        raise UserError(
            message,
            where,
            "let dataset() show such samples earlier, or compile again with more --stats-samples",
        )
    name = f"{key}{KEY_SEPARATOR}{EACH_SUFFIX}"
    if not leading:
        return {name: torch.stack(list(tensors))}
    sizes = torch.tensor([t.shape[:leading] for t in tensors])
    largest = torch.empty(0, *(sizes.amax(0).tolist()))
    entries = torch.cat([t.flatten(0, leading - 1) for t in tensors])
    return {
        name: entries,
        f"{key}{KEY_SEPARATOR}{SIZES_SUFFIX}": sizes,
        f"{key}{KEY_SEPARATOR}{LARGEST_SUFFIX}": largest,
    }


def _split_joined_list(each: torch.Tensor, sizes: torch.Tensor | None) -> list[torch.Tensor]:
    """Undo `_join_list`: split entries into the list's tensors."""
    if sizes is None:
        return list(each.unbind())
    shapes: list[list[int]] = sizes.tolist()
    parts = each.split([math.prod(shape) for shape in shapes])
    return [
        part if len(shape) == 1 else part.unflatten(0, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _group_list(entries: list[torch.Tensor], counts: torch.Tensor) -> list[list[torch.Tensor]]:
    """Restore a list of lists from the entries of all of them."""
    ends = list(itertools.accumulate(counts.tolist()))
    return [entries[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _iter_leaves(value: Any) -> Iterator[Any]:
    """Iterate over what lists and tuples hold."""
    for child in value if type(value) in (list, tuple) else ():
        if type(child) in (list, tuple):
            yield from _iter_leaves(child)
        else:
            yield child


def _iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in dicts, lists and tuples; named tuples and other objects count as leaves."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _iter_tensors(child)
    elif type(value) in (list, tuple):
        for child in value:
            yield from _iter_tensors(child)


def _restore_lists(value: Any) -> Any:
    """Turn dicts with numbers as keys into lists, and joined entries into the lists they came from."""
    if not isinstance(value, dict):
        return value
    if COUNTS_SUFFIX in value:
        entries = _restore_lists(value[EACH_SUFFIX]) if EACH_SUFFIX in value else []
        return _group_list(entries, value[COUNTS_SUFFIX])
    if isinstance(value.get(EACH_SUFFIX), dict):
        return _dicts_from_columns(_restore_lists(value[EACH_SUFFIX]))
    if EACH_SUFFIX in value:
        return _split_joined_list(value[EACH_SUFFIX], value.get(SIZES_SUFFIX))
    children = {key: _restore_lists(child) for key, child in value.items()}
    return list(children.values()) if all(key.isdecimal() for key in children) else children
