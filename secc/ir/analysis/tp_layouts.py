"""Makes `sec.cut` ops: how a module inside a block can be cut over the ranks of a replica."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import gcd

from xdsl.dialects.builtin import ArrayAttr, IntAttr, IntegerAttr, StringAttr

from secc.ir.analysis.dataflow import get_strings
from secc.ir.dialect.ops import CutOp, GraphOp, SectionOp, strings_attr, strings_of
from secc.runtime.plan.schema import Shard

UNDIVIDED_PATTERN = re.compile(
    r"does not divide (?:its )?(\d+ \w+)$"
)  # ends the reason of what stays whole because of its size
LARGEST_TP = 64  # ranks of a replica, where those that could be are named


def format_shard(shard: Shard) -> str:
    """`"layer.weight 0 8,8"`."""
    return f"{shard.name} {shard.dim} {','.join(map(str, shard.parts))}"


def make_cut_op(
    path: str,
    block: str,
    tp: int,
    shards: Iterable[Shard],
    styles: Iterable[str] = (),
    partial: Iterable[str] = (),
    whole: Iterable[str] = (),
) -> CutOp:
    """A cut of the module at `path` over `tp` ranks; `block` is "" where glue alone reads its parameters."""
    return CutOp.create(
        properties={
            "path": StringAttr(path),
            "block": StringAttr(block),
            "tp": IntAttr(tp),
            "styles": strings_attr(styles),
            "shards": strings_attr(map(format_shard, shards)),
            "partial": strings_attr(partial),
            "whole": strings_attr(whole),
        }
    )


def feasible_tp(graph: GraphOp, section: SectionOp) -> list[int]:
    """The tp above 1 that the section's blocks were found to take; blocks in which there is nothing to cut do
    not matter."""
    declared = graph.blocks
    found = [declared[path].attributes.get("tp") for path in strings_of(section.blocks)]
    listed = [
        {int(i.value.data) for i in values if isinstance(i, IntegerAttr)}
        for values in found
        if isinstance(values, ArrayAttr)
    ]
    return sorted(set.intersection(*listed)) if listed else []


def shared_sizes(graph: GraphOp, section: SectionOp) -> list[str]:
    """What the ranks of a replica would share evenly, as far as it is known: "8 heads", "512 outputs"."""
    return list(
        dict.fromkeys(
            size for path in strings_of(section.blocks) for size in get_strings(graph.blocks[path], "shared")
        )
    )


def undivided_sizes(reasons: Iterable[str]) -> list[str]:
    """What a tp does not divide, of the reasons why modules stay whole."""
    return list(dict.fromkeys(found[1] for reason in reasons if (found := UNDIVIDED_PATTERN.search(reason))))


def dividing_tp(sizes: Iterable[str]) -> list[int]:
    """The tp above 1, up to `MOST`, that divide all of these."""
    common = gcd(*(int(size.split()[0]) for size in sizes))
    return [tp for tp in range(2, LARGEST_TP + 1) if common % tp == 0]
