"""The layers that blocks run: numbered members of a module that holds several of them, or parts of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from secc.ir.analysis.dataflow import get_string
from secc.ir.dialect.ops import LARGEST_PART_ATTRIBUTE, PART_OF_LAYER_ATTRIBUTE, BlockOp


def layers_of_blocks(blocks: Iterable[BlockOp]) -> dict[str, str]:
    """Returns the path of its layer for the path of each block that is a layer or a part of one."""
    around = {b.path.data: layer_path(b) for b in blocks}
    numbered = {path: layer for path, layer in around.items() if layer.rpartition(".")[2].isdecimal()}
    members = Counter(layer.rpartition(".")[0] for layer in {*numbered.values()})
    return {path: layer for path, layer in numbered.items() if members[layer.rpartition(".")[0]] > 1}


def layer_path(block: BlockOp) -> str:
    """Returns the path of the layer that a block is a part of, or the block's own path."""
    return get_string(block, PART_OF_LAYER_ATTRIBUTE) or block.path.data


def is_part_of_layer(block: BlockOp) -> bool:
    """Whether a block is a part of a layer that was captured in several blocks."""
    return PART_OF_LAYER_ATTRIBUTE in block.attributes


def counts_as_layer(block: BlockOp) -> bool:
    """Whether a block is counted where layers are: of a layer in several blocks, only the largest one is."""
    return not is_part_of_layer(block) or LARGEST_PART_ATTRIBUTE in block.attributes
