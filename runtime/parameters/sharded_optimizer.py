"""Sharded optimizer states (ZeRO stages 1 and 2): parameters in flat buffers, each replica updates one shard.

The optimizer remains the user's class. It is constructed over the user's whole parameters, so that parameter
groups by name, shape or identity come out as intended; then this rank's slices replace the parameters in the
optimizer, as views of the same memory. The slices of other replicas arrive by an all-gather after the step. A
slice is 1-D, its entries in row-major order; only a slice that covers its whole parameter keeps the
parameter's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

# torch 2.13 renamed these collectives and warns about the old names.
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ParameterSlice:
    """The part of parameter `name` that this rank's optimizer updates: entries `start` to `stop`, row-major,
    of a tensor of `shape`.

    If the parameter is cut over the ranks of a replica (tensor parallelism), `shape` is the shape of this
    rank's part and `cut` says which part it is.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    cut: ParameterCut | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the slice covers all that this rank holds of the parameter."""
        return self.stop - self.start == self.shape.numel()

    @property
    def has_first_entry(self) -> bool:
        """Whether the slice contains the first entry of the uncut parameter."""
        return self.start == 0 and (self.cut is None or self.cut.has_first_entry)


def whole_parameter_slice(name: str, param: torch.Tensor, cut: ParameterCut | None = None) -> ParameterSlice:
    """Returns the slice that covers all that this rank holds of a parameter, of any shape."""
    return ParameterSlice(name, param.shape, 0, param.numel(), cut)


class FlatParameters:
    """Parameters of one dtype in one flat buffer, padded with zeros to `count` equal shards; shard `index` is
    this rank's.

    `slices` maps each parameter that overlaps the shard to (leaf tensor in the shard's memory, which part it
    is). With `dtype`, parameters and `buffer` have that dtype, while `masters`, the shard that the optimizer
    updates, keeps the parameters' original dtype. With `apart`, the shard has its own memory, so that the
    buffer can be released between uses (zero3).
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        index: int,
        count: int,
        cuts: Mapping[str, ParameterCut] | None = None,
        dtype: torch.dtype | None = None,
        apart: bool = False,
    ) -> None:
        first = named_params[0][1]
        self.shard_size = -(-sum(p.numel() for _, p in named_params) // count)
        self.buffer = torch.zeros(self.shard_size * count, dtype=dtype or first.dtype, device=first.device)
        self.shard_start, end = index * self.shard_size, (index + 1) * self.shard_size
        view = self.buffer[self.shard_start : end]
        self.shard = torch.zeros_like(view) if apart else view
        self.masters = (
            self.shard if dtype in (None, first.dtype) else torch.zeros_like(self.shard, dtype=first.dtype)
        )
        self.slices: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice]] = {}
        offset = 0
        for name, param in named_params:
            next_offset = offset + param.numel()
            values = param.data
            param.data = self.buffer[offset:next_offset].view(param.shape).copy_(values)
            start, stop = max(offset, self.shard_start), min(next_offset, end)
            if start < stop:
                part = ParameterSlice(
                    name, param.shape, start - offset, stop - offset, (cuts or {}).get(name)
                )
                master = self.masters[start - self.shard_start : stop - self.shard_start]
                master.copy_(values.reshape(-1)[part.start : part.stop])
                self.slices[param] = nn.Parameter(master.view(param.shape) if part.is_whole else master), part
            offset = next_offset
        self.copy_masters_to_shard()

    def set_gradients(self, total: torch.Tensor) -> None:
        """Sets the gradients of the slices from `total`, of shape [shard_size] and any dtype."""
        total, position = total.to(self.masters.dtype), 0
        for param, _ in self.slices.values():
            param.grad = total[position : position + param.numel()].view(param.shape)
            position += param.numel()

    def copy_masters_to_shard(self) -> None:
        """Rounds the masters to the dtype that modules compute in."""
        if self.masters is not self.shard:
            self.shard.copy_(self.masters)

    def gather_values(self, group: Any) -> dist.Work:
        """Starts the all-gather that fills `buffer` with the shards of all ranks. Collective."""
        return start_all_gather(self.buffer, self.shard, group)


@dataclass(eq=False)
class MasterGroup:
    """Float32 masters in one tensor `values`, which fills its storage. `leaves`: the optimizer's parameters,
    views of it. `write_weights` rounds the masters into the weights that modules compute with. `is_on_host`:
    between optimizer steps they are in host memory (`secc.runtime.parameters.offloaded_optimizer`)."""

    values: torch.Tensor
    leaves: tuple[nn.Parameter, ...]
    write_weights: Callable[[], object]
    is_on_host: bool = False

    def views_of_leaves(self, copy: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of a copy of `values` that are copies of the leaves."""
        start = self.values.storage_offset()
        return [
            copy
            if leaf.shape == copy.shape
            else copy[(begin := leaf.storage_offset() - start) : begin + leaf.numel()].view(leaf.shape)
            for leaf in self.leaves
        ]


