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
from secc.runtime.kernels.launch_tuning import LaunchParameters

ROPE_NAME = "rope"


@jit
def _rotate_kernel(
    x, cos, sin, y, heads, positions, width, half, x_batch, x_head, x_position, y_batch, y_head, y_position,
    table_batch, table_position, TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // positions).to(tl.int64)
    position = (tl.program_id(0) % positions).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    columns = tl.arange(0, HALF)
    in_table = columns < half
    inside = (head < heads)[:, None] & in_table[None, :]
    cos += batch * table_batch + position * table_position
    sin += batch * table_batch + position * table_position
    cos1 = tl.load(cos + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + half + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + half + columns, mask=in_table, other=0.0).to(tl.float32)[None, :]
    source = x + batch * x_batch + position * x_position + head[:, None] * x_head
    place = y + batch * y_batch + position * y_position + head[:, None] * y_head
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


@torch.library.custom_op("secc::rope", mutates_args=())
def _rope_op(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool, dtype: torch.dtype
) -> torch.Tensor:
    y = _empty_result(x, dtype)
    if not has_kernels(x):
        return y.copy_(_rotate_reference(x, cos, sin, transposed, dtype))
    batch, heads, positions, width = x.shape
    half = cos.shape[-1] // 2
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    table_batch = 0 if cos.shape[0] == 1 else cos.stride(0)
    if y.numel():
        launch = launch_tuning.choose_launch(ROPE_NAME, width, x)
        with on_device(x):
            _rotate_kernel[(batch * positions, ceil_div(heads, launch.rows))](
                x, cos, sin, y, heads, positions, width, half, *x.stride()[:3], *y.stride()[:3],
                table_batch, 2 * half, TRANSPOSED=transposed, HEADS=launch.rows, HALF=next_power_of_2(half),
                REST=next_power_of_2(width - 2 * half) if width > 2 * half else 0, num_warps=launch.warps,
            )  # fmt: skip
    return y


@_rope_op.register_fake
def _(x, cos, sin, transposed, dtype):
    return _empty_result(x, dtype)


def _setup_context(ctx, inputs, output):
    x, cos, sin, ctx.transposed, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _autograd_backward(ctx, upstream):
    return _rope_op(upstream, *ctx.saved_tensors, not ctx.transposed, ctx.dtype), None, None, None, None


_rope_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def _check_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_argument(
        cos.shape == sin.shape and cos.dim() in (2, 3),
        f"rope: cos {list(cos.shape)} and sin {list(sin.shape)} are [B or 1, S, R]",
    )
    check_argument(cos.shape[-1] % 2 == 0, f"rope: an even number of entries is rotated, not {cos.shape[-1]}")
    check_argument(
        not (cos.requires_grad or sin.requires_grad),
        "rope: the tables get no gradient",
        "detach them, or do not fuse this rotation",
    )
    return (cos.unsqueeze(0), sin.unsqueeze(0)) if cos.dim() == 2 else (cos, sin)


def _rotate_checked(name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    check_argument(
        x.dim() == 4 and x.is_floating_point(), f"rope: {name} is [B, heads, S, D], not {list(x.shape)}"
    )
    fits = cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[2] and cos.shape[2] <= x.shape[3]
    check_argument(fits, f"rope: {name} {list(x.shape)} and tables {list(cos.shape)} do not fit")
    return _rope_op(x, cos, sin, False, torch.promote_types(x.dtype, cos.dtype))


def rotate_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of one tensor [B, heads, S, D]; see `rope`."""
    return _rotate_checked("x", x, *_check_tables(cos, sin))


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding. Returns (rotated q, rotated k).

    `q` [B, heads, S, D] and `k` [B, key heads, S, D] of any strides; `cos` and `sin` [B or 1, S, R] or [S, R]
    with even R <= D and usually equal halves. Entries beyond R pass through. Results have the dtype that
    PyTorch promotes to. Raises UserError for shapes that do not fit and for tables that require a gradient.
    """
    cos, sin = _check_tables(cos, sin)
    return _rotate_checked("q", q, cos, sin), _rotate_checked("k", k, cos, sin)


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
