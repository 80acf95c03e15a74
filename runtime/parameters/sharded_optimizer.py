"""Parameters whose optimizer is sharded: their values in flat buffers, of which each replica updates one
shard.

The optimizer stays the user's. It is built over the whole parameters, so that groups by name, shape or
identity are what the user meant; then this rank's slices take the places of the parameters, as views of the
same memory. Whatever part of a parameter is not in this rank's shard is another replica's, and comes back by
an all-gather after the step. A slice is 1-D, entries in row-major order, except where it is the whole
parameter, which keeps its shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

# Their names since torch 2.13, which warns of the old ones.
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ParameterSlice:
    """What a rank's optimizer holds of parameter `name`: its entries `start` to `stop` of `shape`, row-major.

    `shape` is that of the rank's own part where the parameter is cut over a replica's ranks, as `cut` says.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    cut: ParameterCut | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter itself, as this rank has it."""
        return self.stop - self.start == self.shape.numel()

    @property
    def has_first_entry(self) -> bool:
        """Whether the parameter's first entry is in it."""
        return self.start == 0 and (self.cut is None or self.cut.index == 0)


def whole_parameter_slice(name: str, param: torch.Tensor, cut: ParameterCut | None = None) -> ParameterSlice:
    """The piece that is all that a rank has of a parameter."""
    return ParameterSlice(name, param.shape, 0, param.numel(), cut)


class FlatParameters:
    """Parameters of one dtype in one buffer, padded with zeros so that `count` shards are alike; this rank's
    is shard `index`.

    `slices` has what is in the shard of each parameter: a leaf that shares the shard's memory, and which
    piece it is. With `dtype` parameters and buffer are of that dtype, while `masters`, the shard that the
    optimizer updates, keeps the parameters' own. `apart`: the shard has memory of its own, so that the
    buffer's may go.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        index: int,
        count: int,
        cuts: Mapping[str, ParameterCut] | None = None,
        dtype: torch.dtype | None = None,
        apart: bool = False,
    ) -> None:
        first = named[0][1]
        self.shard_size = -(-sum(p.numel() for _, p in named) // count)
        self.buffer = torch.zeros(self.shard_size * count, dtype=dtype or first.dtype, device=first.device)
        self.shard_start, end = index * self.shard_size, (index + 1) * self.shard_size
        self.shard = (
            torch.zeros_like(self.buffer[self.shard_start : end])
            if apart
            else self.buffer[self.shard_start : end]
        )
        self.masters = (
            self.shard if dtype in (None, first.dtype) else torch.zeros_like(self.shard, dtype=first.dtype)
        )
        self.slices: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice]] = {}
        offset = 0
        for name, param in named:
            after = offset + param.numel()
            own = param.data
            param.data = self.buffer[offset:after].view(param.shape).copy_(own)
            start, stop = max(offset, self.shard_start), min(after, end)
            if start < stop:
                piece = ParameterSlice(
                    name, param.shape, start - offset, stop - offset, (cuts or {}).get(name)
                )
                part = self.masters[start - self.shard_start : stop - self.shard_start]
                part.copy_(own.reshape(-1)[piece.start : piece.stop])
                self.slices[param] = nn.Parameter(part.view(param.shape) if piece.is_whole else part), piece
            offset = after
        self.copy_masters_to_shard()

    def set_gradients(self, total: torch.Tensor) -> None:
        """Give the slices their gradients: `total` holds those of the shard, [size] in any dtype."""
        total, position = total.to(self.masters.dtype), 0
        for param, _ in self.slices.values():
            param.grad = total[position : position + param.numel()].view(param.shape)
            position += param.numel()

    def copy_masters_to_shard(self) -> None:
        """Round the masters to what modules compute with."""
        if self.masters is not self.shard:
            self.shard.copy_(self.masters)

    def gather_values(self, group: Any) -> dist.Work:
        """Start to collect all shards, so that every rank has all values. Collective."""
        return start_all_gather(self.buffer, self.shard, group)


def valueless_placeholder(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What a parameter holds without its values: its shape, and NaN in the memory of one entry, so that a
    misuse shows."""
    fill = float("nan") if param.is_floating_point() else 0
    return torch.full((), fill, dtype=param.dtype, device=device).expand(param.shape)


def start_reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> dist.Work:
    """Start to sum `whole`, [n * size], over the n ranks of `group`; rank i gets entries i * size and on in
    `part`, [size]."""
    work = _torch_reduce_scatter(part, whole, dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work


def start_all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> dist.Work:
    """Start to collect `part`, [size], of the n ranks of `group` in `whole`, [n * size]."""
    work = _torch_all_gather(whole, part, group=group, async_op=True)
    assert work is not None
    return work


def flatten_gradients(params: Iterable[nn.Parameter], size: int | None) -> torch.Tensor:
    """The gradients in one buffer, zeros where there is none and up to `size`.

    It is in float32 where a parameter has fewer bits, so that sums stay exact.
    """
    params = list(params)
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    made = [p.grad.reshape(-1) for p in params if p.grad is not None]
    if (
        len(made) == len(params)
        and all(g.dtype == dtype for g in made)
        and size in (None, sum(g.numel() for g in made))
    ):
        return torch.cat(made)
    flat = torch.empty(size or sum(p.numel() for p in params), dtype=dtype, device=params[0].device)
    start = 0
    for param in params:
        part = flat[start : start + param.numel()]
        start += param.numel()
        if param.grad is None:
            part.zero_()
        else:
            part.view(param.shape).copy_(param.grad)
    flat[start:].zero_()
    return flat


SlicesByParameter = Mapping[nn.Parameter, tuple[nn.Parameter, ParameterSlice] | None]


def shard_optimizer(optimizer: torch.optim.Optimizer, slices: SlicesByParameter) -> None:
    """Put slices in the places of parameters, with what state the optimizer has made of them; None where this
    rank has no slice.

    Groups that become empty stay, so that schedulers find every group. The optimizer must be elementwise
    (`secc.runtime.parameters.elementwise_check`).
    """
    for group in optimizer.param_groups:
        held = [_slice_or_parameter(p, slices) for p in group["params"]]
        if "param_names" in group:
            group["param_names"] = [
                n for n, p in zip(group["param_names"], held, strict=True) if p is not None
            ]
        group["params"] = [p for p in held if p is not None]
    for param, found in slices.items():
        state = optimizer.state.pop(param, None)
        if state is not None and found is not None:
            optimizer.state[found[0]] = {
                key: _slice_state(value, found[1], found[0].dtype) for key, value in state.items()
            }


def _slice_or_parameter(param: nn.Parameter, slices: SlicesByParameter) -> nn.Parameter | None:
    if param not in slices:
        return param
    found = slices[param]
    return None if found is None else found[0]


def _slice_state(value: Any, piece: ParameterSlice, dtype: torch.dtype) -> Any:
    """The part of a state that belongs to a slice: of a tensor like the parameter its entries, of anything
    else all."""
    if not isinstance(value, torch.Tensor) or value.shape != piece.shape:
        return value
    value = value.to(dtype) if value.is_floating_point() else value
    return value if piece.is_whole else value.reshape(-1)[piece.start : piece.stop].clone()
