"""Compares what `on_step` writes to weights and buffers on different ranks.

Ranks that hold the same weight train copies of it, which have to stay equal. A callback runs on every rank,
and may write on some of them only (`if result.rank == 0:`), or write other values on each: the copies would
differ from then on, and no loss would show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from secc.runtime.errors import UserError
from secc.runtime.host.tensor_bytes import tensor_digest

Exchange = Callable[[Sequence[float]], torch.Tensor]  # each rank's numbers to those of all, [ranks, n]


@dataclass(frozen=True)
class UnequalWrite:
    """A weight that is not the same on all ranks that hold it, and the ranks that wrote to it."""

    name: str
    writers: tuple[int, ...]
    holders: tuple[int, ...]

    def as_error(self, what: str) -> UserError:
        """Returns the error for a function that wrote it."""
        ranks = " and ".join(map(str, self.writers))
        return UserError(
            f"{what} writes to {self.name} on rank {ranks}, and then it differs between the ranks that hold"
            f" it ({', '.join(map(str, self.holders))})",
            remedy="write the same values on every rank: not under `if result.rank == 0`, and from nothing"
            " that only one rank has",
        )


def find_unequal_write(
    names: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    written: Collection[str],
    failed: bool,
    exchange: Exchange,
) -> UnequalWrite | None:
    """Returns the first weight that this or another rank has written to and that ranks hold with different
    values; None if there is none, or if the function failed on a rank. Collective, and the same on all ranks.

    names: all weights and buffers of the model, the same on all ranks. tensors: those that this rank holds
    whole. written: those that it has written to.
    """
    counts = exchange([float(bool(written)), float(failed)]).sum(0)
    if not counts[0] or counts[1]:
        return None
    writes = exchange([float(name in written) for name in names])
    found = [name for name, count in zip(names, writes.sum(0).tolist(), strict=True) if count]
    digests = exchange([tensor_digest(tensors[name]) if name in tensors else math.nan for name in found])
    for name, column in zip(found, digests.T.tolist(), strict=True):
        holders = [rank for rank, digest in enumerate(column) if not math.isnan(digest)]
        if len({column[rank] for rank in holders}) > 1:
            writers = writes[:, names.index(name)].nonzero().flatten().tolist()
            return UnequalWrite(name, tuple(writers), tuple(holders))
    return None
