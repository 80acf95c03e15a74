"""What the ranks of a context-parallel replica exchange, with gradients.

The loss is the sum over ranks of what each computes with its own rows. So a gradient inside a section is a
rank's summand, and these functions keep it one:

    gather_rows     rows to the whole; gradients are summed over ranks, and each keeps its own rows
    sum_over_ranks  summands to their sum; gradients are summed over ranks
    enter_section   a whole tensor from outside, the same on all ranks; its gradient leaves complete
    leave_section   a whole tensor to outside; its complete gradient counts on the first rank alone
    leave_rows      rows to a whole tensor outside; each rank takes its rows of the complete gradient
    rows_to_heads   a rank's rows of all heads to all rows of its share of the heads; gradients go back
    heads_to_rows   the reverse

Sums are in float32 at least. A rank may have no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from secc.runtime.context_parallel.row_marks import RowMark, Rows, mark_of
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup


def take_rows(whole: torch.Tensor, mark: RowMark, index: int) -> torch.Tensor:
    """Returns rank `index`'s rows of `whole`, along the dim of `mark`, in memory of their own."""
    if not mark.is_plain:
        return whole.index_select(mark.dim, mark.entries(index, whole.device))
    pieces = [whole.narrow(mark.dim, start, stop - start) for start, stop in mark.rows.runs[index]]
    return torch.cat(pieces, mark.dim) if pieces else whole.narrow(mark.dim, 0, 0).clone()


def _rows_first(tensor: torch.Tensor, mark: RowMark) -> torch.Tensor:
    """Returns a tensor as [rows, other entries]."""
    before, after = tensor.shape[: mark.dim].numel() * mark.outer, tensor.shape[mark.dim + 1 :].numel()
    rows = tensor.shape[mark.dim] // (mark.outer * mark.inner)
    return (
        tensor.reshape(before, rows, mark.inner * after)
        .transpose(0, 1)
        .reshape(rows, before * mark.inner * after)
    )


def _rows_back(table: torch.Tensor, mark: RowMark, shape: Sequence[int]) -> torch.Tensor:
    """Returns [rows, other entries] in the shape of a tensor that has along the marked dim as many rows
    as the table has."""
    before, after = shape[: mark.dim], shape[mark.dim + 1 :]
    outer, inner = torch.Size(before).numel() * mark.outer, mark.inner * torch.Size(after).numel()
    rows = table.shape[0]
    return (
        table.reshape(rows, outer, inner)
        .transpose(0, 1)
        .reshape([*before, mark.outer * rows * mark.inner, *after])
    )


