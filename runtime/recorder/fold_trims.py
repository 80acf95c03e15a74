"""Folds joins of the samples' rows, each cut to its length, as CTC losses want their targets:
`torch.cat([t[:n] for t, n in zip(targets, lengths.tolist())])`.

Such glue has ops for each sample and numbers that Python read from the lengths. A mask made of the lengths
selects the same rows in the same order, and looks the same at every size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder.recording import Recording

aten = torch.ops.aten


@dataclass(frozen=True)
class _Lengths:
    """A tensor with a length for each sample, and the nodes by which Python read it."""

    tensor: fx.Node
    reads: tuple[fx.Node, ...]


def fold_trims(recording: Recording) -> None:
    """Replaces such joins in place, and drops the reads of their lengths."""
    folded = list[_Lengths]()
    for node in list(recording.graph.nodes):
        rows = _find_trimmed_rows(node)
        lengths = None if rows is None else _find_lengths(recording, rows[1])
        if rows is not None and lengths is not None:
            _select_by_mask(recording.graph, node, rows[0], lengths.tensor)
            folded.append(lengths)
    for read in {read for lengths in folded for read in lengths.reads}:
        recording.graph.erase_node(read)


def _find_trimmed_rows(node: fx.Node) -> tuple[fx.Node, list[int]] | None:
    """Returns a tensor and how much of each of its rows a node joins, from the first row to the last; None if
    the node is no such join."""
    if node.target is not aten.cat.default or (node.args[1:] or (0,))[0] != 0:
        return None
    parts: Any = node.args[0]
    cut = [p for p in parts if p.target is aten.slice.Tensor]
    rows = [p.args[0] if p.target is aten.slice.Tensor else p for p in parts]
    if any(p.args[1:3] != (0, 0) or len(p.args) > 4 for p in cut):
        return None
    wholes = [_take_row(row) for row in rows]
    first = wholes[0]
    if first is None or any(w != (first[0], i) for i, w in enumerate(wholes)):
        return None
    samples, *row_shape = first[0].meta["shape"]
    return (first[0], [p.meta["shape"][0] for p in parts]) if samples == len(parts) and row_shape else None


def _take_row(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns the tensor that a node takes a row from, and the row's number; None for other nodes."""
    args: Any = node.args
    if node.target is aten.select.int and args[1] == 0:
        return args[0], args[2] % args[0].meta["shape"][0]
    if node.target is operator.getitem and args[0].target is aten.unbind.int and len(args[0].args) == 1:
        return args[0].args[0], args[1]
    return None


def _find_lengths(recording: Recording, lengths: Sequence[int]) -> _Lengths | None:
    """Returns the tensor that Python read these lengths from, at once or one by one; None without one."""
    taken = dict[fx.Node, dict[int, fx.Node]]()
    for read in recording.reads:
        (tensor, *others) = read.node.all_input_nodes or [read.node]
        if others or tensor is read.node:
            continue
        if read.kind == "tolist" and read.value == list(lengths):
            return _Lengths(tensor, (read.node,))
        entry = _take_row(tensor)
        if entry is not None and entry[1] < len(lengths) and read.value == lengths[entry[1]]:
            taken.setdefault(entry[0], {})[entry[1]] = read.node
    for tensor, reads in taken.items():
        if len(reads) == len(lengths) and tuple(tensor.meta["shape"]) == (len(lengths),):
            return _Lengths(tensor, tuple(reads.values()))
    return None


def _select_by_mask(graph: fx.Graph, join: fx.Node, whole: fx.Node, lengths: fx.Node) -> None:
    """Replaces a join by the rows of `whole` that a mask of the lengths selects."""
    samples, width = whole.meta["shape"][:2]

    def add(target: Any, args: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = join.meta | {"shape": shape, "dtype": dtype, "requires_grad": False}
        return node

    integers = torch.int64
    with graph.inserting_before(join):
        places = add(aten.arange.default, (width,), integers, (width,))
        places.kwargs = {"device": torch.device("cpu")}
        column = add(aten.unsqueeze.default, (lengths, 1), lengths.meta["dtype"], (samples, 1))
        mask = add(aten.lt.Tensor, (places, column), torch.bool, (samples, width))
        rows = add(aten.index.Tensor, (whole, [mask]), whole.meta["dtype"], join.meta["shape"])
        rows.meta["requires_grad"] = join.meta["requires_grad"]
    join.replace_all_uses_with(rows)
