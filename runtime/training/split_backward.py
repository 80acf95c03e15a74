"""A backward in two parts: the gradients of what a stage received first, because other stages wait for them,
its parameters' later.

In the graph of a micro-batch's backward, the nodes from which a received tensor can be reached *pass on*
gradients. Their other inputs (a weight's transpose, a bias) lead to parameters only. The first part runs the
nodes that pass on, for the received tensors alone, so that a product computes one gradient instead of two;
the gradients that enter nodes with other inputs are kept. The second part runs each of these nodes once more,
for its other inputs alone, and accumulates into the parameters what comes of it.

`torch.distributed.pipelining` splits its backward likewise ("Zero Bubble Pipeline Parallelism", Qi et al.,
2023). Here gradients are kept at every node, so a parameter that several nodes use gets each one's share;
what several nodes lead to is summed in the first part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

BackwardRoot = tuple[torch.Tensor, torch.Tensor]  # a tensor that the loss depends on, and its gradient
GraphInput = tuple[Any, int]  # a node of the graph and the number of one of its results
KeptGradients = dict[GraphInput, torch.Tensor | None]  # gradients that wait for the second part


def split_backward(roots: Sequence[BackwardRoot], leaves: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Compute the `.grad` of `leaves`; what is returned adds to the parameters' gradients, and must be called
    once.

    Where the graph cannot be split (a node that leads to parameters does so by ways within ways) all is done
    at once.
    """
    graph = _BackwardGraph(roots, leaves)
    ahead = [r for r in roots if r[0].grad_fn in graph.passing]
    if not ahead:
        return lambda: _run_whole_backward(roots)
    if graph.has_nested_sides():
        _run_whole_backward(roots)
        return lambda: None
    rest = [r for r in roots if r[0].grad_fn not in graph.passing]
    entries = [(n, k) for n in graph.side_inputs for k in sorted(graph.used_outputs[n])]
    summed = list(graph.shared_inputs)
    inputs: list[Any] = [*leaves, *(GradientEdge(*e) for e in (*entries, *summed))]
    found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        [t for t, _ in ahead], inputs, [g for _, g in ahead], retain_graph=True, allow_unused=True
    )
    for leaf, gradient in zip(leaves, found, strict=False):
        leaf.grad = gradient
    kept: KeptGradients = dict(zip((*entries, *summed), found[len(leaves) :], strict=True))
    return lambda: _accumulate_parameter_gradients(graph, kept, rest)


def _accumulate_parameter_gradients(
    graph: _BackwardGraph, kept: KeptGradients, rest: Sequence[BackwardRoot]
) -> None:
    """The parameters' gradients, from those that entered the nodes."""
    edges: list[torch.Tensor | GradientEdge] = [
        GradientEdge(*e) for e in graph.shared_inputs if kept[e] is not None
    ]
    gradients = [g for e in graph.shared_inputs if (g := kept[e]) is not None]
    for node, sides in graph.side_inputs.items():
        own = [GradientEdge(*e) for e in sides if e not in graph.shared_inputs]
        entered = [
            (GradientEdge(node, k), g)
            for k in sorted(graph.used_outputs[node])
            if (g := kept[node, k]) is not None
        ]
        if own and entered:
            asked, given = [e for e, _ in entered], [g for _, g in entered]
            found = cast(
                "Sequence[torch.Tensor | None]",
                torch.autograd.grad(asked, own, given, retain_graph=True, allow_unused=True),
            )
            reached = [(e, g) for e, g in zip(own, found, strict=True) if g is not None]
            edges += [e for e, _ in reached]
            gradients += [g for _, g in reached]
    edges += [t for t, _ in rest]
    gradients += [g for _, g in rest]
    if edges:
        torch.autograd.backward(edges, gradients)  # pyright: ignore[reportArgumentType]


def _run_whole_backward(roots: Sequence[BackwardRoot]) -> None:
    if roots:
        torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])


class _BackwardGraph:
    """The graph of a backward, its nodes in the order of a search from the roots, so that all ranks of a
    replica see them alike.

    `passing`: the nodes that pass on. `sides`: for each of them that has other inputs, these. `shared`: those
    that several nodes have. `used`: the results of a node whose gradients enter it.
    """

    def __init__(self, roots: Sequence[BackwardRoot], leaves: Sequence[torch.Tensor]) -> None:
        self.used_outputs: dict[Any, set[int]] = {}
        targets = {get_gradient_edge(leaf).node for leaf in leaves}
        for tensor, _ in roots:
            if tensor.grad_fn is not None:
                self.used_outputs.setdefault(tensor.grad_fn, set()).add(tensor.output_nr)
        self.order = self._topological_order()
        self.passing: set[Any] = set()
        for node in self.order:  # what a node leads to comes before it
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
        """All nodes, each behind those that it leads to."""
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

    def has_nested_sides(self) -> bool:
        """Whether one of the other inputs leads to another one: gradients kept at both would count twice."""
        tops = {edge[0] for sides in self.side_inputs.values() for edge in sides}
        below: set[Any] = set()
        for node in reversed(self.order):  # what leads to a node comes before it
            if node not in self.passing and (node in tops or node in below):
                below |= {m for m, _ in node.next_functions if m is not None}
        return bool(tops & below)
