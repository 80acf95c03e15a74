"""Python values as entries of an op's attribute dictionary."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ArrayAttr, Float64Type, FloatAttr, IntegerAttr, IntegerType


def integer(value: int) -> IntegerAttr[IntegerType]:
    """A 64-bit integer."""
    return IntegerAttr(value, IntegerType(64))


def integers(values: Iterable[int]) -> ArrayAttr[IntegerAttr[IntegerType]]:
    """A list of 64-bit integers."""
    return ArrayAttr([integer(v) for v in values])


def number(value: float) -> FloatAttr[Float64Type]:
    """A 64-bit float."""
    return FloatAttr(value, Float64Type())
