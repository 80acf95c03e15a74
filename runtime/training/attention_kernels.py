"""Chooses the attention kernels of a rank on a GPU.

PyTorch prefers cuDNN's on Hopper and later. cuDNN prepares a kernel for each shape that it has not seen yet,
which takes the host about 50 ms forward and as long backward (H200, PyTorch 2.11), while the GPU waits. Where
samples differ in size nearly every micro-batch has a new shape, so ranks then leave cuDNN out, and PyTorch
takes its flash attention, which needs no preparation. The results differ by rounding only.
"""

from __future__ import annotations

import os

import torch

from secc.runtime.plan.schema import SAMPLE_COUNT_SYMBOL, Plan

KEEP_VARIABLE = "SECC_CUDNN_ATTENTION"  # "1" leaves PyTorch's choice as it is


def choose_attention_kernels(plan: Plan) -> None:
    """Leaves cuDNN's attention out, in this process, if samples of the plan differ in size."""
    if os.environ.get(KEEP_VARIABLE) != "1" and has_uneven_samples(plan):
        torch.backends.cuda.enable_cudnn_sdp(False)


def has_uneven_samples(plan: Plan) -> bool:
    """Whether any size of the inputs besides the number of samples differs from batch to batch."""
    return any(symbol.name != SAMPLE_COUNT_SYMBOL for symbol in plan.symbols)
