"""Batch norms over the samples of all replicas of a section that takes the whole batch (`--whole-batch`).

Each replica has one micro-batch in a step. In training mode a norm's mean and variance are those of the
samples of all replicas: a forward sums (count, sum, sum of squares) over ranks, in float64, and a backward
sums the gradient's two reductions. This is `torch.nn.SyncBatchNorm` (Ioffe & Szegedy 2015, across devices),
with counts that differ between ranks, on any device, also where a layer runs again in the backward.

Calls inside `torch.nn.BatchNorm1d` and its relatives count; a batch norm in other code does not, and the
compiler gives its section one replica.

A replica without samples in a step does not know which norms the others call. In such a step every sum is
preceded by its size, and the replica adds zeros until the others end their pass (`follow_pass`). At the end
of a forward it takes their buffers, which its own norms have not updated.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode

from secc.runtime.model.autograd_state import is_in_backward
from secc.runtime.tensor_parallel.replica_group import LoneRank, ReplicaGroup

_BATCH_NORM = inspect.signature(F.batch_norm)


def find_batch_norms(model: nn.Module, blocks: Iterable[str]) -> list[_BatchNorm]:
    """Returns the batch norms in `blocks` (module paths)."""
    modules = (m for path in blocks for m in model.get_submodule(path).modules())
    return [m for m in dict.fromkeys(modules) if isinstance(m, _BatchNorm)]


class SynchronizedNorms:
    """The batch norms of one section on this rank.

    group: the ranks of all its replicas, one each. It installs itself in the forwards of `norms`. A forward
    that runs again in the backward leaves the norms' buffers as they are.
    """

    def __init__(self, norms: Iterable[_BatchNorm], group: ReplicaGroup | None = None) -> None:
        self.group: ReplicaGroup = LoneRank() if group is None else group
        self._norms = list(norms)
        self._announces = self._leads = False
        for norm in self._norms:
            norm.forward = self._wrap_forward(norm, norm.forward)

    def _wrap_forward(
        self, norm: nn.Module, inner: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        @functools.wraps(inner)
        def forward(input: torch.Tensor) -> torch.Tensor:
            again = is_in_backward()
            with _kept_values(norm.buffers() if again else ()):
                if self.group.size == 1:
                    return inner(input)
                with _BatchNormMode(self):
                    return inner(input)

        return forward

    def begin_step(self, active: list[bool]) -> None:
        """Call it before each step. active: whether each replica has samples."""
        self._announces = not all(active)
        self._leads = self._announces and active.index(True) == self.group.index if any(active) else False

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of a vector over the replicas, in float64."""
        total = values.double()
        if self._announces:
            self._announce(len(total), total.device)
        return self.group.all_reduce(total)

    def _announce(self, size: int, device: torch.device) -> int:
        """Tells how many entries are summed next, 0 at the end of a pass; returns what the replicas with
        samples told. This rank has none if `size` is negative."""
        told = [0, 0] if size < 0 else [size, 1]
        sizes, ranks = self.group.all_reduce(torch.tensor(told, device=device)).tolist()
        if sizes % ranks:
            raise RuntimeError("replicas call batch norms in different orders; compile again with dp=1")
        return sizes // ranks

    def share_gradients(self, has_gradient: list[bool], device: torch.device) -> list[bool]:
        """Returns which results of the section have a gradient on some replica: a replica without one takes
        part with zeros, since the others' statistics depend on its samples."""
        flags = self.group.all_reduce(torch.tensor(has_gradient, dtype=torch.int64, device=device))
        return [bool(n) for n in flags.tolist()]

    def end_pass(self, is_forward: bool, device: torch.device) -> None:
        """Call it after each forward and backward of a replica with samples."""
        if self._announces:
            self._announce(0, device)
            if is_forward:
                self._share_buffers(device)

    def follow_pass(self, is_forward: bool, device: torch.device) -> None:
        """Takes part in a pass of the other replicas, without samples."""
        while (size := self._announce(-1, device)) > 0:
            self.group.all_reduce(torch.zeros(size, dtype=torch.float64, device=device))
        if is_forward:
            self._share_buffers(device)

    def _share_buffers(self, device: torch.device) -> None:
        """Gives all replicas the norms' buffers of the first one with samples."""
        buffers = [b for norm in self._norms for b in norm.buffers()]
        flat = torch.cat([b.double().flatten() for b in buffers] or [torch.zeros(0, device=device).double()])
        total = self.group.all_reduce(flat if self._leads else torch.zeros_like(flat))
        for buffer, values in zip(buffers, total.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


@dataclass(frozen=True)
class _Moments:
    """The mean and variance of each channel over all samples, and how many entries they are of."""

    mean: torch.Tensor
    variance: torch.Tensor
    count: int


class _BatchNormMode(TorchFunctionMode):
    """Computes `F.batch_norm` with the statistics of all replicas where it takes those of the batch."""

    def __init__(self, norms: SynchronizedNorms) -> None:
        super().__init__()
        self._norms = norms

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        bound = _BATCH_NORM.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["training"]:
            return func(*args, **kwargs)
        input = cast(torch.Tensor, given["input"])
        moments = self._find_moments(input.detach())
        _update_running_statistics(given["running_mean"], given["running_var"], moments, given["momentum"])
        return _NormalizeOverReplicas.apply(  # pyright: ignore[reportUnknownMemberType]
            input, given["weight"], given["bias"], moments, given["eps"], self._norms
        )

    def _find_moments(self, input: torch.Tensor) -> _Moments:
        """Raises ValueError for one entry in each channel, as PyTorch does."""
        dims, channels = _reduced_dims(input), input.shape[1]
        count = input.numel() // channels
        variance, mean = torch.var_mean(_wide(input), dims, correction=0)
        mean, variance = mean.double(), variance.double()
        own = torch.cat([mean.new_tensor([count]), count * mean, count * (variance + mean * mean)])
        total = self._norms.sum_over_replicas(own)
        count = int(total[0])
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got {count}")
        mean, squares = total[1:].split(channels)
        mean = mean / count
        return _Moments(mean, (squares / count - mean * mean).clamp(min=0), count)


def _update_running_statistics(
    running_mean: torch.Tensor | None, running_var: torch.Tensor | None, m: _Moments, momentum: float
) -> None:
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_((momentum * m.mean).to(running_mean.dtype))
    if running_var is not None:
        unbiased = m.variance * (m.count / (m.count - 1))
        running_var.mul_(1 - momentum).add_((momentum * unbiased).to(running_var.dtype))


class _NormalizeOverReplicas(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: _Moments,
        eps: float,
        norms: SynchronizedNorms,
    ) -> torch.Tensor:
        wide = _wide(input)
        mean, variance = moments.mean.to(wide.dtype), moments.variance.to(wide.dtype)
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt())
        ctx.norms, ctx.count = norms, moments.count
        wide_weight, wide_bias = (None if t is None else t.to(wide.dtype) for t in (weight, bias))
        return F.batch_norm(wide, mean, variance, wide_weight, wide_bias, False, 0.0, eps).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, mean, scale = ctx.saved_tensors
        dims, dy = _reduced_dims(input), _wide(gradient)
        normalized = (_wide(input) - _by_channel(mean, input)) * _by_channel(scale, input)
        own = torch.cat([dy.sum(dims), (dy * normalized).sum(dims)])
        sum_dy, sum_product = own.split(len(mean))
        in_input = None
        if ctx.needs_input_grad[0]:
            total = ctx.norms.sum_over_replicas(own) / ctx.count
            mean_dy, mean_product = (_by_channel(t, input) for t in total.to(dy.dtype).split(len(mean)))
            factor = scale if weight is None else scale * weight
            in_input = _by_channel(factor, input) * (dy - mean_dy - normalized * mean_product)
            in_input = in_input.to(input.dtype)
        in_weight = sum_product.to(weight.dtype) if weight is not None else None
        return in_input, in_weight, None if weight is None else sum_dy.to(weight.dtype), None, None, None


def _reduced_dims(input: torch.Tensor) -> list[int]:
    """The dims of an input [samples, channels, ...] that a norm reduces."""
    return [0, *range(2, input.dim())]


def _by_channel(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A value for each channel, in a shape that broadcasts to an input [samples, channels, ...]."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 at least."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@contextmanager
def _kept_values(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gives buffers back the values that they have now."""
    kept = [(b, b.clone()) for b in buffers]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # without a new version: autograd may have saved the buffer
