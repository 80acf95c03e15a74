"""Makes `sec.cut` ops: how a module inside a block can be cut over the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ArrayAttr, IntAttr, IntegerAttr, StringAttr

from secc.ir.dialect import CutOp, GraphOp, SectionOp, strings, texts
from secc.runtime.plan import Shard


def shard_text(shard: Shard) -> str:
    """`"layer.weight 0 8,8"`."""
    return f"{shard.name} {shard.dim} {','.join(map(str, shard.parts))}"


def cut_op(
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
            "styles": texts(styles),
            "shards": texts(map(shard_text, shards)),
            "partial": texts(partial),
            "whole": texts(whole),
        }
    )


def cuttable(graph: GraphOp, section: SectionOp) -> list[int]:
    """The tp above 1 that the section's blocks were found to take; blocks in which there is nothing to cut do not matter."""
    declared = graph.blocks
    found = [declared[path].attributes.get("tp") for path in strings(section.blocks)]
    listed = [{int(i.value.data) for i in values if isinstance(i, IntegerAttr)} for values in found if isinstance(values, ArrayAttr)]
    return sorted(set.intersection(*listed)) if listed else []