def _index_tensor(order: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(order, dtype=torch.int64, device=device)


def _gather_table(own: torch.Tensor, rows: Rows, group: ReplicaGroup) -> torch.Tensor:
    """Returns the rows of all ranks [rows.size, entries] in order, given this rank's rows."""
    entries, sent = own.shape[1], own.contiguous().view(-1)
    sent = sent.view(torch.uint8) if own.dtype == torch.bool else sent
    table = group.all_gather(sent, [n * entries for n in rows.counts]).view(rows.size, entries)
    table = table.view(torch.bool) if own.dtype == torch.bool else table
    if rows.is_in_order:
        return table
    return torch.empty_like(table).index_copy_(0, _index_tensor(rows.order, own.device), table)


def _scatter_sum(table: torch.Tensor, rows: Rows, group: ReplicaGroup) -> torch.Tensor:
    """Returns this rank's rows of the sum of [rows.size, entries] over all ranks, in float32 at least."""
    if not rows.is_in_order:
        table = table.index_select(0, _index_tensor(rows.order, table.device))
    table = _widen(table).contiguous()
    counts = [n * table.shape[1] for n in rows.counts]
    return group.reduce_scatter(table.view(-1), counts).view(rows.counts[group.index], table.shape[1])


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _GatherRows(torch.autograd.Function):
    """Gathers tensors of one dtype and one deal of rows in one exchange."""

    @staticmethod
    def forward(ctx: Any, group: ReplicaGroup, marks: tuple[RowMark, ...], *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.marks, ctx.dtype = group, marks, tensors[0].dtype
        tables = [_rows_first(t, m) for t, m in zip(tensors, marks, strict=True)]
        ctx.widths = [t.shape[1] for t in tables]
        ctx.shapes = [tuple(t.shape) for t in tensors]
        whole = _gather_table(torch.cat(tables, 1), marks[0].rows, group).split(ctx.widths, 1)
        return tuple(map(_rows_back, whole, marks, ctx.shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tables = [_rows_first(g, m) for g, m in zip(gradients, ctx.marks, strict=True)]
        own = _scatter_sum(torch.cat(tables, 1), ctx.marks[0].rows, ctx.group).to(ctx.dtype)
        return (None, None, *map(_rows_back, own.split(ctx.widths, 1), ctx.marks, ctx.shapes))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return group.all_reduce(_widen(x).clone(memory_format=torch.contiguous_format)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = ctx.group.all_reduce(_widen(gradient).clone(memory_format=torch.contiguous_format))
        return total.to(gradient.dtype), None


class _EnterSection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = ctx.group.all_reduce(_widen(gradient).clone(memory_format=torch.contiguous_format))
        return total.to(gradient.dtype), None


class _LeaveSection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.is_first = group.index == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient if ctx.is_first else torch.zeros_like(gradient), None


class _LeaveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: RowMark, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark, ctx.index = mark, group.index
        return _rows_back(_gather_table(_rows_first(x, mark), mark.rows, group), mark, x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return take_rows(gradient, ctx.mark, ctx.index), None, None


def _send_rows(tensors: Sequence[torch.Tensor], rows: Rows, group: ReplicaGroup) -> list[torch.Tensor]:
    """Sends to each rank its share of the heads of this rank's rows; returns all rows, in order, of this
    rank's heads. Tensors are [samples, heads, rows, width]."""
    shares = [t.chunk(group.size, 1) for t in tensors]
    sent = [torch.cat([share[rank].flatten() for share in shares]) for rank in range(group.size)]
    sizes = [sum(share[0].shape[:2].numel() * share[0].shape[3] for share in shares) * n for n in rows.counts]
    arrived = group.all_to_all(torch.cat(sent), [s.numel() for s in sent], sizes).split(sizes)
    pieces = [list[torch.Tensor]() for _ in tensors]
    for flat, count in zip(arrived, rows.counts, strict=True):
        shapes = [(*share[0].shape[:2], count, share[0].shape[3]) for share in shares]
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        for found, part, shape in zip(pieces, parts, shapes, strict=True):
            found.append(part.view(shape))
    whole = [torch.cat(found, 2) for found in pieces]
    if rows.is_in_order:
        return whole
    order = _index_tensor(rows.order, whole[0].device)
    return [torch.empty_like(t).index_copy_(2, order, t) for t in whole]


def _return_rows(tensors: Sequence[torch.Tensor], rows: Rows, group: ReplicaGroup) -> list[torch.Tensor]:
    """Sends to each rank its rows of this rank's heads; returns this rank's rows of all heads. Tensors are
    [samples, heads, rows, width]."""
    if not rows.is_in_order:
        order = _index_tensor(rows.order, tensors[0].device)
        tensors = [t.index_select(2, order) for t in tensors]
    by_rank = [t.split(list(rows.counts), 2) for t in tensors]
    sent = [torch.cat([parts[rank].flatten() for parts in by_rank]) for rank in range(group.size)]
    shapes = [(*t.shape[:2], rows.counts[group.index], t.shape[3]) for t in tensors]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    arrived = group.all_to_all(torch.cat(sent), [s.numel() for s in sent], [sum(lengths)] * group.size)
    shares = [flat.split(lengths) for flat in arrived.split(sum(lengths))] if sum(lengths) else []
    if not shares:
        return [
            t.new_empty(shape[0], shape[1] * group.size, 0, shape[3])
            for t, shape in zip(tensors, shapes, strict=True)
        ]
    return [torch.cat([share[i].view(shape) for share in shares], 1) for i, shape in enumerate(shapes)]


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, group: ReplicaGroup, *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows, ctx.group = rows, group
        return tuple(_send_rows(tensors, rows, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, None, *_return_rows(gradients, ctx.rows, ctx.group))


class _HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows, ctx.group = rows, group
        return _return_rows([x], rows, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _send_rows([gradient], ctx.rows, ctx.group)[0], None, None


def rows_to_heads(tensors: Sequence[torch.Tensor], rows: Rows, group: ReplicaGroup) -> list[torch.Tensor]:
    """Returns all rows of this rank's share of the heads, in one exchange, given its rows of all heads:
    tensors [samples, heads, rows, width] of one dtype, each with a number of heads that the ranks divide."""
    return list(_RowsToHeads.apply(rows, group, *tensors))  # pyright: ignore[reportUnknownMemberType,reportArgumentType]


def heads_to_rows(heads: torch.Tensor, rows: Rows, group: ReplicaGroup) -> torch.Tensor:
    """Returns this rank's rows of all heads, given all rows of its heads [samples, heads, rows, width]."""
    return _HeadsToRows.apply(heads, rows, group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def gather_rows(tensors: Sequence[torch.Tensor], group: ReplicaGroup) -> list[torch.Tensor]:
    """Returns the whole of tensors that hold rows, in one exchange if they have one dtype and one deal
    of rows."""
    marks = [m for m in map(mark_of, tensors) if m is not None]
    assert len(marks) == len(tensors)
    if len({(t.dtype, m.rows) for t, m in zip(tensors, marks, strict=True)}) > 1:
        return [whole for t in tensors for whole in gather_rows([t], group)]
    return list(_GatherRows.apply(group, tuple(marks), *tensors))  # pyright: ignore[reportUnknownMemberType,reportArgumentType]


def sum_over_ranks(summand: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns the sum of a tensor (any shape) over all ranks."""
    return _SumOverRanks.apply(summand, group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def enter_section(whole: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns a tensor from outside the section (any shape, the same on all ranks)."""
    return _EnterSection.apply(whole, group) if whole.requires_grad else whole  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def leave_section(value: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns a section's tensor as it is outside: whole, with complete gradients on all ranks."""
    mark = mark_of(value)
    if mark is not None:
        return _LeaveRows.apply(value, mark, group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
    return _LeaveSection.apply(value, group) if value.requires_grad else value  # pyright: ignore[reportUnknownMemberType,reportReturnType]
