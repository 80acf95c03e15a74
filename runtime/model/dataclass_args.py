"""Dataclasses among the arguments of a block, such as the output of an encoder that a decoder is called with.

In a plan one is a dict of what its fields hold, and of its class under `*class`, as `package.module:Name`;
sections write `built("package.module:Name", {…})`.
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
    """The object. Raises ImportError or AttributeError where its class is not there."""
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))(**fields)


def dataclass_to_dict(value: object) -> dict[str, Any] | None:
    """The fields of a dataclass that are not None, and its class; None for what is no dataclass, or none that
    a module has by its name."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    cls = type(value)
    fields = [f for f in dataclasses.fields(value) if getattr(value, f.name, None) is not None]
    try:
        known = operator.attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is cls
    except (KeyError, AttributeError):
        return None
    if not known or not all(f.init for f in fields):
        return None
    return {CLASS_KEY: f"{cls.__module__}:{cls.__qualname__}"} | {
        f.name: getattr(value, f.name) for f in fields
    }
