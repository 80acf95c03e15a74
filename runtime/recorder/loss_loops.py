"""Recognises losses that are summed in a loop over samples: `sum(loss(logits[i, :n[i]], labels[i, :n[i]]) for
i in range(len(n))) / n.sum()`.

Python runs the loop once per sample, so the loss has different ops in every batch. If each summand is made of
one sample's rows, the sum adds up over micro-batches whatever it contains. It is marked, so that an outline
has it as one tensor that is recorded for each micro-batch. So is a tensor that joins parts of samples, each
made of other rows: `torch.cat`, `torch.stack`, `pad_sequence`, or a loop that writes into rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.fold_joins import ONLY_PART
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import Recording, iter_nodes_behind

aten = torch.ops.aten
_SCALING_OPS = (aten.div.Tensor, aten.mul.Tensor)
_SPLIT_OPS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
SampleRow = tuple[fx.Node, int]  # a tensor, and the first of its rows that are used


def roll_loss_loops(recording: Recording, alone: bool = False) -> Recording:
    """Mark the sums and stacks of samples' scalars after the last block, and the tensors that join parts of
    samples for the loss, in place; return the recording. alone: it has one sample, so a part may be a whole
    tensor."""
    _mark_joins(recording, alone)
    nodes = list(recording.graph.nodes)
    last = max((i for i, n in enumerate(nodes) if n.op == "call_module"), default=-1)
    sums = [n for n in nodes[last + 1 :] if _is_sum(n) and not any(_is_sum(user) for user in n.users)]
    for node in sums:
        _roll_sum(recording.graph, node)
    for node in sums if alone else ():
        if not find_loss_loops(recording):  # of one sample, no row may have been taken
            _roll_sum(recording.graph, node, takes_whole=True)
    _restore_python_sums(recording)
    recording.graph.eliminate_dead_code(is_needed)
    return recording


def _mark_joins(recording: Recording, alone: bool) -> None:
    """Mark the tensors that join parts of samples where the loss takes them, but none that a block takes:
    those are recorded with its arguments."""
    nodes = list(recording.graph.nodes)
    taken = {n for call in recording.block_calls for n in iter_nodes_behind(call.all_input_nodes)}
    marked = set[fx.Node]()
    for node in reversed(nodes):
        if node in taken or node in marked:
            continue
        parts = [node] if alone and node.meta.get(ONLY_PART) else _joined_parts(node)
        if parts and (_are_apart(parts) or (alone and len(parts) == 1)):
            node.meta["loop"] = True
            marked |= set(iter_nodes_behind([node]))


def _joined_parts(node: fx.Node) -> list[fx.Node]:
    """Return the parts that a node joins along dim 0, none for other nodes."""
    parts: Any = []
    if node.target in (aten.stack.default, aten.cat.default) and (node.args[1:] or (0,))[0] == 0:
        parts = node.args[0]
    into: Any = node
    while (
        into.target is aten.select_scatter.default and into.args[2] == 0
    ):  # rows that are written one by one
        into, part = into.args[0], into.args[1]
        parts = [part, *parts]
    return [p for p in parts if isinstance(p, fx.Node)]


def _are_apart(parts: Sequence[fx.Node]) -> bool:
    """Whether each part is made of rows, and no two of the same row of a tensor."""
    rows_of_parts = [_rows_behind(p) for p in parts]
    return all(rows_of_parts) and sum(map(len, rows_of_parts)) == len(set[SampleRow]().union(*rows_of_parts))


def _restore_python_sums(recording: Recording) -> None:
    """Divide (or multiply) a loop's sum by the sum of an input where Python added up that input's entries, as
    in `count += int(lengths[i])`."""
    sums = dict[float, fx.Node]()
    for tensor, value in _entries_read(recording):
        sums.setdefault(value, tensor)
    for loop in find_loss_loops(recording):
        for user in [u for u in loop.users if u.target in _SCALING_OPS and len(u.args) == 2]:
            number: Any = user.args[1]
            if not isinstance(number, fx.Node) and number in sums:
                with recording.graph.inserting_before(user):
                    total = _insert_node(recording.graph, user, aten.sum.default, (sums[number],), ())
                total.meta |= {"dtype": sums[number].meta["dtype"], "requires_grad": False}
                if not total.meta["dtype"].is_floating_point:
                    total.meta["dtype"] = torch.int64
                user.args = (user.args[0], total)


def _entries_read(recording: Recording) -> Iterator[tuple[fx.Node, float]]:
    """Iterate over inputs of one number per sample that Python read completely, with their sums."""
    entries = dict[fx.Node, dict[int, float]]()
    for read in recording.reads:
        value: Any = read.value
        for tensor in read.node.all_input_nodes:
            taken = _dim0_selection(tensor)
            if tensor.op == "placeholder" and read.kind == "tolist" and len(tensor.meta["shape"]) == 1:
                entries[tensor] = dict(enumerate(read.value))
            elif taken is not None and taken[0].op == "placeholder" and isinstance(value, (int, float)):
                entries.setdefault(taken[0], {})[taken[1]] = value
    for tensor, values in entries.items():
        if tensor.meta["shape"] == (len(values),):
            yield tensor, sum(values.values())


def find_loss_loops(recording: Recording) -> list[fx.Node]:
    """Return the results of a recording's loss loops, in order."""
    return [n for n in recording.graph.nodes if n.meta.get("loop")]