def valueless_placeholder(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the parameter's shape in the memory of one entry, which is NaN, so that reading it
    by mistake shows."""
    fill = float("nan") if param.is_floating_point() else 0
    return torch.full((), fill, dtype=param.dtype, device=device).expand(param.shape)


def start_reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> dist.Work:
    """Starts to sum `whole`, of shape [n * size], over the n ranks of `group`; rank i receives entries [i *
    size, (i + 1) * size) in `part`."""
    work = _torch_reduce_scatter(part, whole, dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work


def start_all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> dist.Work:
    """Starts to collect `part`, of shape [size], of each of the n ranks of `group` in `whole`, of shape [n *
    size]."""
    work = _torch_all_gather(whole, part, group=group, async_op=True)
    assert work is not None
    return work


def flatten_gradients(params: Iterable[nn.Parameter], size: int | None) -> torch.Tensor:
    """Copies gradients into one buffer, with zeros for missing gradients and as padding up to `size`.

    The buffer is at least float32, so that 16-bit gradients are summed without rounding in between.
    """
    params = list(params)
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    gradients = [p.grad.reshape(-1) for p in params if p.grad is not None]
    if (
        len(gradients) == len(params)
        and all(g.dtype == dtype for g in gradients)
        and size in (None, sum(g.numel() for g in gradients))
    ):
        return torch.cat(gradients)
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
    """Replaces parameters by their slices in an optimizer and slices the state that it already has for them.
    Parameters without a slice on this rank (None) are removed.

    Groups that become empty stay, so that a scheduler finds every group. The optimizer must be elementwise
    (`secc.runtime.parameters.elementwise_check`).
    """
    for group in optimizer.param_groups:
        replacements = [_slice_or_parameter(p, slices) for p in group["params"]]
        if "param_names" in group:
            group["param_names"] = [
                n for n, p in zip(group["param_names"], replacements, strict=True) if p is not None
            ]
        group["params"] = [p for p in replacements if p is not None]
    for param, replacement in slices.items():
        state = optimizer.state.pop(param, None)
        if state is not None and replacement is not None:
            optimizer.state[replacement[0]] = {
                key: _slice_state(value, replacement[1], replacement[0].dtype) for key, value in state.items()
            }


def _slice_or_parameter(param: nn.Parameter, slices: SlicesByParameter) -> nn.Parameter | None:
    if param not in slices:
        return param
    replacement = slices[param]
    return None if replacement is None else replacement[0]


def _slice_state(value: Any, part: ParameterSlice, dtype: torch.dtype) -> Any:
    """Returns the part of an optimizer state that belongs to a slice: for a tensor of the parameter's shape
    its entries, anything else unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != part.shape:
        return value
    value = value.to(dtype) if value.is_floating_point() else value
    return value if part.is_whole else value.reshape(-1)[part.start : part.stop].clone()
