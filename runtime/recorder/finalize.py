"""Finalises a recorded graph: removes dead nodes, makes ops independent of memory layouts, and marks which
nodes carry a gradient."""

from __future__ import annotations

import torch
from torch import fx

from secc.runtime.recorder.graph_tape import MOMENT_KEYS
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import is_read_node, is_view

aten = torch.ops.aten

# A view needs strides that the fake result of a block had at capture; received tensors and fused kernels may
# have others.
_LAYOUT_FREE = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}

_IMAGE_LOSS = aten.nll_loss2d_forward.default
_GRADIENT_CUTTING_OPS = frozenset(
    (
        *("detach", "bernoulli"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)


def finalize_graph(graph: fx.Graph) -> fx.Graph:
    """Clean the graph in place and return it."""
    _drop_aliases(graph)
    for node in graph.nodes:
        if node.target in _LAYOUT_FREE:
            node.target = _LAYOUT_FREE[node.target]
    _lay_out_targets(graph)
    graph.eliminate_dead_code(is_needed)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not take_at_path:
            node.meta["requires_grad"] = _carries_gradient(node)
    graph.lint()
    return graph


def is_needed(node: fx.Node) -> bool:
    """Whether a node stays although nothing uses it."""
    return (
        node.op in ("placeholder", "output")
        or is_read_node(node)
        or "log" in node.meta
        or "kept" in node.meta
    )


def _needs_layout(node: fx.Node) -> bool:
    """Whether a value reaches, through views, what may need contiguous entries: a block, which may call
    `view`, or the loss of images, in its backward. Targets are laid out there. What a reshape copies
    (`_unsafe_view`) is contiguous anyway."""
    return any(
        user.op == "call_module"
        or (user.target is _IMAGE_LOSS and user.args[0] is node)
        or (is_view(user) and _needs_layout(user))
        for user in node.users
    )


def _lay_out_targets(graph: fx.Graph) -> None:
    """Give losses of images contiguous targets, whether the targets of this batch are so or not: a part of
    one sample's is."""
    for node in list(graph.nodes):
        if node.target is not _IMAGE_LOSS:
            continue
        target = node.args[1]
        with graph.inserting_before(node):
            copy = graph.call_function(
                aten.clone.default, (target,), {"memory_format": torch.contiguous_format}
            )
        copy.meta = {k: node.meta[k] for k in MOMENT_KEYS} | {k: target.meta[k] for k in ("shape", "dtype")}
        node.args = (node.args[0], copy, *node.args[2:])


def _drop_aliases(graph: fx.Graph) -> None:
    """Remove copies that only change the memory layout: whether a reshape needs one depends on sizes."""
    for node in list(graph.nodes):
        laid_out = (
            node.target is aten.clone.default
            and node.kwargs.get("memory_format") is torch.contiguous_format
            and not _needs_layout(node)
        )
        if laid_out or node.target in (
            aten.alias.default,
            aten.lift_fresh.default,
            aten.lift_fresh_copy.default,
        ):
            node.replace_all_uses_with(node.args[0])


def _carries_gradient(node: fx.Node) -> bool:
    """Decide as autograd does: by grad mode, inputs that require a gradient, and an op and dtype that pass
    it on."""
    if not node.meta["grad"] or is_read_node(node):
        return False
    if "carries" in node.meta:
        return node.meta["carries"]
    dtype = node.meta.get("dtype")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        return False
    if (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name.removeprefix("aten::") in _GRADIENT_CUTTING_OPS
    ):
        return False
    return any(n.meta.get("requires_grad", False) for n in node.all_input_nodes)
