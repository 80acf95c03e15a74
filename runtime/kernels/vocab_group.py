"""Vocabulary shards: how the ranks that hold parts of one vocabulary agree on a row's softmax.

Each shard reduces its logits of a row to a maximum and a sum of exponentials, and `combine_softmax_partials`
joins them. Over a process group, these partials (a few numbers per row) are gathered and combined in rank
order, so that all ranks compute the same bits. Without a group there is one shard, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group  # as torch's functional collectives do


def combine_softmax_partials(maxima: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Returns what normalises rows, from their shards: [2, ...], the maximum logit and log(sum of exp(logit -
    maximum)).

    `maxima` and `sums` are [shards, ...]: the maximum and the sum (without the log) of each shard; a shard
    without logits has -inf and 0. A logit's log-probability is logit - maximum - log. The two are kept apart
    because their sum, the log-sum-exp, rounds away digits of large logits.
    """
    top = maxima.amax(0)
    base = torch.where(top == -torch.inf, 0.0, top)  # rows of -inf only: inf - inf would be NaN
    return torch.stack([base, (sums * (maxima - base).exp()).sum(0).log()])


@dataclass(frozen=True)
class VocabGroup:
    """The ranks that share a vocabulary: the name of their process group, or "" for a whole vocabulary on
    this rank."""

    group: str = ""

    def _process_group(self) -> dist.ProcessGroup:
        return _resolve_process_group(self.group)  # pyright: ignore[reportArgumentType]  # a NewType of str

    @property
    def size(self) -> int:
        """The number of shards."""
        return self._process_group().size() if self.group else 1

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """Returns `partial` [...] of every shard in rank order: [shards, ...]."""
        if not self.group:
            return partial.unsqueeze(0)
        parts = [torch.empty_like(partial) for _ in range(self._process_group().size())]
        dist.all_gather(parts, partial.contiguous(), group=self._process_group())
        return torch.stack(parts)

    def sum_in_rank_order(self, partial: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `partial` (any shape) over shards, added in rank order."""
        return self.all_gather(partial).sum(0) if self.group else partial

    def all_reduce_(self, whole: torch.Tensor) -> None:
        """Replaces a large tensor (any shape) by its sum over shards."""
        if self.group:
            dist.all_reduce(whole, group=self._process_group())
