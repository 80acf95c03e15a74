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

from secc.runtime.plan.schema import CLASS_KEY


def built(name: str, fields: Mapping[str, Any]) -> Any:
    """Make the object from its class and fields. Raises ImportError or AttributeError if the class cannot be
    found."""
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))(**fields)


def dataclass_to_dict(value: object) -> dict[str, Any] | None:
    """Return the fields of a dataclass that are not None, and its class. Returns None for other values, and
    for a dataclass that cannot be imported by its name or has fields that its constructor does not take."""
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
