"""Random ops in the IR: the graph's attribute `draws` lists them as texts, and glue that draws has its name
as attribute `draw`. The call of a block that draws, or that is called at several places, has the user's lines
that lead to it as attribute `site`.

A text is `dims; rows; name; place`, such as `0,2; 12*B; encoder.layers.0@model.py:18#0; model.py:18`; dims
are `-` where all samples share the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.ir import Attribute, Operation

from secc.runtime.plan.schema import Draw

ATTRIBUTE = "draws"  # of a graph
NAME = "draw"  # of a glue op
SITE = "site"  # of a call


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


def in_block(known: Iterable[Draw], path: str) -> bool:
    """Whether any of the random ops is inside the block at `path`."""
    return any(d.call.startswith(path) and d.call[len(path)] in ".@#" for d in known)


def site(op: Operation) -> str:
    """The user's lines that lead to a call, innermost first, with `<` between them; "" where they do not
    matter."""
    found = op.attributes.get(SITE)
    return found.data if isinstance(found, StringAttr) else ""
