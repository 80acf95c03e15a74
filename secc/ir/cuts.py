"""Makes `sec.cut` ops: how a module inside a block can be cut over the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import IntAttr, StringAttr

from secc.ir.dialect import CutOp, texts
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
