"""Loss ops on vocabulary shards: each rank of a replica holds the logits of some tokens, and ranks exchange
only a few numbers per row.

The methods of generated sections compute on shards as the user's code does on whole logits. An op that runs
along the vocabulary is replaced by a method of `VocabShards` (`secc.ir.analysis.vocab_sharding` says which).
Whole results are bit-equal on all ranks. For a softmax, ranks exchange the maximum and the sum of
exponentials of each row (Shoeybi et al., "Megatron-LM", 2019). Without tensor parallelism there is one shard,
the whole vocabulary.

The names of public methods appear as `parts.NAME` in the text of the IR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from secc.runtime import kernels
from secc.runtime.kernels.backend import accumulator_dtype
from secc.runtime.kernels.tile_cross_entropy import LabelTarget
from secc.runtime.kernels.vocab_group import combine_softmax_partials
from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.tensor_parallel.autograd_collectives import (
    copy_to_shards,
    gather_last_dim,
    reduce_from_shards,
)
from secc.runtime.tensor_parallel.replica_group import LoneRank, ReplicaProcessGroup

aten = torch.ops.aten
SHARD_IGNORED_LABEL = -100  # replaces labels that belong to other ranks


class VocabShards:
    """A vocabulary of `size` entries, split over the ranks of `group`; this rank holds `length` entries,
    `start` to `stop`."""

    def __init__(self, size: int, group: ReplicaProcessGroup | None = None) -> None:
        self.size, self.group = size, LoneRank() if group is None else group
        self.start, self.stop = slice_bounds(size, self.group.index, self.group.size)
        self.length = self.stop - self.start

    @property
    def operator_options(self) -> dict[str, Any]:
        """Keyword arguments of the vocabulary-parallel operators; empty for a single shard."""
        return (
            {}
            if isinstance(self.group, LoneRank)
            else {"group": self.group.handle, "first": self.start, "vocabulary": self.size}
        )

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Prepares a whole tensor (any shape) for use with shards: its gradient is summed over ranks."""
        return copy_to_shards(x, self.group) if x.requires_grad and torch.is_grad_enabled() else x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `x` (any shape) over all ranks."""
        return reduce_from_shards(x, self.group)

    def take(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's part of a whole tensor along `dim`."""
        return self.enter(x).narrow(dim, self.start, self.length)

    def whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenates all ranks' parts along `dim`."""
        return (
            gather_last_dim(x.movedim(dim, -1), self.group, self._rank_lengths())
            .movedim(-1, dim)
            .contiguous()
        )

    def _rank_lengths(self) -> list[int]:
        """Returns the number of entries of each rank."""
        return [
            stop - start
            for start, stop in (slice_bounds(self.size, i, self.group.size) for i in range(self.group.size))
        ]

    def _stack_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` [...] of every rank in order, as [ranks, ...]."""
        return self.group.all_gather(x.contiguous().view(-1), [x.numel()] * self.group.size).view(
            self.group.size, *x.shape
        )

    def softmax_norms(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns what normalises rows over `dim` (kept with size 1): [2, ...], the maximum and the log of
        the sum of exponentials above it, over the whole vocabulary."""
        top = x.amax(dim, keepdim=True)
        total = (x - top.masked_fill(top == -torch.inf, 0.0)).exp_().sum(dim, keepdim=True)
        maxima, sums = self._stack_ranks(torch.stack([top, total])).unbind(1)
        return combine_softmax_partials(maxima, sums)

    def log_softmax(self, x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
        """`torch.log_softmax` over the whole vocabulary, contiguous as torch's. `x` has this rank's `length`
        entries along `dim`, and so has the result."""
        return _LogSoftmax.apply(x, dim, self, half_to_float)  # pyright: ignore[reportUnknownMemberType,reportReturnType]

    def softmax(self, x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
        """`torch.softmax` over the whole vocabulary. `x` has this rank's `length` entries along `dim`, and so
        has the result."""
        return _Softmax.apply(x, dim, self, half_to_float)  # pyright: ignore[reportUnknownMemberType,reportReturnType]

    def logsumexp(self, x: torch.Tensor, dim: int | Sequence[int], keepdim: bool = False) -> torch.Tensor:
        """`torch.logsumexp` over the whole vocabulary: of `x` with `length` entries along `dim`, without that
        dim unless `keepdim`."""
        (vocab_dim,) = dim if isinstance(dim, Sequence) else (dim,)
        result: torch.Tensor = _VocabLogSumExp.apply(x, vocab_dim, self)  # pyright: ignore[reportUnknownMemberType,reportAssignmentType]
        return result if keepdim else result.squeeze(vocab_dim)

    def mean(
        self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`torch.mean` over dims that include the vocabulary."""
        total = self.leave(x.sum(dim, keepdim, dtype=dtype))
        return total / (x.numel() // self.length * self.size // max(total.numel(), 1))

    def amax(self, x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
        """Returns the maxima over the vocabulary, `dim` of `x`, without a gradient."""
        return self._stack_ranks(x.detach().amax(dim, keepdim)).amax(0)

    def argmax(self, x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        """Returns the positions in the whole vocabulary of the maxima along `dim`; the first one of equal
        entries."""
        best, place = x.detach().max(dim, keepdim)
        places = self._stack_ranks(place + self.start)
        return places.gather(0, self._stack_ranks(best).argmax(0, keepdim=True)).squeeze(0)

    def topk(
        self, x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `k` largest entries over the vocabulary, along `dim`, and their positions, chosen from
        the `k` largest of each rank."""
        counts = [min(k, length) for length in self._rank_lengths()]
        best, place = x.detach().topk(min(k, self.length), dim)
        best, place = (
            gather_last_dim(t.movedim(dim, -1), self.group, counts) for t in (best, place + self.start)
        )
        chosen = place.gather(-1, best.topk(k, -1).indices).movedim(-1, dim)
        return self.gather(x, dim, chosen), chosen

    def gather(
        self, x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
    ) -> torch.Tensor:
        """`torch.gather` along the vocabulary, `dim` of `x`; `index` counts in the whole vocabulary and has
        the result's shape. The rank that has an entry contributes it, the others zero."""
        here = (index >= self.start) & (index < self.stop)
        return self.leave(x.gather(dim, (index - self.start).clamp(0, self.length - 1)).where(here, 0))

    def nll_loss(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`aten.nll_loss_forward` for the reductions none and sum; the second result covers this rank's
        labels only."""
        return self._nll_loss(aten.nll_loss_forward.default, *given)

    def nll_loss2d(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`nll_loss` for rows with spatial dims after the tokens."""
        return self._nll_loss(aten.nll_loss2d_forward.default, *given)

    def _nll_loss(
        self,
        operator: Callable[..., Any],
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        LabelTarget(ignore, 0.0, 0.0, self.start, self.size).check_labels(target)
        here = (target >= self.start) & (target < self.stop) & (target != ignore)
        loss, total = operator(
            x,
            torch.where(here, target - self.start, SHARD_IGNORED_LABEL),
            weight,
            reduction,
            SHARD_IGNORED_LABEL,
        )
        return self.leave(loss), total

    def linear_cross_entropy(self, *given: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """`kernels.linear_cross_entropy` with this rank's shard of weight and bias."""
        operator = (
            kernels.vocab_parallel_linear_cross_entropy
            if self.operator_options
            else kernels.linear_cross_entropy
        )
        return operator(*given, **options, **self.operator_options)

    def linear_cross_entropy_rows(self, *given: torch.Tensor, **options: Any) -> torch.Tensor:
        """`kernels.linear_cross_entropy_rows` with this rank's shard of weight and bias."""
        operator = (
            kernels.vocab_parallel_linear_cross_entropy_rows
            if self.operator_options
            else kernels.linear_cross_entropy_rows
        )
        return operator(*given, **options, **self.operator_options)

    def linear_kl(self, *given: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """`kernels.linear_kl` with this rank's shards of both weights."""
        shared = {k: v for k, v in self.operator_options.items() if k != "first"}
        return (kernels.vocab_parallel_linear_kl if shared else kernels.linear_kl)(
            *given, **options, **shared
        )

    def linear_kl_ce(self, *given: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """`kernels.linear_kl_ce` with this rank's shards of both weights."""
        return (kernels.vocab_parallel_linear_kl_ce if self.operator_options else kernels.linear_kl_ce)(
            *given, **options, **self.operator_options
        )


class _LogSoftmax(torch.autograd.Function):
    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, parts: VocabShards, to_float: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = x.to(accumulator_dtype(x.dtype))
        greatest, log = parts.softmax_norms(wide, dim)
        out = (wide - greatest).sub_(log).to(wide.dtype if to_float else x.dtype).contiguous()
        ctx.dim, ctx.parts, ctx.dtype = dim, parts, x.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (out,) = ctx.saved_tensors
        wide = gradient.to(accumulator_dtype(gradient.dtype))
        total = ctx.parts.group.all_reduce(wide.sum(ctx.dim, keepdim=True))
        # In place, as these are the largest tensors of a step; nothing is rounded otherwise.
        return out.to(wide.dtype).exp().mul_(total).neg_().add_(wide).to(ctx.dtype), None, None, None


class _Softmax(torch.autograd.Function):
    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, parts: VocabShards, to_float: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = x.to(accumulator_dtype(x.dtype))
        greatest, log = parts.softmax_norms(wide, dim)
        out = (wide - greatest).sub_(log).exp_().to(wide.dtype if to_float else x.dtype).contiguous()
        ctx.dim, ctx.parts, ctx.dtype = dim, parts, x.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (out,) = ctx.saved_tensors
        wide = gradient.to(accumulator_dtype(gradient.dtype))
        total = ctx.parts.group.all_reduce((wide * out).sum(ctx.dim, keepdim=True))
        return (wide - total).mul_(out).to(ctx.dtype), None, None, None


class _VocabLogSumExp(torch.autograd.Function):
    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, parts: VocabShards) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        greatest, log = norms = parts.softmax_norms(x.to(accumulator_dtype(x.dtype)), dim)
        ctx.save_for_backward(x, norms)
        return (greatest + log).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, (greatest, log) = ctx.saved_tensors
        shares = (x.to(log.dtype) - greatest).sub_(log).exp_()
        return shares.mul_(gradient).to(x.dtype), None, None
