"""Block masks of flex attention as tensors: arguments of blocks that a plan can name.

A `BlockMask` holds a function of positions. Between blocks it becomes the truth values of that function, made
by ops that are recorded like others. The module imports torch's compiler: import it when a mask is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

_BLOCK_SIZE = 128  # torch's default


@dataclass(init=False, eq=False, repr=False)
class DenseBlockMask(BlockMask):
    """Lets queries attend where `allowed` [samples or 1, heads or 1, queries, keys] is true.

    On CPUs, where flex attention computes all scores, all positions are one block; elsewhere there are
    blocks that kernels skip.
    """

    allowed: torch.Tensor

    def __init__(self, allowed: torch.Tensor) -> None:
        self.allowed = allowed

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "allowed":
            return super().__setattr__(name, value)
        blocks = _single_block(value) if value.device.type in ("cpu", "meta") else find_blocks(value)
        self.__dict__.update(blocks.__dict__, allowed=value)


def make_dense(mask: BlockMask) -> DenseBlockMask:
    """Returns the mask with the truth values of its function."""
    if isinstance(mask, DenseBlockMask):
        return mask
    samples, heads = (1, 1, *mask.kv_num_blocks.shape[:-1])[-2:]
    queries, keys = mask.seq_lengths
    device = mask.kv_num_blocks.device
    allowed = flex_attention.create_mask(mask.mask_mod, samples, heads, queries, keys, device=device)
    return DenseBlockMask(allowed)


def find_blocks(allowed: torch.Tensor) -> BlockMask:
    """Returns the mask with blocks in which queries attend to all keys, to some, or to none."""
    shape = tuple(allowed.shape)
    return flex_attention.create_block_mask(
        _read_entries(allowed), *shape, device=allowed.device, BLOCK_SIZE=_BLOCK_SIZE
    )


def _single_block(allowed: torch.Tensor) -> BlockMask:
    queries, keys = allowed.shape[-2:]
    return BlockMask.from_kv_blocks(
        torch.ones((1, 1, 1), dtype=torch.int32, device=allowed.device),
        torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=allowed.device),
        BLOCK_SIZE=flex_attention._LARGE_SPARSE_BLOCK_SIZE,  # pyright: ignore[reportPrivateUsage]
        mask_mod=_read_entries(allowed),
        seq_lengths=(queries, keys),
    )


def _read_entries(allowed: torch.Tensor) -> Any:
    samples, heads = allowed.shape[:2]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        sample = b if samples > 1 else torch.zeros_like(b)
        head = h if heads > 1 else torch.zeros_like(h)
        return allowed[sample, head, q, k]

    return mask_mod
