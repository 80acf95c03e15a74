"""Sums gradients over replicas and tied sections, and clips them by the global norm.

A gradient is summed over every rank that holds its parameter: the replicas of its section, or of all its
sections where it is tied. Ranks contribute unequal shares, or none: who has no gradient adds zeros, and
whether anybody has one travels beside the sums, because a parameter that no sample reached must keep
`grad=None` (to AdamW a zero is not the same).

Gradients travel in flat buckets, in one order on all ranks and a few at a time. A bucket starts as soon as
the last backward of its section has made its gradients, at the latest when that backward ends; without one,
when the program says that the section is done. Where a section's optimizer is sharded, each rank gets the sum
of its shard alone: under `zero2` a bucket's own gradients are freed when it starts, under `zero1` when all
sums are there. Under `zero3` every backward has summed its own already (`secc.runtime.parameters.zero3`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from secc.runtime.parameters.bucket_limits import BUCKET_BYTES, MAX_BUCKETS_IN_FLIGHT
from secc.runtime.parameters.mixed_precision import accumulate_in_float32, make_master
from secc.runtime.parameters.sharded_optimizer import (
    FlatParameters,
    ParameterSlice,
    flatten_gradients,
    start_reduce_scatter,
    whole_parameter_slice,
)
from secc.runtime.parameters.zero3 import ShardedUnit
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
NORM_BLOCK_ENTRIES = 1024  # entries of a gradient whose squares are added up in its own dtype


@dataclass(frozen=True)
class ReductionGroup:
    """Parameters that live in the same sections: names, sections, the ranks that sum their gradients, how
    their optimizer is sharded.

    Parameters of several sections are never sharded, because their sections may be. Under tensor parallelism
    each rank of a replica sums with the like ranks of the others. Of a parameter that is whole on all of
    them, one of these sums counts for the norm: in the others it is `repeated`. Where ranks of one replica
    sum together, only the first one's gradient counts: the others are `silent`.
    """

    names: tuple[str, ...]
    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    sharding: str = "none"
    counted_elsewhere: frozenset[str] = frozenset()
    zeroed_ranks: frozenset[int] = frozenset()


def build_reduction_groups(
    plan: Plan, names: Iterable[str], canonical: Mapping[str, str]
) -> list[ReductionGroup]:
    """The parameters among `names` that get gradients, by the sections that hold them; the same list on every
    rank.

    `canonical` maps each name that plan or model use to one name of the parameter. Parameters that are held
    by sections without backward only are left out.
    """
    sections_of: dict[str, list[str]] = {}
    for section in plan.sections:
        for name in dict.fromkeys(canonical[p] for p in section.params):
            sections_of.setdefault(name, []).append(section.name)
    together: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found = tuple(sections_of.get(name, ()))
        if any(plan.find_section(s).mode != "forward" for s in found):
            together.setdefault(found, []).append(name)
    order = {s.name: i for i, s in enumerate(plan.sections)}
    summed: list[ReductionGroup] = []
    for sections, members in sorted(
        together.items(), key=lambda item: (len(item[0]), [order[s] for s in item[0]])
    ):
        some = [plan.find_section(s) for s in sections]
        summed += (
            _groups_of_section(some[0], members, canonical)
            if len(some) == 1
            else [_tied_group(some, members, canonical)]
        )
    return summed


def _groups_of_section(
    section: Section, names: Sequence[str], canonical: Mapping[str, str]
) -> Iterator[ReductionGroup]:
    """A sum for each place in a replica, and one over all ranks for what each of them has a part of the
    gradient of."""
    mesh = section.mesh
    cut, partial = (
        {canonical[n] for n in some} for some in ((s.name for s in section.shards), section.partial)
    )
    own = tuple(n for n in names if n not in partial)
    for place in range(mesh.tp) if own else ():
        repeated = frozenset(n for n in own if n not in cut) if place else frozenset[str]()
        yield ReductionGroup(
            own, (section.name,), tuple(sorted(mesh.ranks[place :: mesh.tp])), section.sharding, repeated
        )
    if rest := tuple(n for n in names if n in partial):
        sharding = "zero2" if section.sharding == "zero3" else section.sharding  # they are few and stay whole
        yield ReductionGroup(rest, (section.name,), tuple(sorted(mesh.ranks)), sharding)


def _tied_group(
    sections: Sequence[Section], names: Sequence[str], canonical: Mapping[str, str]
) -> ReductionGroup:
    """One sum over the ranks of all sections. Raises ValueError where a rank's gradient holds both what
    counts and what others count."""
    first = {r for s in sections for r in s.mesh.ranks[:: s.mesh.tp]}
    silent = {r for s in sections for r in s.mesh.ranks} - first
    for s in sections:
        others = set(s.mesh.ranks) - set(s.mesh.ranks[:: s.mesh.tp])
        if others & first or not {canonical[n] for n in s.partial}.isdisjoint(names):
            raise ValueError(
                f"section {s.name} with tp={s.mesh.tp} shares {names[0]} with a section whose replicas are of another size"
            )
    return ReductionGroup(
        tuple(names),
        tuple(s.name for s in sections),
        _ranks_of_sections(sections),
        zeroed_ranks=frozenset(silent),
    )


def _ranks_of_sections(sections: Iterable[Section]) -> tuple[int, ...]:
    return tuple(sorted({r for s in sections for r in s.mesh.ranks}))


class _GradientBucket:
    """Gradients of one dtype on their way through a sum over `group`; of a sharded optimizer's parameters
    where `flat` is given."""

    def __init__(
        self, params: list[nn.Parameter], group: Any, flat: FlatParameters | None, free: bool, silent: bool
    ) -> None:
        self.params, self.group, self.flat, self.release_at_start, self.is_zeroed = (
            params,
            group,
            flat,
            free,
            silent,
        )
        self.has_gradient: list[bool] = []
        self.awaited = set[nn.Parameter]()  # whose gradients the last backward has still to make
        self.is_ready = False
        self._sum = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        self.has_gradient = [p.grad is not None for p in self.params]
        own = flatten_gradients(self.params, self.flat.buffer.numel() if self.flat else None)
        if self.is_zeroed:
            own.zero_()
        if self.release_at_start:
            self.release()
        if self.flat is None:
            self._sum = own
            self._work = dist.all_reduce(own, dist.ReduceOp.SUM, group=self.group, async_op=True)
        else:
            self._sum = own.new_empty(self.flat.shard_size)
            self._work = start_reduce_scatter(self._sum, own, self.group)

    def is_done(self) -> bool:
        return self._work is not None and self._work.is_completed()

    def finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        if self.flat is not None:
            self.flat.set_gradients(self._sum)
        else:
            _assign_gradients(self._sum, self.params)
        self._sum, self._work = torch.empty(0), None

    def release(self) -> None:
        for param in self.params:
            param.grad = None


class _Zero3Gradients:
    """Gradients that every backward has summed already (`zero3`)."""

    def __init__(self, flat: ShardedUnit) -> None:
        self.params, self.flat = flat.params, flat
        self.has_gradient: list[bool] = []
        self.is_ready = False

    def start(self) -> None:
        self.has_gradient = self.flat.has_gradient

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        self.flat.finish_gradients()

    def release(self) -> None:
        pass


class _GradientPresence:
    """Which parameters of a reduction's buckets any rank has a gradient for; the last of the reduction to
    travel."""

    def __init__(
        self, buckets: Sequence[_GradientBucket | _Zero3Gradients], group: Any, device: torch.device
    ) -> None:
        self.buckets, self.group, self.device = buckets, group, device
        self.is_ready = False
        self._flags = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        self._flags = torch.tensor(
            [r for b in self.buckets for r in b.has_gradient], dtype=torch.int32, device=self.device
        )
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def is_done(self) -> bool:
        return self._work is not None and self._work.is_completed()

    def finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        flags = iter(self._flags.tolist())
        for bucket in self.buckets:
            for param in bucket.params:
                if not next(flags):
                    param.grad = None
                    if bucket.flat is not None and param in bucket.flat.slices:
                        bucket.flat.slices[param][0].grad = None
            if bucket.flat is not None:
                bucket.release()
        self._work = None


_PendingReduction = _GradientBucket | _Zero3Gradients | _GradientPresence


class GradientReducer:
    """Sums the gradients of this rank's parameters. Made on all ranks in the same order, because making
    groups is collective.

    `pieces` has everything that this rank's optimizer updates, `slices` what takes the places of sharded
    parameters. With `dtype`, float32 parameters compute in it, and the optimizer updates `masters` (or
    slices) in float32.
    """

    def __init__(
        self,
        held: list[ReductionGroup],
        params: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
        cuts: Mapping[str, ParameterCut] | None = None,
        dtype: torch.dtype | None = None,
        gathered: Mapping[str, Sequence[ShardedUnit]] | None = None,
    ) -> None:
        self._device, self._cuts, self._dtype = device, cuts or {}, dtype
        self._zero3_units = [flat for flats in (gathered or {}).values() for flat in flats if flat.is_trained]
        self.masters: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice]] = {}
        self.counted_elsewhere = {n for h in held if rank in h.ranks for n in h.counted_elsewhere}
        groups: dict[tuple[int, ...], Any] = {}
        for h in held:
            if len(h.ranks) > 1 and h.ranks not in groups:
                groups[h.ranks] = dist.new_group(list(h.ranks))
        self._queue: list[_PendingReduction] = []
        self._by_sections: dict[tuple[str, ...], list[_PendingReduction]] = {}
        self._overlapped_buckets: dict[
            tuple[str, ...], list[_GradientBucket]
        ] = {}  # what may start before the section's last backward ends
        self.optimized_slices: dict[nn.Parameter, ParameterSlice] = {}
        self.sharded_slices: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice] | None] = {}
        self._norm_parameters: list[nn.Parameter] = []
        self._params = [params[n] for h in held if rank in h.ranks for n in h.names]
        for h in held:
            if rank in h.ranks:
                if h.sharding == "zero3" and h.ranks in groups:
                    self._add_zero3_group(
                        h, [f for f in (gathered or {})[h.sections[0]] if f.is_trained], groups[h.ranks]
                    )
                else:
                    self._add_group(h, params, rank, groups.get(h.ranks))
        self._next_index, self._in_flight, self._hooks = (
            0,
            deque[_PendingReduction](),
            list[RemovableHandle](),
        )

    def _add_group(
        self, held: ReductionGroup, params: Mapping[str, nn.Parameter], rank: int, group: Any
    ) -> None:
        """Buckets for parameters that the same ranks hold, last ones first, because backward makes their
        gradients first."""
        named = [(n, params[n]) for n in held.names]
        if group is None or held.sharding == "none":
            updated = [(self._optimized_parameter(n, p), n, p) for n, p in named]
            self.optimized_slices |= {
                u: whole_parameter_slice(n, p, self._cuts.get(n)) for u, n, p in updated
            }
            self._norm_parameters += _split_evenly(
                [u for u, n, _ in updated if n not in held.counted_elsewhere], len(held.ranks)
            )[held.ranks.index(rank)]
        if group is None:
            return
        buckets: list[_GradientBucket] = []
        for members in _group_into_buckets(reversed(named)):
            flat = self._make_flat_parameters(members, held, rank) if held.sharding != "none" else None
            buckets.append(
                _GradientBucket(
                    [p for _, p in members], group, flat, held.sharding == "zero2", rank in held.zeroed_ranks
                )
            )
            if flat is not None:
                self._register_slices(flat, [p for _, p in members], held)
        self._overlapped_buckets.setdefault(held.sections, []).extend(
            buckets[:-1]
        )  # the last one has what a backward makes last
        self._enqueue_buckets(held, buckets, group)

    def _add_zero3_group(self, held: ReductionGroup, flats: Sequence[ShardedUnit], group: Any) -> None:
        """Parameters whose gradients every backward sums: only which of them were reached is left for the
        step's end."""
        for flat in flats:
            self._register_slices(flat, flat.params, held)
        self._enqueue_buckets(held, [_Zero3Gradients(flat) for flat in flats], group)

    def _register_slices(
        self, flat: FlatParameters, params: Sequence[nn.Parameter], held: ReductionGroup
    ) -> None:
        self.sharded_slices |= {p: flat.slices.get(p) for p in params}
        self.optimized_slices |= dict(flat.slices.values())
        self._norm_parameters += [
            p for p, piece in flat.slices.values() if piece.name not in held.counted_elsewhere
        ]

    def _enqueue_buckets(
        self, held: ReductionGroup, buckets: Sequence[_GradientBucket | _Zero3Gradients], group: Any
    ) -> None:
        parts = [*buckets, _GradientPresence(buckets, group, self._device)]
        self._by_sections.setdefault(held.sections, []).extend(parts)
        self._queue += parts

    def _optimized_parameter(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates: the parameter, or its master."""
        if self._dtype is None or param.dtype != torch.float32:
            return param
        master = make_master(param, self._dtype)
        self.masters[param] = master, whole_parameter_slice(name, master, self._cuts.get(name))
        return master

    def _make_flat_parameters(
        self, members: Sequence[tuple[str, nn.Parameter]], held: ReductionGroup, rank: int
    ) -> FlatParameters:
        """A bucket's parameters for a sharded optimizer."""
        dtype = self._dtype if members[0][1].dtype == torch.float32 else None
        flat = FlatParameters(members, held.ranks.index(rank), len(held.ranks), self._cuts, dtype)
        for _, param in members if dtype is not None else ():
            accumulate_in_float32(param)
        return flat

    def reset_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for param in (*self._params, *self.optimized_slices):
            param.grad = None
        for flat in self._zero3_units:
            flat.reset_gradients()

    def arm_overlap_hooks(self, section: str) -> None:
        """The next backward is the step's last one of `section` here: its buckets may start as it makes their
        gradients."""
        for bucket in self._overlapped_buckets.get((section,), ()):
            bucket.awaited = set(bucket.params)
            self._hooks += [
                p.register_post_accumulate_grad_hook(lambda p, b=bucket: self._on_gradient_accumulated(p, b))
                for p in bucket.params
            ]

    def _on_gradient_accumulated(self, param: torch.Tensor, bucket: _GradientBucket) -> None:
        bucket.awaited.discard(cast(nn.Parameter, param))
        if not bucket.awaited:
            bucket.is_ready = True
            self._start_ready_buckets()

    def start_section(self, section: str) -> None:
        """The gradients that belong to `section` alone are final on this rank: start to sum them."""
        self._mark_ready((section,))
        self._start_ready_buckets()

    def _mark_ready(self, sections: tuple[str, ...]) -> None:
        for part in self._by_sections.get(sections, ()):
            part.is_ready = True

    def finish_reduction(self) -> None:
        """Sum what is left and wait: afterwards every gradient is the one over the whole global batch, or
        None.

        It is the `.grad` of what the optimizer updates: the parameter, its slice where the optimizer is
        sharded, or its master.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for sections in self._by_sections:
            self._mark_ready(sections)
        while self._next_index < len(self._queue) or self._in_flight:
            self._start_ready_buckets()
            if self._in_flight:
                self._in_flight.popleft().finish()
        for part in self._queue:
            part.is_ready = False
        self._next_index = 0
        for param, (master, _) in self.masters.items():
            master.grad, param.grad = param.grad, None

    def _start_ready_buckets(self) -> None:
        """Start what may start next, in the queue's order: the same on all ranks, so that nobody waits in a
        circle."""
        while self._in_flight and self._in_flight[0].is_done():
            self._in_flight.popleft().finish()
        while (
            self._next_index < len(self._queue)
            and len(self._in_flight) < MAX_BUCKETS_IN_FLIGHT
            and self._queue[self._next_index].is_ready
        ):
            self._in_flight.append(self._queue[self._next_index])
            self._next_index += 1
            self._in_flight[-1].start()

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared global norm (float64, 0-dim): every entry is counted on one
        rank."""
        norms = [norm for p in self._norm_parameters if p.grad is not None for norm in _block_norms(p.grad)]
        return (
            torch.cat(norms).double().square().sum()
            if norms
            else torch.zeros((), dtype=torch.float64, device=self._device)
        )

    def clip_gradients(self, norm: torch.Tensor, limit: float) -> None:
        """Scale the gradients so that their global norm, now `norm`, is at most `limit`."""
        factor = (limit / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        for param in self.optimized_slices:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))

    def gather_parameters(self) -> None:
        """After the optimizer's step: every rank gets the parameters that the others have updated.
        Collective."""
        for param, (master, _) in self.masters.items():
            param.data.copy_(master.data)
        flats = [
            (b.flat, b.group) for b in self._queue if isinstance(b, _GradientBucket) and b.flat is not None
        ]
        for flat in (*(flat for flat, _ in flats), *self._zero3_units):
            flat.copy_masters_to_shard()
        for work in [flat.gather_values(group) for flat, group in flats]:
            work.wait()


