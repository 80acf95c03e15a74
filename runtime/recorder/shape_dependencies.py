"""Finds the inputs with shapes that may have decided something in a recording.

An input that was only passed to blocks, with results that nothing reads, leaves no mark on what was recorded.
Every op, and every access of Python to a tensor, marks the tensors that it is given; all inputs that these
are computed from, through ops and blocks, count.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from secc.runtime.randomness.random_op_values import is_random
from secc.runtime.recorder import nested_values
from secc.runtime.recorder.block_results import UnpredictedShape
from secc.runtime.recorder.graph_tape import Tape
from secc.runtime.recorder.recording import iter_nodes_behind, writes_argument


class ShapeDependencies:
    """Marks on the tensors of a tape. A block's result with an unknown shape may be passed on, but must
    not be used."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._nodes: dict[fx.Node, None] = {}
        self._unknown_shapes: dict[int, torch.Tensor] = {}

    def mark_unknown_shape(self, tensor: torch.Tensor) -> None:
        """Mark that this tensor's shape is not the one that it will have."""
        self._unknown_shapes[id(tensor)] = tensor

    def require_known_shapes(self, values: Any) -> None:
        """Raise UnpredictedShape if a tensor in `values` has an unknown shape."""
        if self._unknown_shapes and any(
            id(t) in self._unknown_shapes for _, t in nested_values.iter_tensors(values)
        ):
            raise UnpredictedShape

    def mark_used(self, values: Any) -> None:
        """Mark that something may depend on the shapes of the tensors in `values`. Raises UnpredictedShape
        if one is unknown."""
        self.require_known_shapes(values)
        for _, tensor in nested_values.iter_tensors(values):
            node = self._tape.find_node(tensor)
            if node is not None:
                self._nodes[node] = None

    def dependent_inputs(self) -> frozenset[str]:
        """Return the inputs that used tensors are computed from."""
        return inputs_behind(self._nodes)


def inputs_behind(nodes: Iterable[fx.Node]) -> frozenset[str]:
    """Return the names of the inputs that these nodes are computed from."""
    return frozenset(
        str(n.target).partition("[")[0] for n in iter_nodes_behind(nodes) if n.op == "placeholder"
    )


class FixedNodes:
    """Tells which nodes of a graph that is being recorded are computed in glue from sizes and weights alone,
    by ops that draw no random numbers, and from nothing that was written to.

    Layers are called one after the other, each with the same masks and positions, so each node is looked at
    once, and what was written to is kept up to date as the graph grows.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._last = graph._root  # the last node that was looked at
        self._is_plain = dict[fx.Node, bool]()  # whether nodes are computed from sizes and weights alone
        self._written = set[fx.Node]()  # what was written to, and what that is computed from

    def is_fixed(self, node: fx.Node) -> bool:
        """Whether a node is one of them."""
        while self._last.next.op != "root":
            self._last = self._last.next
            self._is_plain[self._last] = _is_plain_op(self._last) and all(
                self._is_plain[n] for n in self._last.all_input_nodes
            )
            if writes_argument(self._last):
                written = self._last.all_input_nodes[:1]
                self._written |= {*iter_nodes_behind(written, self._written.__contains__)}
        return self._is_plain[node] and self._written.isdisjoint(iter_nodes_behind([node]))


def _is_plain_op(node: fx.Node) -> bool:
    """Whether a node is a weight, or an op that draws no random numbers."""
    return (
        node.op == "get_attr"
        or node.target is operator.getitem
        or (
            isinstance(node.target, torch._ops.OpOverload)
            and not is_random(node.target, node.args, node.kwargs)
        )
    )
