"""Vocabulary shards: how ranks that hold parts of one vocabulary agree on a row's softmax.

Each shard reduces its own logits of a row to a maximum and a sum of exponentials; `combine` joins them. Over
a process group the partials (a few numbers a row) are gathered and combined in rank order, so every rank
computes the same bits. Without a group there is one shard, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group  # as torch's functional collectives find groups


def combine_softmax_partials(maxima: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """What normalises rows, from their shards: [2, ...], the greatest logit and log(sum of exp(logit -
    greatest)).

    `maxima` and `sums` are [shards, ...]: the same of each shard, its sum without the log; a shard without
    logits has -inf and 0. A logit's log-probability is logit - greatest - log; the two are kept apart since
    their sum, the log-sum-exp, rounds away digits of large logits.
    """
    top = maxima.amax(0)
    base = torch.where(
        top == -torch.inf, 0.0, top
    )  # rows of -inf alone: their maximum is no number to subtract
    return torch.stack([base, (sums * (maxima - base).exp()).sum(0).log()])


@dataclass(frozen=True)
class VocabGroup:
    """The ranks that share a vocabulary: the name of their process group, or "" for a whole vocabulary
    here."""

    group: str = ""

    def _process_group(self) -> dist.ProcessGroup:
        return _resolve_process_group(self.group)  # pyright: ignore[reportArgumentType]  # a NewType of str

    @property
    def size(self) -> int:
        """How many shards the vocabulary has."""
        return self._process_group().size() if self.group else 1

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[...] of every shard in rank order: [shards, ...]."""
        if not self.group:
            return partial.unsqueeze(0)
        parts = [torch.empty_like(partial) for _ in range(self._process_group().size())]
        dist.all_gather(parts, partial.contiguous(), group=self._process_group())
        return torch.stack(parts)

    def sum_in_rank_order(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over shards, added in rank order."""
        return self.all_gather(partial).sum(0) if self.group else partial

    def all_reduce_(self, whole: torch.Tensor) -> None:
        """Replace a large tensor by its sum over shards."""
        if self.group:
            dist.all_reduce(whole, group=self._process_group())
