"""Gathers rows of a tensor and scatters rows into one: packing and unpacking ragged edges, image features
into embeddings.

`gather_rows` and `scatter_rows` read and write every row once. Their backward is exact and deterministic: the
gradients of a row that was picked several times are summed in the order of picking, by searching the index
between the first and the last time instead of adding atomically; a replaced row passes no gradient to what it
replaced. `ragged_index` turns
offsets and a choice of samples into the index of their rows.
"""

from __future__ import annotations

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.backend import (
    accumulator_dtype,
    as_unit_stride_rows,
    ceil_div,
    check_argument,
    has_kernels,
    jit,
    next_power_of_2,
    on_device,
    tl,
)
from secc.runtime.kernels.fused_operator import fused_operator
from secc.runtime.kernels.launch_tuning import LaunchParameters

ROWS_NAME = "rows"
INDEX_BLOCK = 256  # entries of an index that a program reads


@jit
def _pick_kernel(
    x, index, base, out, count, width, x_stride, base_stride, BASE: tl.constexpr, BLOCK: tl.constexpr
):
    """out[i] = x[index[i]]; base[i] (or zeros) for a negative index; NaN past the end of x."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = tl.load(index + row).to(tl.int64)
    held = tl.where((source >= 0) & (source < count), width, 0)
    value = tl.load(x + source * x_stride + columns, mask=columns < held, other=0.0)
    if BASE:
        value += tl.load(
            base + row * base_stride + columns, mask=columns < tl.where(source < 0, width, 0), other=0.0
        )
    # Not `float("nan")` itself: the interpreter of Triton 3.7 makes no constants of 16 bits.
    unknown = tl.full((BLOCK,), float("nan"), tl.float32).to(value.dtype)
    value = tl.where(source < count, value, unknown)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


@jit
def _note_entries_kernel(index, ends, entries, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """ends[r] = the last j with index[j] = r; with FIRST, ends[count + r] = entries - 1 - the first such j. A
    maximum of integers is the same in any order."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + entry, mask=entry < entries, other=-1).to(tl.int64)
    is_row = (row >= 0) & (row < count)
    tl.atomic_max(ends + row, entry, mask=is_row)
    if FIRST:
        tl.atomic_max(ends + count + row, entries - 1 - entry, mask=is_row)


@jit
def _return_rows_kernel(upstream, index, source, dbase, drows, count, width, stride, BLOCK: tl.constexpr):
    """dbase[r] = upstream[r] where the row was kept, drows[j] = upstream[index[j]] where entry j was put
    there; zeros elsewhere. Programs beyond the rows of base do rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if row < count:
        held = tl.where(tl.load(source + row) < 0, width, 0)
        value = tl.load(upstream + row * stride + columns, mask=columns < held, other=0.0)
        tl.store(dbase + row * width + columns, value.to(dbase.dtype.element_ty), mask=inside)
    else:
        entry = row - count
        place = tl.load(index + entry).to(tl.int64)
        is_row = (place >= 0) & (place < count)
        is_last = tl.load(source + place, mask=is_row, other=-1) == entry
        value = tl.load(
            upstream + place * stride + columns, mask=columns < tl.where(is_last, width, 0), other=0.0
        )
        tl.store(drows + entry * width + columns, value.to(drows.dtype.element_ty), mask=inside)


@jit
def _sum_picked_kernel(
    upstream, index, ends, out, entries, count, width, stride, BLOCK: tl.constexpr, SCAN: tl.constexpr
):
    """out[r] = sum of upstream[j] over the j with index[j] = r, in their order. `ends` are the last and first
    of them, between which the index is searched: most rows are picked once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    last = tl.load(ends + row)
    here = entries - 1 - tl.load(ends + count + row)
    while here <= last:
        places = here + tl.arange(0, SCAN)
        named = tl.load(index + places, mask=places <= last, other=-1) == row
        nearest = tl.min(tl.where(named, places, last + 1), 0)
        is_found = nearest <= last
        place = upstream + nearest * stride + columns
        total += tl.load(place, mask=columns < tl.where(is_found, width, 0), other=0.0).to(tl.float32)
        here = tl.where(is_found, nearest + 1, here + SCAN)  # pyright: ignore
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=columns < width)


