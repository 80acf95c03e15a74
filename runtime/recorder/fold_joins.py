"""Folds glue that takes a tensor apart along a dim and joins all parts again: `torch.cat(list(features))`.

Such glue has one op per image but is a reshape. Folding it before captures are compared makes it the same at
every size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.fold_parts import fold_parts
from secc.runtime.recorder.fold_trims import fold_trims
from secc.runtime.recorder.recording import Recording

aten = torch.ops.aten
ONLY_PART = "only part"  # in a node's meta: glue joined it with the parts of other samples, if there were any
_JOIN_OPS = (aten.cat.default, aten.stack.default)
_GROWING_LIST = "*"  # in the name of an input that has the tensors of such a list one behind the other


def fold_joins(recording: Recording, loops: Collection[str] = ()) -> Recording:
    """Replace joins of all parts of one tensor or of its trimmed rows, in place, and loops over parts; return
    the recording. `loops` are lines that other recordings have as `folded_loops`."""
    fold_trims(recording)
    never_split = set[fx.Node]()
    for node in list(recording.graph.nodes):
        if (only := _only_part(node)) is not None:
            if node.target is not aten.cat.default:
                never_split.add(only)
            elif only not in never_split and only.target is not operator.getitem:
                only.meta[ONLY_PART] = True
            node.replace_all_uses_with(only)
        elif node.target in _JOIN_OPS:
            source = _split_source(node.args[0])
            dim = _dim_argument(node, 1, node.meta["shape"])
            if source is None:
                continue
            if source.target is aten.unbind.int:
                _replace_join(recording.graph, node, source, dim)
            elif node.target is aten.cat.default and dim == _dim_argument(source, 2, node.meta["shape"]):
                node.replace_all_uses_with(source.args[0])
    recording.graph.eliminate_dead_code(is_needed)
    return fold_parts(recording, loops)


def _only_part(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node splits into a single part, or joins as the only one; None for other
    nodes, and for a list in the batch that has the tensor of one sample: it grows with the samples."""
    args: Any = node.args
    if node.target is aten.cat.default and len(args[0]) == 1:
        return args[0][0]
    if node.target is operator.getitem and args[0].target in (
        aten.split.Tensor,
        aten.split_with_sizes.default,
    ):
        source = args[0].args[0]
        is_growing_list = source.op == "placeholder" and _GROWING_LIST in str(source.target)
        return source if _count_parts(args[0]) == 1 and not is_growing_list else None
    return None


def _split_source(parts: object) -> fx.Node | None:
    """Return the unbind or split that has `parts` as all its results, in order; None if there is none."""
    if not isinstance(parts, (list, tuple)) or not parts:
        return None
    source = parts[0].args[0] if parts[0].target is operator.getitem else None
    if source is None or source.target not in (
        aten.unbind.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    ):
        return None
    if any(p.target is not operator.getitem or p.args != (source, i) for i, p in enumerate(parts)):
        return None
    return source if len(parts) == _count_parts(source) else None


def _count_parts(source: fx.Node) -> int:
    shape = source.args[0].meta["shape"]  # type: ignore[union-attr]
    if source.target is aten.unbind.int:
        return shape[_dim_argument(source, 1, shape)]
    if source.target is aten.split_with_sizes.default:
        return len(source.args[1])  # type: ignore[arg-type]
    size = int(source.args[1])  # type: ignore[call-overload]
    return -(-shape[_dim_argument(source, 2, shape)] // size)


def _dim_argument(node: fx.Node, position: int, shape: tuple[int, ...]) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(dim) % len(shape)  # type: ignore[call-overload]


def _replace_join(graph: fx.Graph, node: fx.Node, source: fx.Node, dim: int) -> None:
    """Replace the join of an unbind: move the unbound dim to `dim`, and merge it with the next one unless
    the parts were stacked."""
    whole: fx.Node = source.args[0]  # type: ignore[assignment]
    unbound_dim = _dim_argument(source, 1, whole.meta["shape"])
    with graph.inserting_before(node):
        if unbound_dim != dim:
            order = [d for d in range(len(whole.meta["shape"])) if d != unbound_dim]
            order.insert(dim, unbound_dim)
            shape = tuple(whole.meta["shape"][d] for d in order)
            whole = _insert_node(graph, aten.permute.default, (whole, order), node.meta | {"shape": shape})
        if node.target is aten.cat.default:
            whole = _insert_node(graph, aten.reshape.default, (whole, list(node.meta["shape"])), node.meta)
    node.replace_all_uses_with(whole)


def _insert_node(graph: fx.Graph, target: object, args: tuple[object, ...], meta: dict[str, Any]) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = dict(meta)
    return node
