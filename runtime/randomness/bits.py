"""Computes 64 random bits for every entry of a tensor, from keys and coordinates alone.

An entry's counter is its key plus the sum over dims of its coordinate times an odd number that belongs to the
dim. The bits are the finaliser of splitmix64 of that counter (Steele, Lea, Flood 2014, with the constants of
Stafford's variant 13). The counter is made of coordinates and not of a running index, so an entry keeps its
bits when a padded dim grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch

MIX_CHUNK_ENTRIES = 1 << 15  # mixed at a time, so that they stay in a CPU's cache
SHORT_ROW_ENTRIES = 64  # rows below this are mixed together, in one operation


def hash_key(*parts: object) -> int:
    """Return a signed 64-bit number for these parts, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@cache
def dim_multiplier(dim: int) -> int:
    """Return the odd number that coordinates of this dim are multiplied by."""
    return hash_key("dim", dim) | 1


def coordinate_offsets(dim: int, places: torch.Tensor) -> torch.Tensor:
    """Return what the coordinates `places` (int64 [n]) along a dim add to counters: int64 [n]."""
    return places * dim_multiplier(dim)


def generate_bits(parts: Sequence[torch.Tensor], base: int, device: torch.device) -> torch.Tensor:
    """Return random int64 of shape [len(p) for p in parts]. `parts[d]` (int64) is added to the counter
    `base` along dim d."""
    shape = [len(p) for p in parts]
    if 0 in shape:
        return torch.empty(shape, dtype=torch.int64, device=device)
    rows = torch.full((1,), base, dtype=torch.int64, device=device)
    for part in parts[:-1]:
        rows = (rows.unsqueeze(1) + part).flatten()
    last = parts[-1] if parts else rows.new_zeros(1)
    if device.type == "cuda":
        from secc.runtime.randomness import bits_triton  # imports Triton, which ranks without a GPU lack

        if bits_triton.has_bits_kernel(rows):
            return bits_triton.random_bits(rows, last).view(shape)
    return mix_counters(rows, last).view(shape)


def mix_counters(rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return random int64 [R, L] for the counters `rows[i] + last[j]` (int64 [R] and [L], neither empty)."""
    shape = len(rows), len(last)
    if len(last) < SHORT_ROW_ENTRIES or len(rows) == 1:
        rows, last = (rows.unsqueeze(1) + last).flatten(), last.new_zeros(1)
    out = rows.new_empty(len(rows), len(last))
    step = max(1, MIX_CHUNK_ENTRIES // len(last))
    spare = rows.new_empty(min(step, len(rows)), len(last))
    for first in range(0, len(rows), step):
        piece = out[first : first + step]
        torch.add(rows[first : first + step].unsqueeze(1), last, out=piece)
        _finalise_splitmix64(piece, spare[: len(piece)])
    return out.view(shape)


def _finalise_splitmix64(z: torch.Tensor, spare: torch.Tensor) -> None:
    """Apply the finaliser to `z` in place, with `spare` (same shape) as a buffer.

    Shifts of int64 carry the sign, so the masks remove it.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, None)):
        torch.bitwise_right_shift(z, shift, out=spare)
        z.bitwise_xor_(spare.bitwise_and_((1 << 64 - shift) - 1))
        if factor is not None:
            z.mul_(factor)
