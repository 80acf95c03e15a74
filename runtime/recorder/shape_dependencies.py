"""What a recording depends on: the inputs whose shapes could have decided something.

An input that was only handed to blocks, whose results nobody has looked at, leaves no mark on what was
recorded. Every op, and every look of Python at a tensor, marks the tensors that it is given; what they come
from, through ops and blocks, matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder import nested_values
from secc.runtime.recorder.block_results import UnpredictedShape
from secc.runtime.recorder.graph_tape import Tape
from secc.runtime.recorder.recording import iter_nodes_behind


class ShapeDependencies:
    """Marks on the tensors of a tape. A result of a block whose shape is not known may stand there, but
    nobody may touch it."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._nodes: dict[fx.Node, None] = {}
        self._unknown_shapes: dict[int, torch.Tensor] = {}

    def mark_unknown_shape(self, tensor: torch.Tensor) -> None:
        """The shape of this tensor is not the one that it will have."""
        self._unknown_shapes[id(tensor)] = tensor

    def require_known_shapes(self, values: Any) -> None:
        """Raises Guess if the shape of a tensor in `values` is not known."""
        if self._unknown_shapes and any(
            id(t) in self._unknown_shapes for _, t in nested_values.iter_tensors(values)
        ):
            raise UnpredictedShape

    def mark_used(self, values: Any) -> None:
        """Something may depend on the shapes of the tensors in `values`. Raises Guess where one is not
        known."""
        self.require_known_shapes(values)
        for _, tensor in nested_values.iter_tensors(values):
            node = self._tape.find_node(tensor)
            if node is not None:
                self._nodes[node] = None

    def dependent_inputs(self) -> frozenset[str]:
        """The inputs that what was touched comes from."""
        return inputs_behind(self._nodes)


def inputs_behind(nodes: Iterable[fx.Node]) -> frozenset[str]:
    """The inputs that these nodes come from."""
    return frozenset(
        str(n.target).partition("[")[0] for n in iter_nodes_behind(nodes) if n.op == "placeholder"
    )
