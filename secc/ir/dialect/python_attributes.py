"""Python values as entries of an op's attribute dictionary."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ArrayAttr, Float64Type, FloatAttr, IntegerAttr, IntegerType


def int_attr(value: int) -> IntegerAttr[IntegerType]:
    """A 64-bit integer attribute."""
    return IntegerAttr(value, IntegerType(64))


def int_list_attr(values: Iterable[int]) -> ArrayAttr[IntegerAttr[IntegerType]]:
    """A list of 64-bit integers."""
    return ArrayAttr([int_attr(v) for v in values])


def float_attr(value: float) -> FloatAttr[Float64Type]:
    """A 64-bit float attribute."""
    return FloatAttr(value, Float64Type())