def reads_per_sample(read: fx.Node, samples: int) -> bool:
    """Whether Python read numbers that belong to single samples of a batch of `samples`."""
    return all(
        _rows_behind(tensor) or tensor.meta["shape"][:1] == (samples,) for tensor in read.all_input_nodes
    )


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.meta.get("shape") == () and not node.kwargs


def _roll_sum(graph: fx.Graph, root: fx.Node, takes_whole: bool = False) -> None:
    """Replace the additions of a loop by the sum of its stacked summands. Other summands are added to it.
    takes_whole: the loop had one round, with all rows of the batch."""
    summands = list(_iter_summands(root, root))
    is_part = _takes_batch if takes_whole else _rows_behind
    per_sample = [s for s in summands if isinstance(s, fx.Node) and is_part(s)]
    scale = _common_scale(per_sample)
    inner: Any = [s.args[0] for s in per_sample] if scale is not None else per_sample
    if not (len(inner) == 1 and inner[0].meta["shape"] == () if takes_whole else _is_loop(inner)):
        return
    with graph.inserting_before(root):
        stacked = _insert_node(graph, root, aten.stack.default, (inner,), (len(inner),))
        looped_sum = _insert_node(graph, root, aten.sum.default, (stacked,), ())
        looped_sum.meta["loop"] = True
        total = (
            looped_sum if scale is None else _insert_node(graph, root, scale[0], (looped_sum, scale[1]), ())
        )
        for other in summands:
            if other not in per_sample and other != 0:
                total = _insert_node(graph, root, aten.add.Tensor, (total, other), ())
    root.replace_all_uses_with(total)


def _iter_summands(node: Any, root: fx.Node) -> Iterator[Any]:
    """Iterate over what a chain of additions adds: nodes and numbers."""
    if isinstance(node, fx.Node) and _is_sum(node) and (node is root or len(node.users) == 1):
        for arg in node.args:
            yield from _iter_summands(arg, root)
    else:
        yield node


def _common_scale(summands: list[fx.Node]) -> tuple[Any, Any] | None:
    """Return the op and the factor by which all summands are scaled, None if they differ."""
    first = summands[0] if summands else None
    if (
        first is None
        or first.target not in _SCALING_OPS
        or not isinstance(first.args[0], fx.Node)
        or first.args[0].meta["shape"] != ()
    ):
        return None
    equal = all(s.target is first.target and s.args[1:] == first.args[1:] for s in summands)
    return (first.target, first.args[1]) if equal and len(first.args) == 2 else None


def _is_loop(summands: Any) -> bool:
    """Whether these are scalars of one sample's rows each: no two of them use the same row of a tensor."""
    return bool(summands) and all(s.meta["shape"] == () for s in summands) and _are_apart(summands)


def _rows_behind(node: fx.Node) -> set[SampleRow]:
    """Return the rows that a value is made of. Empty if it is made of whole tensors of the batch, of
    another loop, or of no rows."""
    rows = set[SampleRow]()
    for n in iter_nodes_behind([node], lambda n: _row_taken(n) is not None):
        taken = _row_taken(n)
        if taken is not None:
            rows.add(taken)
        elif _is_batch_tensor(n) or "loop" in n.meta:
            return set()
    return rows


def _takes_batch(node: fx.Node) -> bool:
    """Whether a value is made of tensors of the batch."""
    return any(map(_is_batch_tensor, iter_nodes_behind([node])))


def _row_taken(node: fx.Node) -> SampleRow | None:
    """Return the row of the batch at which the part that a node takes begins; None if it takes no rows of
    the batch."""
    picked = _dim0_selection(node)
    return (
        picked if picked is not None and any(map(_is_batch_tensor, iter_nodes_behind([picked[0]]))) else None
    )


def _is_batch_tensor(node: fx.Node) -> bool:
    """Whether a value is an input or a block's result."""
    return node.op == "placeholder" or node.target is take_at_path


def _dim0_selection(node: fx.Node) -> SampleRow | None:
    """Return the tensor from which a node takes a part along dim 0, and the start of that part."""
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
