"""The bytes of a tensor, for digests and messages."""

from __future__ import annotations

import torch


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor's entries in their order, uint8 [bytes]: a view where the tensor is
    contiguous, else a copy.

    A single number is contiguous with any stride, and torch views bytes at a stride of 1 only.
    """
    entries = tensor.detach().contiguous()
    return entries.as_strided((entries.numel(),), (1,)).view(torch.uint8)
