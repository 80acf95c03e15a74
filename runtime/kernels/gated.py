"""Gated activations, silu(gate) * up and gelu(gate) * up: one forward kernel, and one backward kernel that
recomputes the activation.

Entries are computed in float32 and rounded once; unfused PyTorch also rounds the activation. Rows may have
any stride, so both halves of one projection can be used in place.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.activations import stable_tanh
from secc.runtime.kernels.backend import (
    accumulator_dtype,
    as_rows,
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

GATED_NAME = "gated"
GELU_TANH_SLOPE, GELU_TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715  # in the tanh form of gelu


@jit
def _activation_and_slope(x, ACTIVATION: tl.constexpr):
    """Returns (the activation of x, its derivative)."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        slope = share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == "gelu_tanh":
        t = stable_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        share = 0.5 * (1.0 + t)
        slope = share + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * share, slope


@jit
def _gated_forward_kernel(
    gate, up, out, width, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activation_and_slope(x, ACTIVATION)
    value *= tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


@jit
def _gated_backward_kernel(
    upstream,
    gate,
    up,
    dgate,
    dup,
    width,
    upstream_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(upstream + row * upstream_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activation_and_slope(
        tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32), ACTIVATION
    )
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(dgate + row * width + columns, (g * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * width + columns, (g * value).to(dup.dtype.element_ty), mask=inside)


def _activation_reference(gate: torch.Tensor, activation: str) -> torch.Tensor:
    x = gate.to(accumulator_dtype(gate.dtype))
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _slope_reference(gate: torch.Tensor, activation: str) -> torch.Tensor:
    x = gate.to(accumulator_dtype(gate.dtype))
    if activation == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if activation == "gelu_tanh":
        t = torch.tanh(GELU_TANH_SLOPE * (x + GELU_TANH_CUBIC * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * GELU_TANH_SLOPE * (1 + 3 * GELU_TANH_CUBIC * x * x)
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _launch_grid(rows: int, width: int, launch: LaunchParameters) -> tuple[int, int]:
    return rows, ceil_div(width, launch.block)


@fused_operator("secc::gated")
def _gated_op(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    rows, width = gate.shape
    out = gate.new_empty(rows, width, dtype=torch.promote_types(gate.dtype, up.dtype))
    if not has_kernels(gate):
        return out.copy_(_activation_reference(gate, activation) * up)
    launch, gate, up = (
        launch_tuning.choose_launch(GATED_NAME, width or 1, gate),
        as_unit_stride_rows(gate),
        as_unit_stride_rows(up),
    )
    if out.numel():
        with on_device(gate):
            _gated_forward_kernel[_launch_grid(rows, width, launch)](
                gate,
                up,
                out,
                width,
                gate.stride(0),
                up.stride(0),
                ACTIVATION=activation,
                BLOCK=launch.block,
                num_warps=launch.warps,
            )
    return out


@_gated_op.register_fake
def _(gate, up, activation):
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@fused_operator("secc::gated_backward")
def _gated_backward_op(
    upstream: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = gate.shape
    dgate, dup = gate.new_empty(rows, width), up.new_empty(rows, width)
    if not has_kernels(gate):
        wide = upstream.to(accumulator_dtype(gate.dtype))
        return dgate.copy_(wide * up * _slope_reference(gate, activation)), dup.copy_(
            wide * _activation_reference(gate, activation)
        )
    launch = launch_tuning.choose_launch(GATED_NAME, width or 1, gate)
    upstream, gate, up = as_unit_stride_rows(upstream), as_unit_stride_rows(gate), as_unit_stride_rows(up)
    if dgate.numel():
        with on_device(gate):
            _gated_backward_kernel[_launch_grid(rows, width, launch)](
                upstream, gate, up, dgate, dup, width, upstream.stride(0), gate.stride(0), up.stride(0),
                ACTIVATION=activation, BLOCK=launch.block, num_warps=launch.warps,
            )  # fmt: skip
    return dgate, dup


@_gated_backward_op.register_fake
def _(upstream, gate, up, activation):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup_context(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _autograd_backward(ctx, upstream):
    return *_gated_backward_op(upstream, *ctx.saved_tensors, ctx.activation), None


_gated_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def _apply_gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if not (gate.shape == up.shape and gate.dim() > 0):
        check_argument(False, f"gate {list(gate.shape)} and up {list(up.shape)} differ in shape")
    check_argument(gate.is_floating_point() and up.is_floating_point(), "gate and up are floating numbers")
    found = _gated_op(as_rows(gate), as_rows(up), activation)
    return found if gate.dim() == 2 else found.view(gate.shape)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, entry by entry; both [..., I]. Raises UserError if their shapes differ."""
    return _apply_gate(gate, up, "silu")


def geglu(
    gate: torch.Tensor, up: torch.Tensor, approximate: Literal["none", "tanh"] = "tanh"
) -> torch.Tensor:
    """Returns gelu(gate) * up, entry by entry; both [..., I]; `approximate` as in
    `torch.nn.functional.gelu`."""
    check_argument(
        approximate in ("none", "tanh"),
        f"geglu: no approximation is called {approximate!r}",
        "choose none or tanh",
    )
    return _apply_gate(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _default_launch(width: int, _: torch.device) -> LaunchParameters:
    return LaunchParameters(min(next_power_of_2(width), 4096), warps=8)


def _launch_candidates(width: int, _: torch.device) -> list[LaunchParameters]:
    return [
        LaunchParameters(b, warps=w)
        for b in (512, 1024, 2048, 4096, 8192)
        if b <= next_power_of_2(width)
        for w in (4, 8, 16)
    ]


def _make_trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    gate, up = (torch.randn(rows, size, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    upstream = torch.randn(rows, size, dtype=dtype, device=device)
    return lambda: torch.autograd.grad(swiglu(gate, up), (gate, up), upstream)


launch_tuning.register_kernel(
    launch_tuning.TunableKernel(GATED_NAME, _default_launch, _launch_candidates, _make_trial)
)
