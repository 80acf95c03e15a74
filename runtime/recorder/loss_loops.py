"""Losses that are summed in a loop over samples: `sum(loss(logits[i, :n[i]], labels[i, :n[i]]) for i in
range(len(n))) / n.sum()`.

Python runs the loop as often as a batch has samples, so the loss has other ops in every batch. Where each
summand is made of one sample's rows, the sum adds up over micro-batches whatever is in it: it is marked, so
that an outline has it as one tensor that is recorded anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import Recording, iter_nodes_behind

aten = torch.ops.aten
_SCALING_OPS = (aten.div.Tensor, aten.mul.Tensor)
_SPLIT_OPS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
SampleRow = tuple[fx.Node, int]  # a tensor, and the first of its rows that are looked at


def roll_loss_loops(recording: Recording) -> Recording:
    """Mark the sums and stacks of samples' scalars behind the last block, in place; the same recording."""
    nodes = list(recording.graph.nodes)
    last = max((i for i, n in enumerate(nodes) if n.op == "call_module"), default=-1)
    for node in nodes[last + 1 :]:
        if node.target is aten.stack.default and _is_loop(node.args[0]):  # type: ignore[arg-type]
            node.meta["loop"] = True
        elif _is_sum(node) and not any(_is_sum(user) for user in node.users):
            _roll_sum(recording.graph, node)
    recording.graph.eliminate_dead_code(is_needed)
    return recording


def find_loss_loops(recording: Recording) -> list[fx.Node]:
    """What the loops of a recording make, in order."""
    return [n for n in recording.graph.nodes if n.meta.get("loop")]


def reads_per_sample(read: fx.Node, samples: int) -> bool:
    """Whether Python read numbers of which each belongs to one sample of a batch of so many."""
    return all(
        _rows_behind(tensor) or tensor.meta["shape"][:1] == (samples,) for tensor in read.all_input_nodes
    )


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.meta.get("shape") == () and not node.kwargs


def _roll_sum(graph: fx.Graph, root: fx.Node) -> None:
    """Put the sum of a loop's summands, stacked, in the place of the additions; what else is added stays
    beside it."""
    summands = list(_iter_summands(root, root))
    own = [s for s in summands if isinstance(s, fx.Node) and _rows_behind(s)]
    scale = _common_scale(own)
    inner = [s.args[0] for s in own] if scale is not None else own
    if not _is_loop(inner):
        return
    with graph.inserting_before(root):
        stacked = _insert_node(graph, root, aten.stack.default, (inner,), (len(inner),))
        made = _insert_node(graph, root, aten.sum.default, (stacked,), ())
        made.meta["loop"] = True
        found = made if scale is None else _insert_node(graph, root, scale[0], (made, scale[1]), ())
        for other in summands:
            if other not in own and other != 0:
                found = _insert_node(graph, root, aten.add.Tensor, (found, other), ())
    root.replace_all_uses_with(found)


def _iter_summands(node: Any, root: fx.Node) -> Iterator[Any]:
    """What a chain of additions adds: nodes and numbers."""
    if isinstance(node, fx.Node) and _is_sum(node) and (node is root or len(node.users) == 1):
        for arg in node.args:
            yield from _iter_summands(arg, root)
    else:
        yield node


def _common_scale(summands: list[fx.Node]) -> tuple[Any, Any] | None:
    """The op and the number or tensor by which all summands are scaled alike, None if there is none."""
    first = summands[0] if summands else None
    if (
        first is None
        or first.target not in _SCALING_OPS
        or not isinstance(first.args[0], fx.Node)
        or first.args[0].meta["shape"] != ()
    ):
        return None
    alike = all(s.target is first.target and s.args[1:] == first.args[1:] for s in summands)
    return (first.target, first.args[1]) if alike and len(first.args) == 2 else None


def _is_loop(summands: Any) -> bool:
    """Whether these are scalars of one sample's rows each: of every tensor that they look into each has other
    rows."""
    found = [_rows_behind(s) for s in summands]
    if not found or not all(found) or any(s.meta["shape"] != () for s in summands):
        return False
    looked = [{(tensor, row) for tensor, row in rows} for rows in found]
    return sum(map(len, looked)) == len(set().union(*looked))


def _rows_behind(node: fx.Node) -> set[SampleRow]:
    """The rows that a value is made of, none if it is made of whole tensors of the batch, of another loop, or
    of no rows."""
    rows = set[SampleRow]()
    for n in iter_nodes_behind([node], lambda n: _row_taken(n) is not None):
        own = _row_taken(n)
        if own is not None:
            rows.add(own)
        elif _is_batch_tensor(n) or "loop" in n.meta:
            return set()
    return rows


def _row_taken(node: fx.Node) -> SampleRow | None:
    """The rows of the batch that a node takes."""
    picked = _dim0_selection(node)
    return (
        picked if picked is not None and any(map(_is_batch_tensor, iter_nodes_behind([picked[0]]))) else None
    )


def _is_batch_tensor(node: fx.Node) -> bool:
    """Whether a value is an input or a block's result."""
    return node.op == "placeholder" or node.target is take_at_path


def _dim0_selection(node: fx.Node) -> SampleRow | None:
    """The tensor that a node takes a part of along dim 0, and where that begins."""
    args: Any = node.args
    if node.target is aten.select.int and args[1] % len(args[0].meta["shape"]) == 0:
        return args[0], args[2] % args[0].meta["shape"][0]
    if (
        node.target is aten.slice.Tensor
        and len(args) == 4
        and args[1] == 0
        and node.meta["shape"][0] < args[0].meta["shape"][0]
    ):
        return args[0], args[2]
    if (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and args[0].target in _SPLIT_OPS
    ):
        position = 1 if args[0].target is aten.unbind.int else 2
        dim = args[0].args[position] if len(args[0].args) > position else 0
        return (args[0].args[0], args[1]) if dim == 0 else None
    return None


def _insert_node(
    graph: fx.Graph, at: fx.Node, target: Any, args: tuple[Any, ...], shape: tuple[int, ...]
) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {k: v for k, v in at.meta.items() if k not in ("log", "loop")} | {"shape": shape}
    return node