def _split_evenly(params: Iterable[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Parameters whose gradients `count` ranks have in common, dealt to them so that each has about as many
    entries."""
    shares, entries = [list[nn.Parameter]() for _ in range(count)], [0] * count
    for param in params:
        least = entries.index(min(entries))
        shares[least].append(param)
        entries[least] += param.numel()
    return shares


def _block_norms(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Norms [n] whose squares add up to that of a gradient.

    Adding up in float64 takes a CPU four times as long as in float32, where the norm of a short block is as
    exact as its entries.
    """
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    if flat.dtype == torch.float32 and flat.device.type == "cpu" and flat.numel() >= NORM_BLOCK_ENTRIES:
        whole = flat.numel() // NORM_BLOCK_ENTRIES * NORM_BLOCK_ENTRIES
        yield torch.linalg.vector_norm(flat[:whole].view(-1, NORM_BLOCK_ENTRIES), dim=1)
        flat = flat[whole:]
    if flat.numel():
        yield torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)


def _assign_gradients(total: torch.Tensor, params: Sequence[nn.Parameter]) -> None:
    """Make the sums in a flat buffer the parameters' gradients, as views of it: each takes the place of the
    rank's own one."""
    for param, part in zip(params, total.split([p.numel() for p in params]), strict=True):
        param.grad = part.view(param.shape).to(param.grad_dtype or param.dtype)


def _group_into_buckets(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype each, in order, up to `BUCKET_BYTES` together."""
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    open_buckets: dict[torch.dtype, tuple[list[tuple[str, nn.Parameter]], int]] = {}
    for name, param in named:
        members, size = open_buckets.get(param.dtype, ([], BUCKET_BYTES))
        if size + param.nbytes > BUCKET_BYTES:
            members, size = [], 0
            buckets.append(members)
        members.append((name, param))
        open_buckets[param.dtype] = (members, size + param.nbytes)
    return buckets
