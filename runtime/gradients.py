"""Sums gradients over replicas and tied sections, and clips them by the global norm.

A gradient is summed over every rank that holds its parameter: the replicas of its section, or of all its sections where it is tied.
Ranks contribute unequal shares, or none: who has no gradient adds zeros, and whether anybody has one travels beside the sums, because
a parameter that no sample reached must keep `grad=None` (to AdamW a zero is not the same).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.plan import Plan

BUCKET_BYTES = 64 * 2**20
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Holders:
    """Parameters that live in the same sections: their names, the sections, and the ranks of all of them."""

    names: tuple[str, ...]
    sections: tuple[str, ...]
    ranks: tuple[int, ...]


def holders(plan: Plan, names: Iterable[str], canonical: Mapping[str, str]) -> list[Holders]:
    """The parameters among `names` that get gradients, by the sections that hold them; the same list on every rank.

    `canonical` maps each name that plan or model use to one name of the parameter. Parameters that are held by sections without
    backward only are left out.
    """
    sections_of: dict[str, list[str]] = {}
    for section in plan.sections:
        for name in dict.fromkeys(canonical[p] for p in section.params):
            sections_of.setdefault(name, []).append(section.name)
    together: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found = tuple(sections_of.get(name, ()))
        if any(plan.section(s).mode != "forward" for s in found):
            together.setdefault(found, []).append(name)
    return [
        Holders(tuple(members), sections, tuple(sorted({r for s in sections for r in plan.section(s).mesh.ranks})))
        for sections, members in sorted(together.items())
    ]


@dataclass
class _Bucket:
    """Gradients of one dtype as one flat buffer, on its way through an all-reduce."""

    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    work: dist.Work | None = None


@dataclass
class _Reduction:
    """The gradients of one `Holders` with several ranks."""

    params: list[torch.nn.Parameter]
    group: Any  # of torch.distributed
    flags: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    work: dist.Work | None = None
    buckets: list[_Bucket] = field(default_factory=list)


class Reducer:
    """Sums the gradients of this rank's parameters. Made on all ranks in the same order, because making groups is collective."""

    def __init__(self, held: list[Holders], params: Mapping[str, torch.nn.Parameter], rank: int, device: torch.device) -> None:
        self._device = device
        groups: dict[tuple[int, ...], Any] = {}
        for h in held:
            if len(h.ranks) > 1 and h.ranks not in groups:
                groups[h.ranks] = dist.new_group(list(h.ranks))
        mine = [h for h in held if rank in h.ranks]
        self._reductions = {h.sections: _Reduction([params[n] for n in h.names], groups[h.ranks]) for h in mine if len(h.ranks) > 1}
        self._counted = [params[n] for h in mine if h.ranks[0] == rank for n in h.names]
        self._params = [params[n] for h in mine for n in h.names]

    def start(self, section: str) -> None:
        """Start to sum the gradients that belong to `section` alone; they are final on this rank."""
        if (section,) in self._reductions:
            _start(self._reductions[section,], self._device)

    def finish(self) -> None:
        """Sum what is left (tied parameters) and wait: afterwards every `.grad` is the gradient over the whole global batch, or None."""
        for reduction in self._reductions.values():
            if reduction.work is None:
                _start(reduction, self._device)
        for reduction in self._reductions.values():
            _finish(reduction)

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared global norm (float64, 0-dim): every parameter is counted on one rank."""
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in self._counted if p.grad is not None]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=self._device)

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale the gradients so that their global norm, now `norm`, is at most `limit`."""
        factor = (limit / (norm + _EPSILON)).clamp(max=1.0)
        for param in self._params:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))


def _start(reduction: _Reduction, device: torch.device) -> None:
    reduction.flags = torch.tensor([p.grad is not None for p in reduction.params], dtype=torch.int32, device=device)
    reduction.work = dist.all_reduce(reduction.flags, dist.ReduceOp.MAX, group=reduction.group, async_op=True)
    reduction.buckets = [_Bucket(params, _flatten(params)) for params in _by_bucket(reduction.params)]
    for bucket in reduction.buckets:
        bucket.work = dist.all_reduce(bucket.flat, dist.ReduceOp.SUM, group=reduction.group, async_op=True)


def _finish(reduction: _Reduction) -> None:
    assert reduction.work is not None
    reduction.work.wait()
    reached = dict(zip(reduction.params, reduction.flags.tolist(), strict=True))
    for bucket in reduction.buckets:
        assert bucket.work is not None
        bucket.work.wait()
        start = 0
        for param in bucket.params:
            total = bucket.flat[start : start + param.numel()].view(param.shape)
            start += param.numel()
            if not reached[param]:
                param.grad = None
            elif param.grad is None:
                param.grad = total.to(param.dtype, copy=True)
            else:
                param.grad.copy_(total)
    reduction.work, reduction.buckets = None, []


def _by_bucket(params: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters of one dtype each, in order, up to `BUCKET_BYTES` together."""
    buckets: list[list[torch.nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.nn.Parameter], int]] = {}
    for param in params:
        members, size = open_buckets.get(param.dtype, ([], BUCKET_BYTES))
        if size + param.nbytes > BUCKET_BYTES:
            members, size = [], 0
            buckets.append(members)
        members.append(param)
        open_buckets[param.dtype] = (members, size + param.nbytes)
    return buckets


def _flatten(params: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The gradients in one buffer, zeros where there is none; in float32 where a parameter has fewer bits, so that sums stay exact."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.cat([part.detach().reshape(-1).to(wide) for part in parts])
