"""Walks nested Python values that hold tensors: arguments of a block, and whatever its forward returns.

torch's pytree knows registered types only. Forwards also return plain dataclasses, named tuples and mappings,
and codegen needs each tensor's access path (`.last_hidden_state`, `["logits"]`, `[0]`) as the user would
write it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from secc.runtime.model.dataclass_args import dataclass_to_dict
from secc.runtime.model.user_file import is_model_file_module

_LITERALS = (
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    type(None),
    type(Ellipsis),
)
_PATH_STEP = re.compile(
    r"\.(?P<name>\w+)|\[(?P<index>-?\d+)\]|\[(?P<key>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\]"
)


class NotLiteral(Exception):
    """Raised for a value that cannot be written as a Python literal."""

    def __init__(self, value: object) -> None:
        super().__init__(f"a value of type {type(value).__name__}")
        self.value = value


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return (step, child) for each child of a container, None for a leaf."""
    kind = type(value)
    if kind in _LITERALS or isinstance(value, torch.Tensor):
        return None
    if kind is tuple or kind is list:  # before the slower tests of classes
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f".{f.name}", getattr(value, f.name))
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        ]
    if isinstance(value, Mapping):
        return [(f"[{_quote_key(k)}]", v) for k, v in value.items() if isinstance(k, (str, int))]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    return None


def iter_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (access path, tensor) of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield path, value
    for step, child in children_of(value) or ():
        yield from iter_tensors(child, path + step)


def holds_packed_sequence(value: Any) -> bool:
    """Whether a nested value holds a `PackedSequence`."""
    return isinstance(value, PackedSequence) or any(
        holds_packed_sequence(child) for _, child in children_of(value) or ()
    )


def iter_batch_tensors(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, tensor) of a batch: `input_ids`, or `images[0]` in a nested value."""
    for key, value in inputs.items():
        yield from iter_tensors(value, key)


def map_leaves(value: Any, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of the containers in `value`, with every leaf replaced by `leaf(path, old)`. Objects
    of other types are leaves."""
    children = children_of(value)
    if children is None:
        return leaf(path, value)
    new_children = [(step, map_leaves(child, leaf, path + step)) for step, child in children]
    if isinstance(value, (list, tuple)):
        items = [child for _, child in new_children]
        # What a class of its own makes of the fields (`PackedSequence`) is in them already.
        make_named: Callable[[list[Any]], Any] | None = getattr(type(value), "_make", None)
        return _rebuild_sequence(value, items) if make_named is None else make_named(items)
    result = copy.copy(value)
    for (step, child), (_, old) in zip(new_children, children, strict=True):
        if child is not old:
            _set_child(result, step, child)
    return result


def _rebuild_sequence(value: Any, items: list[Any]) -> Any:
    return tuple(items) if isinstance(value, torch.Size) else type(value)(items)


def _set_child(container: Any, step: str, child: Any) -> None:
    if not step.startswith("."):
        container[_parse_key(step)] = child
    elif dataclasses.is_dataclass(container) and container.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        object.__setattr__(container, step[1:], child)
    else:
        setattr(container, step[1:], child)


def _quote_key(key: str | int) -> str:
    return repr(key)


def _parse_key(step: str) -> str | int:
    return _parse_literal(step[1:-1])


@functools.lru_cache(1 << 12)  # models have few keys, and each recording meets them again
def _parse_literal(text: str) -> str | int:
    return ast.literal_eval(text)


def take_at_path(value: Any, path: str) -> Any:
    """Return the part of a block's result at an access path; "" is the result itself."""
    for match in _PATH_STEP.finditer(path):
        if match["name"] is not None:
            value = getattr(value, match["name"])
        else:
            value = value[_parse_literal(match["index"] or match["key"])]
    return value


def to_literal(value: Any) -> Any:
    """Return `value` as Python source could write it, with NumPy numbers as Python's. Raises NotLiteral."""
    if isinstance(value, _LITERALS):
        return value
    if isinstance(value, slice):
        return slice(to_literal(value.start), to_literal(value.stop), to_literal(value.step))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise NotLiteral(value)


def encode_arguments(value: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Return arguments of a call with tensors (of any shapes) replaced by `tensor(t)`: tuples, lists and
    plain dicts of literals. Dataclasses of libraries become dicts (`secc.runtime.model.dataclass_args`).
    Raises NotLiteral."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if type(value) is list:
        return [encode_arguments(v, tensor) for v in value]
    if type(value) in (tuple, torch.Size):
        return tuple(encode_arguments(v, tensor) for v in value)
    if (
        isinstance(value, dict)
        and not dataclasses.is_dataclass(value)
        and all(isinstance(k, str) for k in value)
    ):
        return {k: encode_arguments(v, tensor) for k, v in value.items()}
    if not is_model_file_module(type(value).__module__) and (fields := dataclass_to_dict(value)) is not None:
        return {k: encode_arguments(v, tensor) for k, v in fields.items()}
    return to_literal(value)
