"""Which implementation an operator uses, and helpers that all kernel modules share.

Each operator has two implementations: Triton kernels and a PyTorch reference. CUDA tensors use the kernels,
CPU tensors the reference. With `TRITON_INTERPRET=1` set before the first import, CPU tensors use the kernels
through Triton's interpreter. Without Triton the kernels are plain functions that are never called. float64
always uses the reference, which checks the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from secc.runtime.errors import UserError

try:
    import triton
    import triton.language as tl
    from triton.runtime.errors import OutOfResources
except ImportError:
    triton = None
    tl: Any = None
    OutOfResources = MemoryError

KERNELS_INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret  # pyright: ignore[reportAttributeAccessIssue]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` if Triton is installed. Helpers of kernels are decorated, too, because kernels read their
    module's globals."""
    return function if triton is None else triton.jit(function)


def has_kernels(x: torch.Tensor) -> bool:
    """Whether operators on `x` (of any shape) run Triton kernels, by device, dtype and what is installed."""
    if triton is None or x.dtype not in KERNEL_DTYPES:
        return False
    return KERNELS_INTERPRETED if x.device.type == "cpu" else x.is_cuda


_NO_CHANGE = nullcontext()


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the device of `x` (of any shape) current, because Triton launches there."""
    is_elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if is_elsewhere else _NO_CHANGE


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least `n` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def reduction_program_count(device: torch.device) -> int:
    """Returns how many programs share a reduction over rows: a few per multiprocessor; their partial sums are
    added in a fixed order."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def as_unit_stride_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns [rows, H] with adjacent entries within a row."""
    return x if x.stride(1) == 1 else x.contiguous()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns [..., H] as [rows, H]: a view if strides allow it, else a copy."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def check_argument(condition: bool, message: str, remedy: str = "") -> None:
    """Raises UserError unless `condition` holds."""
    if not condition:
        raise UserError(message, remedy=remedy)


def check_same_kind(name: str, *tensors: torch.Tensor | None) -> None:
    """Raises UserError unless the tensors (without None) have one floating dtype and one device."""
    given = [t for t in tensors if t is not None]
    kinds = {(t.dtype, t.device) for t in given}
    if len(kinds) > 1 or not given[0].is_floating_point():
        kinds_found = ", ".join(f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in given)
        raise UserError(
            f"{name}: expected floating tensors of one dtype on one device, got {kinds_found}",
            remedy="cast them first",
        )
