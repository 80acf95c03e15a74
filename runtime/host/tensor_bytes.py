"""The bytes of a tensor, for digests and messages."""

from __future__ import annotations

import hashlib

import torch

_DIGEST_BYTES = 6  # exact in a float64


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor's entries in their order, uint8 [bytes]: a view where the tensor is
    contiguous, else a copy.

    A single number is contiguous with any stride, and torch views bytes at a stride of 1 only.
    """
    entries = tensor.detach().contiguous()
    return entries.as_strided((entries.numel(),), (1,)).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> float:
    """Returns a number that follows from all bytes of a tensor."""
    return bytes_digest(view_bytes(tensor.cpu()).numpy().data)


def bytes_digest(content: bytes | memoryview) -> float:
    """Returns a number that follows from all of some bytes."""
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    return float(int.from_bytes(digest, "little"))