def _pick_reference(x: torch.Tensor, index: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    picked = x.index_select(0, index.clamp(min=0)) if x.shape[0] else x.new_zeros(index.shape[0], x.shape[1])
    other = x.new_zeros(()) if base is None else base
    return torch.where((index < 0).unsqueeze(1), other, picked)


def _pick_rows(x: torch.Tensor, index: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Returns [index, H]: rows of x, or rows of `base` (or zeros) where the index is negative."""
    if not has_kernels(x):
        return _pick_reference(x, index, base)
    rows, width = index.shape[0], x.shape[1]
    out = x.new_empty(rows, width)
    launch = launch_tuning.choose_launch(ROWS_NAME, width or 1, x)
    x = as_unit_stride_rows(x)
    other = x if base is None else as_unit_stride_rows(base)
    if out.numel():
        with on_device(x):
            _pick_kernel[(rows, ceil_div(width, launch.block))](
                x, index.contiguous(), other, out, x.shape[0], width, x.stride(0), other.stride(0),
                BASE=base is not None, BLOCK=launch.block, num_warps=launch.warps,
            )  # fmt: skip
    return out


@fused_operator("secc::gather_rows")
def _gather_op(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    _check_index(index, x.shape[0])
    return _pick_rows(x, index, None)


@_gather_op.register_fake
def _(x, index):
    return x.new_empty(index.shape[0], x.shape[1])


@fused_operator("secc::gather_rows_backward")
def _gather_backward_op(upstream: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    if not has_kernels(upstream):
        kept = upstream.to(accumulator_dtype(upstream.dtype)) * (index >= 0).unsqueeze(1)
        total = kept.new_zeros(rows, upstream.shape[1])
        return (total.index_add_(0, index.clamp(min=0), kept) if rows else total).to(upstream.dtype)
    width = upstream.shape[1]
    out = upstream.new_empty(rows, width)
    launch, upstream, index = (
        launch_tuning.choose_launch(ROWS_NAME, width or 1, upstream),
        as_unit_stride_rows(upstream),
        index.contiguous(),
    )
    if out.numel():
        ends = _note_entries(index, rows, first=True)
        with on_device(upstream):
            _sum_picked_kernel[(rows, ceil_div(width, launch.block))](
                upstream, index, ends, out, index.shape[0], rows, width, upstream.stride(0),
                BLOCK=launch.block, SCAN=INDEX_BLOCK, num_warps=launch.warps,
            )  # fmt: skip
    return out


def _note_entries(index: torch.Tensor, count: int, *, first: bool) -> torch.Tensor:
    """Returns for each of `count` rows the last entry of `index` that names it or -1 (see the kernel)."""
    ends, entries = index.new_full(((1 + first) * count,), -1), index.shape[0]
    if entries:
        with on_device(index):
            _note_entries_kernel[(ceil_div(entries, INDEX_BLOCK),)](
                index, ends, entries, count, FIRST=first, BLOCK=INDEX_BLOCK
            )
    return ends


@_gather_backward_op.register_fake
def _(upstream, index, rows):
    return upstream.new_empty(rows, upstream.shape[1])


def _setup_gather_context(ctx, inputs, output):
    x, index = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(index)


def _backward_of_gather(ctx, upstream):
    return _gather_backward_op(upstream, *ctx.saved_tensors, ctx.rows), None


_gather_op.register_autograd(_backward_of_gather, setup_context=_setup_gather_context)


@fused_operator("secc::scatter_rows")
def _scatter_op(
    base: torch.Tensor, index: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (base with rows put in, source): source[r] is the entry of `rows` in row r, -1 if it kept its
    own."""
    _check_index(index, base.shape[0])
    source = _find_sources(base, index)
    return _pick_rows(rows, source, base), source


def _find_sources(base: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns for each row of `base` the last entry of `index` that names it, or -1."""
    count = base.shape[0]
    if has_kernels(base):
        return _note_entries(index.contiguous(), count, first=False)
    put, order = index.sort(stable=True)
    last = torch.ones_like(put, dtype=torch.bool)
    last[:-1] = put[:-1] != put[1:]  # the last of several entries for one row counts
    source = order.new_full((count + 1,), -1)
    source.scatter_(
        0, torch.where(last & (put >= 0) & (put < count), put, count), order
    )  # what does not count goes to a row that is cut off
    return source[:count].clone()


@_scatter_op.register_fake
def _(base, index, rows):
    return base.new_empty(base.shape), index.new_empty(base.shape[0])


@fused_operator("secc::scatter_rows_backward")
def _scatter_backward_op(
    upstream: torch.Tensor, index: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if has_kernels(upstream):
        return _return_rows(upstream, index.contiguous(), source)
    everywhere = torch.arange(source.shape[0], device=source.device)
    counts = torch.arange(index.shape[0], device=index.device)
    if source.shape[0]:
        counts = source.index_select(0, index.clamp(min=0)) == counts
    taken = torch.where(counts & (index >= 0), index, -1)
    return _pick_rows(upstream, torch.where(source < 0, everywhere, -1), None), _pick_rows(
        upstream, taken, None
    )


def _return_rows(
    upstream: torch.Tensor, index: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    (count, width), entries = upstream.shape, index.shape[0]
    dbase, drows = upstream.new_empty(count, width), upstream.new_empty(entries, width)
    launch, upstream = (
        launch_tuning.choose_launch(ROWS_NAME, width or 1, upstream),
        as_unit_stride_rows(upstream),
    )
    if (count + entries) * width:
        with on_device(upstream):
            _return_rows_kernel[(count + entries, ceil_div(width, launch.block))](
                upstream, index, source, dbase, drows, count, width, upstream.stride(0), BLOCK=launch.block,
                num_warps=launch.warps,
            )  # fmt: skip
    return dbase, drows


@_scatter_backward_op.register_fake
def _(upstream, index, source):
    return upstream.new_empty(upstream.shape), upstream.new_empty(index.shape[0], upstream.shape[1])


def _setup_scatter_context(ctx, inputs, output):
    index = inputs[1]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(index, output[1])


def _backward_of_scatter(ctx, upstream, _):
    if upstream is None:
        return None, None, None
    base, rows = _scatter_backward_op(upstream, *ctx.saved_tensors)
    return base, None, rows


_scatter_op.register_autograd(_backward_of_scatter, setup_context=_setup_scatter_context)


def _check_index(index: torch.Tensor, rows: int) -> None:
    """Raises UserError for a row past the end. Not checked on a GPU, because reading the index would stall
    it; such a row is NaN there."""
    if not index.is_cuda and index.numel():
        check_argument(int(index.max()) < rows, f"row {int(index.max())} of {rows} does not exist")


def _flatten_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[0], x.shape[1:].numel())


def _check_index_kind(index: torch.Tensor) -> torch.Tensor:
    check_argument(
        index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool,
        "an index of rows is a list of integers",
    )
    return index.long()


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns [M, ...]: x[index[i]] for each i, and zeros for a negative index.

    `x` [N, ...] of any dtype, `index` [M] integers. The gradient of a row picked several times is the sum in
    the order of picking. Raises UserError on the CPU for an index past the end; on a GPU such a row is NaN.
    """
    check_argument(x.dim() > 0, "gather_rows: x has no rows")
    found = _gather_op(_flatten_rows(x), _check_index_kind(index))
    return found if x.dim() == 2 else found.view(index.shape[0], *x.shape[1:])


def scatter_rows(base: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `base` in which row index[i] is rows[i]; a negative index is skipped, and the last of
    several rows for one index counts.

    `base` [N, ...], `index` [M] integers, `rows` [M, ...] of the dtype of base. Gradients reach base in rows
    that it kept, and rows that were put in. Raises UserError for shapes and dtypes that do not fit, and on
    the CPU for an index past the end (skipped on a GPU).
    """
    if not (base.dim() > 0 and rows.shape == (index.shape[0], *base.shape[1:])):
        check_argument(False, f"rows {list(rows.shape)} do not fit {list(base.shape)}")
    if base.dtype != rows.dtype:
        check_argument(False, f"scatter_rows: rows of {rows.dtype} into {base.dtype}", "cast them first")
    found, _ = _scatter_op(_flatten_rows(base), _check_index_kind(index), _flatten_rows(rows))
    return found if base.dim() == 2 else found.view(base.shape)


def ragged_index(offsets: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Returns the rows of `samples`, one after another; sample s has rows offsets[s] … offsets[s + 1]. Both
    are integer vectors."""
    starts, lengths = offsets[samples], offsets[samples + 1] - offsets[samples]
    ends = lengths.cumsum(0)
    shift = (starts - (ends - lengths)).repeat_interleave(lengths)
    return torch.arange(shift.shape[0], device=offsets.device) + shift


def _default_launch(width: int, _: torch.device) -> LaunchParameters:
    return LaunchParameters(min(next_power_of_2(width), 4096), warps=4)


def _launch_candidates(width: int, _: torch.device) -> list[LaunchParameters]:
    return [
        LaunchParameters(b, warps=w)
        for b in (512, 1024, 2048, 4096, 8192)
        if b <= next_power_of_2(width)
        for w in (2, 4, 8)
    ]


def _make_trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    x, index = torch.randn(rows, size, dtype=dtype, device=device), torch.randperm(rows, device=device)
    return lambda: gather_rows(x, index)


launch_tuning.register_kernel(
    launch_tuning.TunableKernel(ROWS_NAME, _default_launch, _launch_candidates, _make_trial)
)
