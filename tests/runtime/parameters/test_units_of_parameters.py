"""Units of parameters that are gathered together."""

from __future__ import annotations

from torch import nn

from secc.runtime.parameters.zero3 import units_of_parameters
from secc.runtime.sections.recompute import units_of_blocks


def test_a_layer_that_is_a_block_and_a_part_of_another_is_in_the_remainder() -> None:
    """Statements call `attention` step by step, and forward calls its `key` before."""
    model = nn.Module()
    model.attention = nn.ModuleDict({"key": nn.Linear(2, 2), "query": nn.Linear(2, 2)})
    model.lines = nn.ModuleDict({"attention": model.attention})
    blocks = ("attention.key", "lines")
    units = units_of_blocks(model, blocks)
    assert units == [model.lines]
    found = units_of_parameters(model, units, blocks)
    assert {found[p] for p in model.attention["key"].parameters()} == {0}
    assert {found[p] for p in model.attention["query"].parameters()} == {1}
