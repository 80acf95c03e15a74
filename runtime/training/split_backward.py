"""A backward in two parts: first the gradients of received tensors, for which other pipeline stages wait,
later those of the parameters (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

In the autograd graph of a micro-batch, call a node *passing* if a received tensor can be reached from it. Its
other inputs (a transposed weight, a bias) lead to parameters only: the *side inputs*. The first part runs the
passing nodes for the received tensors alone, so that a matrix product computes one gradient instead of two,
and keeps the gradients that enter nodes with side inputs. The second part runs each of these nodes once more
for its side inputs alone, and accumulates the results into the parameters.

`torch.distributed.pipelining` splits its backwards in a similar way. Here the gradients are kept at every
node, so a parameter that several nodes use receives each node's share; a side input shared by several nodes
is summed in the first part.

The second part goes through a few nodes at a time, those of the last layers first: gradients of weights are
accumulated before the next ones are computed, so a rank has few of them twice, and the last second part of a
step makes buckets of gradients final one after the other, as a whole backward does. Nodes that lead to the
same parameter stay together, so each parameter is accumulated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

PART_NODES = 4  # nodes with side inputs that the second part computes before it accumulates their gradients

BackwardRoot = tuple[torch.Tensor, torch.Tensor]  # a tensor that the loss depends on, and its gradient
GraphInput = tuple[Any, int]  # a node of the autograd graph and the index of one of its outputs
KeptGradients = dict[GraphInput, torch.Tensor | None]  # gradients kept for the second part


def split_backward(roots: Sequence[BackwardRoot], leaves: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Computes the `.grad` of `leaves`, each in the shape of its leaf. Returns a function, to be called once,
    that accumulates the gradients of the parameters.

    A graph that cannot be split (a side input leads to another side input) runs as one backward.
    """
    graph = _BackwardGraph(roots, leaves)
    passing_roots = [r for r in roots if r[0].grad_fn in graph.passing]
    if not passing_roots:
        return lambda: _run_whole_backward(roots)
    if graph.has_nested_sides():
        _run_whole_backward(roots)
        return lambda: None
    side_roots = [r for r in roots if r[0].grad_fn not in graph.passing]
    node_outputs = [(n, k) for n in graph.side_inputs for k in sorted(graph.used_outputs[n])]
    summed = list(graph.shared_inputs)
    inputs: list[Any] = [*leaves, *(GradientEdge(*e) for e in (*node_outputs, *summed))]
    gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        [t for t, _ in passing_roots],
        inputs,
        [g for _, g in passing_roots],
        retain_graph=True,
        allow_unused=True,
    )
    for leaf, gradient in zip(leaves, gradients, strict=False):
        leaf.grad = gradient
    kept: KeptGradients = dict(zip((*node_outputs, *summed), gradients[len(leaves) :], strict=True))
    return lambda: _accumulate_parameter_gradients(graph, kept, side_roots)


def _accumulate_parameter_gradients(
    graph: _BackwardGraph, kept: KeptGradients, side_roots: Sequence[BackwardRoot]
) -> None:
    """Accumulates the parameters' gradients from the gradients that entered the passing nodes, which are
    dropped from `kept`."""
    for part in graph.divide_sides(side_roots):
        edges: list[torch.Tensor | GradientEdge] = []
        gradients: list[torch.Tensor] = []
        summed = dict.fromkeys(
            e for n in part.nodes for e in graph.side_inputs[n] if e in graph.shared_inputs
        )
        for shared in summed:
            if (total := kept.pop(shared)) is not None:
                edges.append(GradientEdge(*shared))
                gradients.append(total)
        for node in part.nodes:
            sides_of_node = [GradientEdge(*e) for e in graph.side_inputs[node] if e not in summed]
            entered = [
                (GradientEdge(node, k), g)
                for k in sorted(graph.used_outputs[node])
                if (g := kept.pop((node, k))) is not None
            ]
            if sides_of_node and entered:
                outputs, output_gradients = [e for e, _ in entered], [g for _, g in entered]
                side_gradients = cast(
                    "Sequence[torch.Tensor | None]",
                    torch.autograd.grad(
                        outputs, sides_of_node, output_gradients, retain_graph=True, allow_unused=True
                    ),
                )
                reached = [
                    (e, g) for e, g in zip(sides_of_node, side_gradients, strict=True) if g is not None
                ]
                edges += [e for e, _ in reached]
                gradients += [g for _, g in reached]
        # One backward over everything collected, so that each side graph runs once.
        edges += [t for t, _ in part.roots]
        gradients += [g for _, g in part.roots]
        if edges:
            torch.autograd.backward(edges, gradients)  # pyright: ignore[reportArgumentType]


