"""Random bits on a GPU in one pass: each entry is the finaliser of splitmix64 of a sum of counters.

`secc.runtime.randomness.bits` explains the counters and computes the same in plain PyTorch, in eleven passes.
"""

from __future__ import annotations

import torch

from secc.runtime.kernels.backend import KERNELS_INTERPRETED, ceil_div, jit, on_device, tl, triton

BITS_BLOCK = 1024


@jit
def _mix_kernel(rows, last, out, width, total, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < total
    z = tl.load(rows + entry // width, mask=inside, other=0) + tl.load(
        last + entry % width, mask=inside, other=0
    )
    z = z.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    tl.store(out + entry, z.to(tl.int64, bitcast=True), mask=inside)


def has_bits_kernel(x: torch.Tensor) -> bool:
    """Whether the kernel runs on tensors on the device of `x`, of any shape."""
    return triton is not None and (x.is_cuda or KERNELS_INTERPRETED)


def random_bits(rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return random int64 [R, L] for the counters `rows[i] + last[j]` (int64 [R] and [L], neither empty).

    Needs Triton and a GPU, or Triton's interpreter: see `has_bits_kernel`.
    """
    out = rows.new_empty(len(rows), len(last))
    with on_device(rows):
        _mix_kernel[(ceil_div(out.numel(), BITS_BLOCK),)](
            rows, last, out, len(last), out.numel(), BLOCK=BITS_BLOCK
        )
    return out
