"""Random ops in the IR: the graph's attribute `draws` lists them as texts, and glue that draws has its name
as attribute `draw`. The call of a block that draws, or that is called at several places, has the user's lines
that lead to it as attribute `site`; that of a function that draws has the module around it in front of them.
Of a block that the same lines call several times, each call has its number as attribute `site_call`: `0/2` is
the first of two.

A text is `dims; rows; name; place`, such as `0,2; 12*B; encoder.layers.0@model.py:18#0; model.py:18`; dims
are `-` where all samples share the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.ir import Attribute, Operation

from secc.runtime.plan.call_sites import parse_call_site
from secc.runtime.plan.schema import RandomOp

RANDOM_OPS_ATTRIBUTE = "draws"  # of a graph
RANDOM_OP_ATTRIBUTE = "draw"  # of a glue op
CALL_SITE_ATTRIBUTE = "site"  # of a call
SITE_CALL_ATTRIBUTE = "site_call"  # of a call


def format_random_op(draw: RandomOp) -> str:
    """A random op as a text that `parse` reads back."""
    return "; ".join((",".join(map(str, draw.dims)) or "-", draw.rows, draw.call, draw.where))


def parse_random_op(line: str) -> RandomOp:
    """The random op of a text. Raises ValueError where it is none."""
    dims, rows, call, where = line.split("; ")
    return RandomOp(call, () if dims == "-" else tuple(map(int, dims.split(","))), rows, where)


def read_random_ops(attribute: Attribute | None) -> tuple[RandomOp, ...]:
    """The random ops of a graph's attribute, () for none."""
    if not isinstance(attribute, ArrayAttr):
        return ()
    return tuple(parse_random_op(line.data) for line in attribute if isinstance(line, StringAttr))


def has_random_op_in(known: Iterable[RandomOp], path: str) -> bool:
    """Whether one of the random ops lies inside the block at `path`."""
    return any(d.call.startswith(path) and d.call[len(path)] in ".@#" for d in known)


def draws_in_call(known: Iterable[RandomOp], path: str, site: str) -> bool:
    """Whether the call of the block at `path` draws random numbers. Those of functions belong to other
    modules, which their sites name."""
    return has_random_op_in(known, path) or parse_call_site(site)[0] is not None


def call_site(op: Operation) -> str:
    """The user's lines that lead to a call, innermost first, joined by `<`; "" where the place of the call
    does not matter."""
    found = op.attributes.get(CALL_SITE_ATTRIBUTE)
    return found.data if isinstance(found, StringAttr) else ""


def site_call(op: Operation) -> tuple[int, int]:
    """Which of the calls of a block by the same lines a call is, counted from 0, and how many there are."""
    found = op.attributes.get(SITE_CALL_ATTRIBUTE)
    if not isinstance(found, StringAttr):
        return 0, 1
    number, _, calls = found.data.partition("/")
    return int(number), int(calls)
