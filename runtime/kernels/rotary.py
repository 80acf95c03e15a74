"""Rotary position embedding of queries and keys (Su et al., "RoFormer", 2021), with halves rotated as in
Hugging Face's `rotate_half`.

    y1 = x1 * cos1 - x2 * sin1        y2 = x2 * cos2 + x1 * sin2        (1, 2: halves of the rotated entries)

Entries beyond the width of the tables pass through. A program processes one position and several heads, so
that a table row is read once for them. Backward is the transposed rotation by the same kernel. The tables
depend on positions only and get no gradient.
"""

from __future__ import annotations

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.backend import (
    accumulator_dtype,
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

ROPE_NAME = "rope"


@jit
def _rotate_heads(
    x, y, head, heads, width, half, cos1, cos2, sin1, sin2, x_head, y_head,
    TRANSPOSED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates some heads of one position: `x` and `y` point to it."""
    columns = tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (columns < half)[None, :]
    source = x + head[:, None] * x_head
    place = y + head[:, None] * y_head
    x1 = tl.load(source + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + half + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if TRANSPOSED:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    tl.store(place + columns[None, :], y1.to(y.dtype.element_ty), mask=inside)
    tl.store(place + half + columns[None, :], y2.to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)
        beyond = (head < heads)[:, None] & (rest < width)[None, :]
        passed = tl.load(source + rest[None, :], mask=beyond, other=0.0)
        tl.store(place + rest[None, :], passed.to(y.dtype.element_ty), mask=beyond)


@jit
def _rotate_kernel(
    q, k, cos, sin, q_out, k_out, q_heads, k_heads, positions, width, half, q_batch, q_head, q_position,
    k_batch, k_head, k_position, q_out_batch, q_out_head, q_out_position, k_out_batch, k_out_head,
    k_out_position, table_batch, table_position, TRANSPOSED: tl.constexpr, KEYS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // positions).to(tl.int64)
    position = (tl.program_id(0) % positions).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, HALF)
    in_table = columns < half
    cos += batch * table_batch + position * table_position
    sin += batch * table_batch + position * table_position
    cos1 = tl.load(cos + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + half + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + half + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    query_parts = tl.cdiv(q_heads, HEADS)
    if part < query_parts:
        head = (part * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        _rotate_heads(
            q + batch * q_batch + position * q_position,
            q_out + batch * q_out_batch + position * q_out_position,
            head, q_heads, width, half, cos1, cos2, sin1, sin2, q_head, q_out_head, TRANSPOSED, HALF, REST,
        )  # fmt: skip
    elif KEYS:
        head = ((part - query_parts) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        _rotate_heads(
            k + batch * k_batch + position * k_position,
            k_out + batch * k_out_batch + position * k_out_position,
            head, k_heads, width, half, cos1, cos2, sin1, sin2, k_head, k_out_head, TRANSPOSED, HALF, REST,
        )  # fmt: skip


def _rotate_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool, dtype: torch.dtype
) -> torch.Tensor:
    wide = accumulator_dtype(dtype)
    half = cos.shape[-1] // 2
    cos1, cos2 = cos.to(wide).unsqueeze(1).split(half, -1)
    sin1, sin2 = sin.to(wide).unsqueeze(1).split(half, -1)
    x1, x2, rest = x.to(wide).split([half, half, x.shape[-1] - 2 * half], -1)
    if transposed:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    return torch.cat([y1, y2, rest], -1).to(dtype)


def _empty_result(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocates a result with the order of dims of `x`, as PyTorch's arithmetic does, and adjacent entries
    within a head."""
    y = torch.empty_like(x, dtype=dtype)
    return y if y.stride(-1) == 1 else torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@fused_operator("secc::rope")
def _rope_op(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, transposed: bool,
    dtype: torch.dtype, k_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotates `q` and, if given, `k` by the same tables; without `k` the second result is empty."""
    q_out, k_out = _empty_results(q, k, dtype, k_dtype)
    if not has_kernels(q):
        q_out.copy_(_rotate_reference(q, cos, sin, transposed, dtype))
        if k is not None:
            k_out.copy_(_rotate_reference(k, cos, sin, transposed, k_dtype))
        return q_out, k_out
    batch, q_heads, positions, width = q.shape
    half, k_heads = cos.shape[-1] // 2, 0 if k is None else k.shape[1]
    q, cos, sin = _with_adjacent_entries(q), cos.contiguous(), sin.contiguous()
    keys = q if k is None else _with_adjacent_entries(k)
    k_strides = (0, 0, 0) if k is None else k_out.stride()[:3]
    if q_out.numel() or k_out.numel():
        launch = launch_tuning.choose_launch(ROPE_NAME, width, q)
        parts = ceil_div(q_heads, launch.rows) + ceil_div(k_heads, launch.rows)
        with on_device(q):
            _rotate_kernel[(batch * positions, parts)](
                q, keys, cos, sin, q_out, k_out, q_heads, k_heads, positions, width, half, *q.stride()[:3],
                *keys.stride()[:3], *q_out.stride()[:3], *k_strides,
                0 if cos.shape[0] == 1 else cos.stride(0), 2 * half, TRANSPOSED=transposed,
                KEYS=k is not None, HEADS=launch.rows, HALF=next_power_of_2(half),
                REST=next_power_of_2(width - 2 * half) if width > 2 * half else 0, num_warps=launch.warps,
            )  # fmt: skip
    return q_out, k_out


def _with_adjacent_entries(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_results(
    q: torch.Tensor, k: torch.Tensor | None, dtype: torch.dtype, k_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_result(q, dtype), q.new_empty(0) if k is None else _empty_result(k, k_dtype)


@_rope_op.register_fake
def _(q, k, cos, sin, transposed, dtype, k_dtype):
    return _empty_results(q, k, dtype, k_dtype)


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, ctx.transposed, _, _ = inputs
    ctx.dtypes = q.dtype, None if k is None else k.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)


def _autograd_backward(ctx, dq, dk):
    (q_dtype, k_dtype), nothing = ctx.dtypes, (None,) * 5
    tables = *ctx.saved_tensors, not ctx.transposed
    if k_dtype is None or dk is None or dq is None:  # of one tensor only
        dq = None if dq is None else _rope_op(dq, None, *tables, q_dtype, q_dtype)[0]
        dk = None if dk is None or k_dtype is None else _rope_op(dk, None, *tables, k_dtype, k_dtype)[0]
        return dq, dk, *nothing
    return *_rope_op(dq, dk, *tables, q_dtype, k_dtype), *nothing


_rope_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def _check_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not (cos.shape == sin.shape and cos.dim() in (2, 3)):
        check_argument(False, f"rope: cos {list(cos.shape)} and sin {list(sin.shape)} are [B or 1, S, R]")
    if cos.shape[-1] % 2:
        check_argument(False, f"rope: an even number of entries is rotated, not {cos.shape[-1]}")
    check_argument(
        not (cos.requires_grad or sin.requires_grad),
        "rope: the tables get no gradient",
        "detach them, or do not fuse this rotation",
    )
    return (cos.unsqueeze(0), sin.unsqueeze(0)) if cos.dim() == 2 else (cos, sin)


def _check_rotated(name: str, x: torch.Tensor, cos: torch.Tensor) -> None:
    if not (x.dim() == 4 and x.is_floating_point()):
        check_argument(False, f"rope: {name} is [B, heads, S, D], not {list(x.shape)}")
    fits = cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[2] and cos.shape[2] <= x.shape[3]
    if not fits:
        check_argument(False, f"rope: {name} {list(x.shape)} and tables {list(cos.shape)} do not fit")


def _result_dtype(x: torch.Tensor, cos: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype == cos.dtype else torch.promote_types(x.dtype, cos.dtype)


def rotate_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of one tensor [B, heads, S, D]; see `rope`."""
    cos, sin = _check_tables(cos, sin)
    _check_rotated("x", x, cos)
    dtype = _result_dtype(x, cos)
    return _rope_op(x, None, cos, sin, False, dtype, dtype)[0]


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding. Returns (rotated q, rotated k).

    `q` [B, heads, S, D] and `k` [B, key heads, S, D] of any strides; `cos` and `sin` [B or 1, S, R] or [S, R]
    with even R <= D and usually equal halves. Entries beyond R pass through. Results have the dtype that
    PyTorch promotes to. Raises UserError for shapes that do not fit and for tables that require a gradient.
    """
    cos, sin = _check_tables(cos, sin)
    _check_rotated("q", q, cos)
    _check_rotated("k", k, cos)
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.dtype != k.dtype or q.device != k.device:
        return rotate_one(q, cos, sin), rotate_one(k, cos, sin)
    return _rope_op(q, k, cos, sin, False, _result_dtype(q, cos), _result_dtype(k, cos))


def _default_launch(width: int, _: torch.device) -> LaunchParameters:
    return LaunchParameters(next_power_of_2(width), max(2048 // next_power_of_2(width), 1), warps=4)


def _launch_candidates(width: int, _: torch.device) -> list[LaunchParameters]:
    return [
        LaunchParameters(next_power_of_2(width), heads, warps)
        for heads in (1, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
    ]


def _make_trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    q = torch.randn(1, rows, 32, size, dtype=dtype, device=device).transpose(1, 2)
    k = torch.randn(1, rows, 8, size, dtype=dtype, device=device).transpose(1, 2)
    cos, sin = (torch.randn(1, rows, size, dtype=dtype, device=device) for _ in range(2))
    return lambda: rope(q, k, cos, sin)


launch_tuning.register_kernel(
    launch_tuning.TunableKernel(ROPE_NAME, _default_launch, _launch_candidates, _make_trial)
)
