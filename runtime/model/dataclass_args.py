"""Represents dataclasses among the arguments of a block, such as the output of an encoder that a decoder is
called with.

In a plan, a dataclass is a dict of its fields, with its class under `*class` as `package.module:Name`.
Generated sections write `built("package.module:Name", {…})`.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from secc.runtime.plan.schema import CLASS_KEY

_CACHE_CLASS, _CACHE_LAYER_CLASS = "DynamicCache", "DynamicLayer"
_ANY_CACHE_CLASS, _CACHE_PACKAGE = "Cache", "transformers."
_CACHE_FIELD = "ddp_cache_data"  # of the constructor: keys and values by layer


def built(name: str, fields: Mapping[str, Any]) -> Any:
    """Make the object from its class and fields. Raises ImportError or AttributeError if the class cannot be
    found."""
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))(**fields)


def dataclass_to_dict(value: object) -> dict[str, Any] | None:
    """Return the fields of a dataclass that are not None, and its class. Returns None for other values, and
    for a dataclass that cannot be imported by its name or has fields that its constructor does not take.

    A cache of keys and values that was filled before a model is called, as prefixes are, counts as one."""
    if (layers := _filled_cache_layers(value)) is not None:
        cls = type(value)
        return {CLASS_KEY: f"{cls.__module__}:{cls.__qualname__}", _CACHE_FIELD: layers}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    cls = type(value)
    fields = [f for f in dataclasses.fields(value) if getattr(value, f.name, None) is not None]
    try:
        importable = operator.attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is cls
    except (KeyError, AttributeError):
        return None
    if not importable or not all(f.init for f in fields):
        return None
    return {CLASS_KEY: f"{cls.__module__}:{cls.__qualname__}"} | {
        f.name: getattr(value, f.name) for f in fields
    }


def is_empty_cache(value: object, layer: int | None = None) -> bool:
    """Whether a value is a cache of Hugging Face that holds no tensors (of this layer, if one is given): what
    a model makes before its layers run if `use_cache` is on, its default outside of gradient checkpointing.
    `runtime` does not import transformers."""
    is_cache = any(
        cls.__name__ == _ANY_CACHE_CLASS and cls.__module__.startswith(_CACHE_PACKAGE)
        for cls in type(value).__mro__
    )
    return is_cache and not _holds_tensors(value, layer)


def cache_layer(module: nn.Module) -> int | None:
    """The number of the layer under which a module of Hugging Face keeps keys and values in a cache."""
    numbers = (getattr(part, "layer_idx", None) for part in module.modules())
    return next((n for n in numbers if isinstance(n, int)), None)


def _holds_tensors(value: object, layer: int | None) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple | dict):
        entries = value.values() if isinstance(value, dict) else value
        return any(_holds_tensors(entry, layer) for entry in entries)
    if not type(value).__module__.startswith(_CACHE_PACKAGE):
        return False
    attributes = dict(vars(value))
    if layer is not None and isinstance(layers := attributes.get("layers"), list):
        attributes["layers"] = layers[layer : layer + 1]
    # A layer without keys and values may hold constants, such as its window.
    return attributes.get("is_initialized") is not False and _holds_tensors(attributes, layer)


def _filled_cache_layers(value: object) -> list[list[torch.Tensor]] | None:
    """Return keys and values [samples, heads, positions, channels] by layer of Hugging Face's cache that
    keeps all positions; None for any other value. `runtime` does not import transformers."""
    cls, layers = type(value), getattr(value, "layers", None)
    if cls.__name__ != _CACHE_CLASS or not cls.__module__.startswith("transformers.") or not layers:
        return None
    pairs: list[list[Any]] = [[getattr(x, "keys", None), getattr(x, "values", None)] for x in layers]
    is_plain = all(type(x).__name__ == _CACHE_LAYER_CLASS for x in layers)
    return pairs if is_plain and all(isinstance(t, torch.Tensor) for pair in pairs for t in pair) else None
