"""RMS and layer normalisation of rows, optionally after adding a residual: one forward kernel, one backward
kernel.

    h = x + residual                   rounded to its dtype, like the unfused residual stream
    y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias     RMS norm: no means, no bias

A program holds whole rows. Backward sums the weight's gradient over a fixed slab of rows in each program, and
then the slabs' sums in order, so it is deterministic. Each tensor is read once in forward and once in
backward.
"""

from __future__ import annotations

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.backend import (
    accumulator_dtype,
    as_rows,
    as_unit_stride_rows,
    ceil_div,
    check_argument,
    has_kernels,
    jit,
    on_device,
    reduction_program_count,
    tl,
)
from secc.runtime.kernels.fused_operator import fused_operator

NORM_NAME = "norm"
MAX_ROW_ENTRIES = 1 << 16  # that a program can hold


@jit
def _norm_forward_kernel(
    x, residual, weight, bias, y, h, moments, rows, width, x_stride, residual_stride, eps,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    place = row[:, None] * width + columns[None, :]
    value = tl.load(x + row[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(
            residual + row[:, None] * residual_stride + columns[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        rounded = value.to(h.dtype.element_ty)
        tl.store(h + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTER:
        mean = tl.sum(value, 1) / width
        value = tl.where(inside, value - mean[:, None], 0.0)
    tl.store(moments + row, mean, mask=row < rows)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(moments + rows + row, scale, mask=row < rows)
    value *= scale[:, None]
    if WEIGHT:
        value *= tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@jit
def _norm_backward_kernel(
    dy, dh, h, weight, moments, dx, sums, rows, width, dy_stride, dh_stride, h_stride, tiles,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # By row of a tile until the end: summed over rows in the loop, they would change threads at each tile.
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    if WEIGHT:
        factor = tl.load(weight + columns, mask=columns < width, other=0.0)[None, :]
    for tile in tl.range(slab * tiles, (slab + 1) * tiles, num_stages=STAGES):  # pyright: ignore
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (columns < width)[None, :]
        upstream = tl.load(dy + row[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        value = tl.load(h + row[:, None] * h_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(moments + rows + row, mask=row < rows, other=0.0)
        if CENTER:
            value -= tl.load(moments + row, mask=row < rows, other=0.0)[:, None]
        value = tl.where(inside, value * scale[:, None], 0.0)
        weight_sum += upstream * value
        if CENTER:
            bias_sum += upstream
        if WEIGHT:
            upstream *= factor.to(tl.float32)
        change = upstream - value * (tl.sum(upstream * value, 1) / width)[:, None]
        if CENTER:
            change -= (tl.sum(upstream, 1) / width)[:, None]
        change *= scale[:, None]
        if RESIDUAL:
            change += tl.load(dh + row[:, None] * dh_stride + columns[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(dx + row[:, None] * width + columns[None, :], change.to(dx.dtype.element_ty), mask=inside)
    sums += slab * (2 if CENTER else 1) * width
    tl.store(sums + columns, tl.sum(weight_sum, 0), mask=columns < width)
    if CENTER:
        tl.store(sums + width + columns, tl.sum(bias_sum, 0), mask=columns < width)


def _forward_reference(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    center: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    value = h.to(accumulator_dtype(h.dtype))
    mean = value.mean(1, keepdim=True) if center else value.new_zeros(value.shape[0], 1)
    value = value - mean
    scale = (value.square().mean(1, keepdim=True) + eps).rsqrt()
    value = value * scale
    value = value if weight is None else value * weight
    value = value if bias is None else value + bias
    return value.to(dtype), torch.cat([mean, scale], 1).t().contiguous()


def _backward_reference(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    upstream = dy.to(moments.dtype)
    value = (h.to(moments.dtype) - moments[0].unsqueeze(1)) * moments[1].unsqueeze(1)
    sums = torch.stack([(upstream * value).sum(0), *([upstream.sum(0)] if center else [])])
    upstream = upstream if weight is None else upstream * weight
    change = upstream - value * (upstream * value).mean(1, keepdim=True)
    change = change - upstream.mean(1, keepdim=True) if center else change
    change = change * moments[1].unsqueeze(1)
    return (change if dh is None else change + dh).to(h.dtype), sums


def _result_dtypes(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of h and y: PyTorch's promotion of their operands."""
    h = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = h if weight is None else torch.promote_types(h, weight.dtype)
    return h, y if bias is None else torch.promote_types(y, bias.dtype)


@fused_operator("secc::norm")
def _norm_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    h_dtype, y_dtype = _result_dtypes(x, residual, weight, bias)
    if not has_kernels(x) or width > MAX_ROW_ENTRIES:
        h = x if residual is None else (x.to(accumulator_dtype(h_dtype)) + residual).to(h_dtype)
        y, moments = _forward_reference(h, weight, bias, eps, center, y_dtype)
        return y, h.new_empty(0) if residual is None else h, moments
    y, moments = x.new_empty(rows, width, dtype=y_dtype), x.new_empty(2, rows, dtype=torch.float32)
    h = x.new_empty((rows, width) if residual is not None else 0, dtype=h_dtype)
    launch = launch_tuning.choose_launch(NORM_NAME, width, x)
    x = as_unit_stride_rows(x)
    other = x if residual is None else as_unit_stride_rows(residual)
    if rows:
        with on_device(x):
            _norm_forward_kernel[(ceil_div(rows, launch.rows),)](
                x, other, x if weight is None else weight.contiguous(),
                x if bias is None else bias.contiguous(), y, h, moments, rows, width, x.stride(0),
                other.stride(0), eps, CENTER=center, RESIDUAL=residual is not None,
                WEIGHT=weight is not None, BIAS=bias is not None, ROWS=launch.rows, BLOCK=launch.block,
                num_warps=launch.warps,
            )  # fmt: skip
    return y, h, moments


@_norm_op.register_fake
def _(x, weight, bias, residual, eps, center):
    h_dtype, y_dtype = _result_dtypes(x, residual, weight, bias)
    h = x.new_empty(x.shape if residual is not None else 0, dtype=h_dtype)
    return (
        x.new_empty(x.shape, dtype=y_dtype),
        h,
        x.new_empty(2, x.shape[0], dtype=accumulator_dtype(h_dtype)),
    )


@fused_operator("secc::norm_backward")
def _norm_backward_op(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of h [rows, width], and in float32 that of the weight and, with `center`, of the
    bias: [1 or 2, width]."""
    rows, width = h.shape
    if not has_kernels(h) or width > MAX_ROW_ENTRIES or not rows:
        return _backward_reference(dy, dh, h, weight, moments, center)
    launch = launch_tuning.choose_launch(NORM_NAME, width, h)
    tiles = ceil_div(rows, launch.rows)
    slabs = min(tiles, reduction_program_count(h.device))
    dx, sums = h.new_empty(rows, width), moments.new_empty(slabs, 1 + center, width)
    dy, h = as_unit_stride_rows(dy), as_unit_stride_rows(h)
    other = dy if dh is None else as_unit_stride_rows(dh)
    with on_device(h):
        _norm_backward_kernel[(slabs,)](
            dy, other, h, h if weight is None else weight.contiguous(), moments, dx, sums, rows, width,
            dy.stride(0), other.stride(0), h.stride(0), ceil_div(tiles, slabs), CENTER=center,
            RESIDUAL=dh is not None, WEIGHT=weight is not None, ROWS=launch.rows, BLOCK=launch.block,
            STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    return dx, sums.sum(0)


@_norm_backward_op.register_fake
def _(dy, dh, h, weight, moments, center):
    return h.new_empty(h.shape), moments.new_empty(1 + center, h.shape[1])


def _setup_context(ctx, inputs, output):
    x, weight, bias, residual, _, center = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x if residual is None else output[1], weight, output[2])
    ctx.center = center
    ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, residual)]


def _autograd_backward(ctx, dy, dh, _):
    h, weight, moments = ctx.saved_tensors
    if dy is None:  # only the residual stream was used
        return _cast(dh, ctx.dtypes[0]), None, None, _cast(dh, ctx.dtypes[3]), None, None
    dx, sums = _norm_backward_op(dy, dh if ctx.dtypes[3] else None, h, weight, moments, ctx.center)
    of_weight, of_bias, other = ctx.dtypes[1:]
    sums = sums if of_weight is None else sums.to(of_weight)
    dweight = None if of_weight is None else sums[0]
    dbias = None if of_bias is None else _cast(sums[1], of_bias)
    return _cast(dx, ctx.dtypes[0]), dweight, dbias, _cast(dx, other), None, None


def _cast(gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return None if gradient is None or dtype is None else gradient.to(dtype)


_norm_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def _apply_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    center: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    _check_norm(x, weight, bias, residual)
    y, h, _ = _norm_op(as_rows(x), weight, bias, None if residual is None else as_rows(residual), eps, center)
    if x.dim() != 2:
        y, h = y.view(x.shape), h if residual is None else h.view(x.shape)
    return y if residual is None else (y, h)


def _check_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    """Raises UserError unless the arguments fit; writes no message before."""
    if not (x.is_floating_point() and x.dim() > 0 and x.shape[-1] > 0):
        check_argument(False, f"a norm is of rows of floating numbers, not {list(x.shape)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[-1:]:
            check_argument(False, f"norm: rows of {x.shape[-1]} entries need a {name} of as many")
    check_argument(residual is None or residual.shape == x.shape, "norm: the residual has the shape of x")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32; with `residual`,
    (the norm of x + residual, x + residual).

    `x` and `residual` [..., H], `weight` [H] or None. The result has the dtype that PyTorch promotes x and
    weight to. Raises UserError for shapes that do not fit.
    """
    return _apply_norm(x, weight, None, residual, eps, center=False)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last dim; `weight` and `bias` [H] or
    None; otherwise like `rms_norm`."""
    return _apply_norm(x, weight, bias, residual, eps, center=True)


def _make_trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    x = torch.randn(rows, size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.ones(size, dtype=dtype, device=device, requires_grad=True)

    def run() -> None:
        y = rms_norm(x, weight)
        assert isinstance(y, torch.Tensor)
        torch.autograd.grad(y, (x, weight), y.detach())

    return run


launch_tuning.register_kernel(
    launch_tuning.TunableKernel(
        NORM_NAME, launch_tuning.default_row_launch, launch_tuning.row_launch_candidates, _make_trial
    )
)
