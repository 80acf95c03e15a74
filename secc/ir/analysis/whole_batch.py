"""Sections that take all samples of a step at once, `--whole-batch NAME`.

The attribute `whole_batch` of a `sec.block` says that the block couples samples in a way that no sum over
micro-batches expresses: each of its section's replicas has one micro-batch in a step. "synchronized": batch
norms alone couple samples, so several replicas may share the samples and sum the norms' statistics. "alone":
anything may couple them, so one replica has them all.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import StringAttr

from secc.ir.dialect.ops import BlockOp, GraphOp, SectionOp, strings_of

WHOLE_BATCH_ATTRIBUTE = "whole_batch"
SYNCHRONIZED, ALONE = "synchronized", "alone"


def whole_batch_of_block(block: BlockOp) -> str:
    """Returns how a block takes the samples of a step: "" by micro-batches, else SYNCHRONIZED or ALONE."""
    attribute = block.attributes.get(WHOLE_BATCH_ATTRIBUTE)
    return attribute.data if isinstance(attribute, StringAttr) else ""


def whole_batch_of_section(graph: GraphOp, section: SectionOp) -> str:
    """Returns how the section takes the samples of a step, as the strictest of its blocks asks for. Replicas
    synchronize norms only where every sample of the section reaches them."""
    blocks = [graph.blocks[path] for path in strings_of(section.blocks) if path in graph.blocks]
    kinds = {kind for block in blocks if (kind := whole_batch_of_block(block))}
    reached = {strings_of(block.when) for block in blocks if whole_batch_of_block(block)}
    if not kinds:
        return ""
    return SYNCHRONIZED if kinds == {SYNCHRONIZED} and reached == {strings_of(section.when)} else ALONE


def find_named_blocks(graph: GraphOp, name: str) -> list[str]:
    """Returns the blocks that a module path names: the block itself, the blocks in it, or the block that it
    is a part of."""
    return [b for b in graph.blocks if f"{b}.".startswith(f"{name}.") or name.startswith(f"{b}.")]


def mark_whole_batch(graph: GraphOp, names: Iterable[str], reducing: Iterable[str]) -> None:
    """Marks the blocks that `names` name. reducing: blocks with results that are one value of all samples."""
    reducing = set(reducing)
    for path in dict.fromkeys(path for name in names for path in find_named_blocks(graph, name)):
        block = graph.blocks[path]
        norms_alone = block.couples is not None and block.couples.kind.data == "batch_norm"
        kind = SYNCHRONIZED if norms_alone and path not in reducing else ALONE
        block.attributes[WHOLE_BATCH_ATTRIBUTE] = StringAttr(kind)
