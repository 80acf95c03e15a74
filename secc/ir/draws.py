"""Random ops in the IR: the graph's attribute `draws` lists them as texts, and glue that draws has its name as attribute `draw`.

A text is `dims; rows; name; place`, such as `0,2; 12*B; encoder.layers.0@model.py:18#0; model.py:18`; dims are `-` where all samples
share the numbers.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.ir import Attribute

from secc.runtime.plan import Draw

ATTRIBUTE = "draws"  # of a graph
NAME = "draw"  # of a glue op


def text(draw: Draw) -> str:
    """A random op as a text that `parse` reads back."""
    return "; ".join((",".join(map(str, draw.dims)) or "-", draw.rows, draw.call, draw.where))


def parse(line: str) -> Draw:
    """The random op of a text. Raises ValueError where it is none."""
    dims, rows, call, where = line.split("; ")
    return Draw(call, () if dims == "-" else tuple(map(int, dims.split(","))), rows, where)


def draws(attribute: Attribute | None) -> tuple[Draw, ...]:
    """The random ops of a graph's attribute, () for none."""
    if not isinstance(attribute, ArrayAttr):
        return ()
    return tuple(parse(line.data) for line in attribute if isinstance(line, StringAttr))