def _run_whole_backward(roots: Sequence[BackwardRoot]) -> None:
    if roots:
        torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])


@dataclass
class _SidePart:
    """Passing nodes and roots, with side graphs that run together in one backward."""

    nodes: list[Any]
    roots: list[BackwardRoot]


class _BackwardGraph:
    """The autograd graph below `roots`. Its nodes are in the order of a depth-first search from the roots,
    which is the same on all ranks of a replica (their second parts contain collectives).

    `passing`: nodes from which a leaf can be reached. `side_inputs`: the other inputs of each passing node
    that has some. `shared_inputs`: side inputs of several nodes. `used_outputs`: outputs of each node that
    receive a gradient.
    """

    def __init__(self, roots: Sequence[BackwardRoot], leaves: Sequence[torch.Tensor]) -> None:
        # In torch 2.11 the node of an autograd.Function ends with the last tensor above it, even if an object
        # refers to it. These edges keep what is below the roots until the second part has run.
        self.root_edges = [get_gradient_edge(tensor) for tensor, _ in roots if tensor.requires_grad]
        self.used_outputs: dict[Any, set[int]] = {}
        targets = {get_gradient_edge(leaf).node for leaf in leaves}
        for tensor, _ in roots:
            if tensor.grad_fn is not None:
                self.used_outputs.setdefault(tensor.grad_fn, set()).add(tensor.output_nr)
        self.order = self._topological_order()
        self.passing: set[Any] = set()
        for node in self.order:  # inputs come before the nodes that use them
            if node in targets or any(m in self.passing for m, _ in node.next_functions):
                self.passing.add(node)
        self.side_inputs: dict[Any, list[GraphInput]] = {}
        for node in self.order:
            sides = list(
                dict.fromkeys(
                    (m, k) for m, k in node.next_functions if m is not None and m not in self.passing
                )
            )
            if node in self.passing and sides:
                self.side_inputs[node] = sides
        counts = Counter(edge for sides in self.side_inputs.values() for edge in sides)
        self.shared_inputs = {edge: None for edge, count in counts.items() if count > 1}

    def _topological_order(self) -> list[Any]:
        """Returns all nodes, each after the nodes that it leads to."""
        order: list[Any] = []
        seen: set[Any] = set()
        stack: list[tuple[Any, bool]] = [(node, False) for node in self.used_outputs]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                for after, k in node.next_functions:
                    if after is not None:
                        self.used_outputs.setdefault(after, set()).add(k)
                        stack.append((after, False))
        return order

    def divide_sides(self, side_roots: Sequence[BackwardRoot]) -> list[_SidePart]:
        """Divides the nodes with side inputs and the roots into parts of `PART_NODES` or more, no two of
        which lead to the same node. Parts are in the order of a backward, the same on all ranks of a replica,
        since it depends on the graph alone."""
        units: list[
            tuple[list[Any], list[Any], list[BackwardRoot]]
        ] = [  # where its side graphs begin, node, root
            ([get_gradient_edge(root[0]).node], [], [root]) for root in side_roots
        ]
        units += [([m for m, _ in self.side_inputs[n]], [n], []) for n in reversed(self.side_inputs)]
        parent, owner = list(range(len(units))), dict[Any, int]()

        def find_first(unit: int) -> int:
            while parent[unit] != unit:
                parent[unit] = unit = parent[parent[unit]]
            return unit

        for unit, (tops, _, _) in enumerate(units):
            stack = list(tops)
            while stack:
                node = stack.pop()
                if node in owner:
                    first, second = sorted((find_first(unit), find_first(owner[node])))
                    parent[second] = first
                    continue
                owner[node] = unit
                stack += [m for m, _ in node.next_functions if m is not None]
        together: dict[int, _SidePart] = {}
        for unit, (_, nodes, roots) in enumerate(units):
            found = together.setdefault(find_first(unit), _SidePart([], []))
            found.nodes += nodes
            found.roots += roots
        parts = [_SidePart([], [])]
        for part in together.values():
            if len(parts[-1].nodes) + len(parts[-1].roots) >= PART_NODES:
                parts.append(_SidePart([], []))
            parts[-1].nodes += part.nodes
            parts[-1].roots += part.roots
        return parts

    def has_nested_sides(self) -> bool:
        """Whether a side input leads to another side input: gradients kept at both would be counted twice."""
        tops = {edge[0] for sides in self.side_inputs.values() for edge in sides}
        below: set[Any] = set()
        for node in reversed(self.order):  # reversed: users come before their inputs
            if node not in self.passing and (node in tops or node in below):
                below |= {m for m, _ in node.next_functions if m is not None}
        return bool(tops & below)
