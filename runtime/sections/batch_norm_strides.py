"""Gradients of batch norms for one sample on CPUs.

A tensor [1, C, H, W] counts as contiguous in two orders of strides, and torch 2.13 gives a batch norm wrong
gradients where its input has one of them and the gradient of its result the other. Plain PyTorch meets that
for a batch of one sample only; a plan computes samples of a batch in micro-batches of one, and messages
change strides. Here input and gradient get the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F


@contextmanager
def batch_norms_of_one(device: torch.device) -> Iterator[None]:
    """Context in which batch norms of one sample have the right gradients. On devices other than CPUs it does
    nothing."""
    if device.type != "cpu":
        yield
        return
    compute = F.batch_norm

    def batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.shape[0] != 1 or type(input) is not torch.Tensor or not torch.is_grad_enabled():
            return compute(input, *args, **kwargs)
        result = compute(_to_row_major(input), *args, **kwargs)
        if result.requires_grad:
            # Before a ReLU in place, too: a hook gets the gradient of the tensor as it was when it was added.
            result.register_hook(_to_row_major)
        return result

    F.batch_norm = batch_norm
    try:
        yield
    finally:
        F.batch_norm = compute


def _to_row_major(x: torch.Tensor) -> torch.Tensor:
    """Returns `x`, or a copy if its strides are not those of a new tensor of its shape."""
    stride = 1
    for size, own in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if own != stride:
            return x.clone(memory_format=torch.contiguous_format)
        stride *= size
    return x
