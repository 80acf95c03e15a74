"""Sums gradients over data-parallel replicas and tied sections, and clips them by their global norm.

A gradient is summed over every rank that holds its parameter: over the replicas of its section, or over all
its sections if it is tied. Replicas receive different numbers of samples, so a rank without a gradient
contributes zeros. The sums alone cannot tell a zero gradient from a missing one, and AdamW treats them
differently, so a flag per parameter ("does any rank have a gradient?") is reduced along with the buckets.

Gradients are sent in flat buckets, in the same order on all ranks, with a limited number in flight (as in
DDP: Li et al., "PyTorch Distributed", 2020). A bucket starts as soon as the last backward of its section in
this step has accumulated all of its gradients, at the latest when that backward ends; a rank that runs no
backward of the section starts it at the program's REDUCE instruction.

If the section's optimizer is sharded (ZeRO: Rajbhandari et al., 2020), each rank receives only the sum of its
own shard: under `zero2` a bucket releases its gradients when it starts, under `zero1` when all sums have
arrived. Under `zero3` each backward reduces its own gradients (`secc.runtime.parameters.zero3`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from secc.runtime.parameters.bucket_limits import BUCKET_BYTES, MAX_BUCKETS_IN_FLIGHT
from secc.runtime.parameters.mixed_precision import accumulate_in_float32, make_master
from secc.runtime.parameters.parameter_gathers import ShardedBucket
from secc.runtime.parameters.sharded_optimizer import (
    FlatParameters,
    MasterGroup,
    ParameterSlice,
    flatten_gradients,
    start_reduce_scatter,
    whole_parameter_slice,
)
from secc.runtime.parameters.zero3 import ShardedUnit
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
NORM_BLOCK_ENTRIES = 1024  # squares of this many entries are summed in float32 before float64 takes over


@dataclass(frozen=True)
class ReductionGroup:
    """Parameters that the same sections hold, and the ranks that sum their gradients.

    Parameters of several sections are never sharded, because the sections may be sharded differently. Under
    tensor parallelism each rank of a replica reduces with the ranks at the same position of the other
    replicas; the norm of a parameter that every rank of a replica holds whole must be counted once, so all
    positions but the first list it in `counted_elsewhere`. If the ranks of one replica take part in the same
    sum, only the gradient of the replica's first rank may contribute: `repeated` has the section and the rank
    of each other one, which drops what its backwards of that section give. A rank may repeat gradients of one
    section and contribute those of another.

    `sharding` is "none", "zero1", "zero2" or "zero3".
    """

    names: tuple[str, ...]
    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    sharding: str = "none"
    counted_elsewhere: frozenset[str] = frozenset()
    repeated: frozenset[tuple[str, int]] = frozenset()


def build_reduction_groups(
    plan: Plan, names: Iterable[str], canonical: Mapping[str, str]
) -> list[ReductionGroup]:
    """Groups the parameters `names` by the sections that hold them; all ranks build the same list.

    `canonical` maps each name that the plan or the model uses to one name per parameter. Parameters that only
    forward-only sections hold get no gradient and are left out.
    """
    sections_of: dict[str, list[str]] = {}
    for section in plan.sections:
        for name in dict.fromkeys(canonical[p] for p in section.params):
            sections_of.setdefault(name, []).append(section.name)
    by_sections: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        holders = tuple(sections_of.get(name, ()))
        if any(plan.find_section(s).mode != "forward" for s in holders):
            by_sections.setdefault(holders, []).append(name)
    order = {s.name: i for i, s in enumerate(plan.sections)}
    groups: list[ReductionGroup] = []
    for sections, members in sorted(
        by_sections.items(), key=lambda item: (len(item[0]), [order[s] for s in item[0]])
    ):
        held_by = [plan.find_section(s) for s in sections]
        groups += (
            _groups_of_section(held_by[0], members, canonical)
            if len(held_by) == 1
            else _tied_groups(held_by, members, canonical)
        )
    return groups


def _groups_of_section(
    section: Section, names: Sequence[str], canonical: Mapping[str, str]
) -> Iterator[ReductionGroup]:
    """Yields one group per tensor-parallel rank, plus one over all ranks of the section for parameters with a
    partial gradient on each rank (norms under sequence parallelism), plus groups of the ranks that hold the
    same experts, where replicas hold different ones."""
    mesh, replicas = section.mesh, section.mesh.expert_replicas
    routed = {canonical[s.name] for s in section.shards if s.replicas > 1}
    holders = {canonical[s.name]: s.holder for s in section.shards if s.holder >= 0}
    cut, partial = (
        {canonical[n] for n in names_of} for names_of in ((s.name for s in section.shards), section.partial)
    )
    complete = tuple(n for n in names if n not in partial and n not in routed)
    for tp_rank in range(mesh.tp):
        held = tuple(n for n in complete if holders.get(n, tp_rank) == tp_rank)
        repeated = frozenset(n for n in complete if n not in cut) if tp_rank else frozenset[str]()
        ranks = tuple(sorted(mesh.ranks[tp_rank :: mesh.tp]))
        if held:
            yield ReductionGroup(held, (section.name,), ranks, section.sharding, repeated)
    experts = tuple(n for n in names if n in routed)
    for replica, tp_rank in itertools.product(range(replicas), range(mesh.tp)):
        of_replica = (
            mesh.ranks[r * mesh.replica_size :][: mesh.replica_size]
            for r in range(replica, mesh.dp, replicas)
        )
        ranks = tuple(sorted(rank for held_by in of_replica for rank in held_by[tp_rank :: mesh.tp]))
        part = tp_rank * replicas + replica  # as `cut_of_shard` numbers parts
        held = tuple(n for n in experts if holders.get(n, part) == part)
        sharding = "zero2" if section.sharding == "zero3" else section.sharding  # ranks have few of them
        if held:
            yield ReductionGroup(held, (section.name,), ranks, sharding)
    if summed_over_replica := tuple(n for n in names if n in partial):
        sharding = "zero2" if section.sharding == "zero3" else section.sharding  # they are few and stay whole
        yield ReductionGroup(summed_over_replica, (section.name,), tuple(sorted(mesh.ranks)), sharding)


def _tied_groups(
    sections: Sequence[Section], names: Sequence[str], canonical: Mapping[str, str]
) -> Iterator[ReductionGroup]:
    """Yields groups over the ranks of all `sections`, one for each choice of sections in which the ranks of a
    replica have partial gradients, which all contribute."""
    partial = {s.name: {canonical[n] for n in s.partial} for s in sections}
    alike: dict[frozenset[str], list[str]] = {}
    for name in names:
        alike.setdefault(frozenset(s for s, found in partial.items() if name in found), []).append(name)
    for partly, members in alike.items():
        repeated = frozenset(
            (s.name, rank)
            for s in sections
            if s.name not in partly
            for rank in set(s.mesh.ranks) - set(s.mesh.ranks[:: s.mesh.tp])
        )
        yield ReductionGroup(
            tuple(members),
            tuple(s.name for s in sections),
            _ranks_of_sections(sections),
            repeated=repeated,
        )


def _ranks_of_sections(sections: Iterable[Section]) -> tuple[int, ...]:
    return tuple(sorted({r for s in sections for r in s.mesh.ranks}))


class _GradientBucket:
    """Gradients of one dtype, summed over the process group `group` in one flat message.

    `flat`: the parameters' shards if their optimizer is sharded; then the sum is a reduce-scatter. `free`:
    release the gradients when the message starts (zero2).
    """

    def __init__(
        self, params: list[nn.Parameter], group: Any, flat: FlatParameters | None, free: bool
    ) -> None:
        self.params, self.group, self.flat = params, group, flat
        self.release_at_start = free
        self.has_gradient: list[bool] = []
        self.awaited = set[nn.Parameter]()  # gradients that the section's last backward has yet to accumulate
        self.is_ready, self.section = False, ""
        self._sum = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Starts the sum without waiting for it."""
        self.has_gradient = [p.grad is not None for p in self.params]
        local_gradients = flatten_gradients(self.params, self.flat.buffer.numel() if self.flat else None)
        if self.release_at_start:
            self.release()
        if self.flat is None:
            self._sum = local_gradients
            self._work = dist.all_reduce(local_gradients, dist.ReduceOp.SUM, group=self.group, async_op=True)
        else:
            self._sum = local_gradients.new_empty(self.flat.shard_size)
            self._work = start_reduce_scatter(self._sum, local_gradients, self.group)

    def is_done(self) -> bool:
        """Whether the sum has arrived."""
        return self._work is not None and self._work.is_completed()

    def finish(self) -> None:
        """Waits for the sum and makes it the gradient of the parameters, or of their slices."""
        assert self._work is not None
        self._work.wait()
        if self.flat is not None:
            self.flat.set_gradients(self._sum)
        else:
            _assign_gradients(self._sum, self.params)
        self._sum, self._work = torch.empty(0), None

    def release(self) -> None:
        """Drops the gradients of this rank."""
        for param in self.params:
            param.grad = None


class _Zero3Gradients:
    """A `zero3` unit in the queue of buckets: its gradients have been summed by every backward already."""

    def __init__(self, flat: ShardedUnit) -> None:
        self.params, self.flat = flat.params, flat
        self.has_gradient: list[bool] = []
        self.is_ready, self.section = False, ""

    def start(self) -> None:
        self.has_gradient = self.flat.has_gradient

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        self.flat.finish_gradients()

    def release(self) -> None:
        pass


class _GradientPresence:
    """Finds out which parameters of a group have a gradient on any rank; reduced after the group's buckets.

    Where no rank has one, the parameter keeps `grad=None`, as in a run on one process.
    """

    def __init__(
        self, buckets: Sequence[_GradientBucket | _Zero3Gradients], group: Any, device: torch.device
    ) -> None:
        self.buckets, self.group, self.device = buckets, group, device
        self.is_ready, self.section = False, ""
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
        present = iter(self._flags.tolist())
        for bucket in self.buckets:
            for param in bucket.params:
                if not next(present):
                    param.grad = None
                    if bucket.flat is not None and param in bucket.flat.slices:
                        bucket.flat.slices[param][0].grad = None
            if bucket.flat is not None:
                bucket.release()
        self._work = None


_PendingReduction = _GradientBucket | _Zero3Gradients | _GradientPresence


class GradientReducer:
    """Sums the gradients of this rank's parameters, overlapped with the last backwards of a step.

    Construct it at the same point on all ranks, because creating process groups is collective.

    `optimized_slices` maps each tensor that this rank's optimizer updates to the part of a user's parameter
    that it holds. `sharded_slices` maps each parameter with a sharded optimizer to its slice on this rank, or
    None. With `dtype`, modules compute in `dtype` while the optimizer updates float32 `masters` (or float32
    slices); `master_groups` are all of these as they lie in memory.
    """

    def __init__(
        self,
        reduction_groups: list[ReductionGroup],
        params: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
        cuts: Mapping[str, ParameterCut] | None = None,
        dtype: torch.dtype | None = None,
        zero3_units: Mapping[str, Sequence[ShardedUnit]] | None = None,
    ) -> None:
        self._device, self._cuts, self._dtype = device, cuts or {}, dtype
        self._zero3_units = [
            unit for units in (zero3_units or {}).values() for unit in units if unit.is_trained
        ]
        self.masters: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice]] = {}
        self.master_groups: list[MasterGroup] = []
        self.counted_elsewhere = {
            n
            for reduction in reduction_groups
            if rank in reduction.ranks
            for n in reduction.counted_elsewhere
        }
        self._repeated: dict[str, list[nn.Parameter]] = {}  # by section, see `ReductionGroup`
        for reduction in reduction_groups:
            for section in sorted(s for s, r in reduction.repeated if r == rank):
                self._repeated.setdefault(section, []).extend(params[n] for n in reduction.names)
        process_groups: dict[tuple[int, ...], Any] = {}
        for reduction in reduction_groups:
            if len(reduction.ranks) > 1 and reduction.ranks not in process_groups:
                process_groups[reduction.ranks] = dist.new_group(list(reduction.ranks))
        self._by_sections: dict[tuple[str, ...], list[_PendingReduction]] = {}
        # Buckets that may start before the section's last backward ends.
        self._overlapped_buckets: dict[tuple[str, ...], list[_GradientBucket]] = {}
        self.optimized_slices: dict[nn.Parameter, ParameterSlice] = {}
        self.sharded_slices: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice] | None] = {}
        self._norm_parameters: list[nn.Parameter] = []
        self._params = [
            params[n] for reduction in reduction_groups if rank in reduction.ranks for n in reduction.names
        ]
        for reduction in reduction_groups:
            if rank in reduction.ranks:
                if reduction.sharding == "zero3" and reduction.ranks in process_groups:
                    units = [u for u in (zero3_units or {})[reduction.sections[0]] if u.is_trained]
                    self._add_zero3_group(reduction, units, process_groups[reduction.ranks])
                else:
                    self._add_group(reduction, params, rank, process_groups.get(reduction.ranks))
        places = {param: place for place, param in enumerate(params.values())}
        self._by_sections = {s: _order_by_readiness(some, places) for s, some in self._by_sections.items()}
        self._queue: list[_PendingReduction] = list(itertools.chain.from_iterable(self._by_sections.values()))
        # Makes the context in which this rank waits for gradients or parameters of a section.
        self.timed: Callable[[str], AbstractContextManager[None]] = lambda section: nullcontext()
        self._next_index = 0  # in the queue: everything before it has been started
        self._in_flight = deque[_PendingReduction]()
        self._hooks = list[RemovableHandle]()

    def _add_group(
        self, reduction: ReductionGroup, params: Mapping[str, nn.Parameter], rank: int, group: Any
    ) -> None:
        """Makes the buckets of one group. The last parameters come first, because a backward accumulates
        their gradients first."""
        named = [(n, params[n]) for n in reduction.names]
        if group is None or reduction.sharding == "none":
            optimized = [(self._optimized_parameter(n, p), n, p) for n, p in named]
            self.optimized_slices |= {
                u: whole_parameter_slice(n, p, self._cuts.get(n)) for u, n, p in optimized
            }
            # All ranks of the group will hold the same summed gradients: each adds up the norm of a share.
            counted = [u for u, n, _ in optimized if n not in reduction.counted_elsewhere]
            self._norm_parameters += _split_evenly(counted, len(reduction.ranks))[reduction.ranks.index(rank)]
        if group is None:
            return
        buckets: list[_GradientBucket] = []
        for members in _group_into_buckets(reversed(named)):
            flat = (
                self._make_flat_parameters(members, reduction, rank) if reduction.sharding != "none" else None
            )
            bucket_params = [p for _, p in members]
            buckets.append(_GradientBucket(bucket_params, group, flat, reduction.sharding == "zero2"))
            if flat is not None:
                self._register_slices(flat, bucket_params, reduction)
        # Hooks on the last bucket gain nothing: a backward accumulates its gradients just before it ends.
        self._overlapped_buckets.setdefault(reduction.sections, []).extend(buckets[:-1])
        self._enqueue_buckets(reduction, buckets, group)

    def _add_zero3_group(self, reduction: ReductionGroup, units: Sequence[ShardedUnit], group: Any) -> None:
        """Adds a group of zero3 parameters: every backward reduces their gradients, so at the end of the step
        only their presence is left to exchange."""
        for unit in units:
            self._register_slices(unit, unit.params, reduction)
        self._enqueue_buckets(reduction, [_Zero3Gradients(unit) for unit in units], group)

    def _register_slices(
        self, flat: FlatParameters, params: Sequence[nn.Parameter], reduction: ReductionGroup
    ) -> None:
        """Records which slices of `params` this rank updates, and which of them count for the norm here."""
        self.sharded_slices |= {param: flat.slices.get(param) for param in params}
        self.optimized_slices |= dict(flat.slices.values())
        if flat.masters is not flat.shard:
            leaves = tuple(leaf for leaf, _ in flat.slices.values())
            self.master_groups.append(MasterGroup(flat.masters, leaves, flat.copy_masters_to_shard))
        self._norm_parameters += [
            leaf for leaf, part in flat.slices.values() if part.name not in reduction.counted_elsewhere
        ]

    def _enqueue_buckets(
        self, reduction: ReductionGroup, buckets: Sequence[_GradientBucket | _Zero3Gradients], group: Any
    ) -> None:
        queued = [*buckets, _GradientPresence(buckets, group, self._device)]
        for pending in queued:
            pending.section = reduction.sections[0]
        self._by_sections.setdefault(reduction.sections, []).extend(queued)

    def _optimized_parameter(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Returns what the optimizer updates: the parameter itself, or its new float32 master."""
        if self._dtype is None or param.dtype != torch.float32:
            return param
        master = make_master(param, self._dtype)
        self.masters[param] = master, whole_parameter_slice(name, master, self._cuts.get(name))
        if master.untyped_storage().nbytes() != master.nbytes:
            master.data = master.data.clone()  # it was a part of a larger tensor
        self.master_groups.append(MasterGroup(master.data, (master,), partial(param.data.copy_, master.data)))
        return master

    def _make_flat_parameters(
        self, members: Sequence[tuple[str, nn.Parameter]], reduction: ReductionGroup, rank: int
    ) -> FlatParameters:
        """Puts the parameters of one bucket into a flat buffer, sharded over the ranks of the group."""
        dtype = self._dtype if members[0][1].dtype == torch.float32 else None
        flat = FlatParameters(members, reduction.ranks.index(rank), len(reduction.ranks), self._cuts, dtype)
        for _, param in members if dtype is not None else ():
            accumulate_in_float32(param)
        return flat

    def reset_gradients(self) -> None:
        """Drops all gradients of the last step."""
        for param in (*self._params, *self.optimized_slices):
            param.grad = None
        for unit in self._zero3_units:
            unit.reset_gradients()

    @contextmanager
    def dropping_repeated(self, section: str) -> Iterator[None]:
        """Context of a backward of `section`: gradients that another rank of the replica contributes are
        dropped."""
        before = [(param, param.grad) for param in self._repeated.get(section, ())]
        for param, _ in before:
            param.grad = None
        yield
        for param, gradient in before:
            param.grad = gradient

    def arm_overlap_hooks(self, section: str) -> None:
        """Call before the last backward of `section` on this rank in this step: its buckets then start while
        the backward still accumulates other gradients."""
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
        """Starts to sum the gradients of `section`: they are final on this rank."""
        self._mark_ready((section,))
        self._start_ready_buckets()

    def _mark_ready(self, sections: tuple[str, ...]) -> None:
        for reduction in self._by_sections.get(sections, ()):
            reduction.is_ready = True

    def finish_reduction(self) -> None:
        """Sums the remaining gradients and waits for all sums. Afterwards every gradient is that of the whole
        global batch, or None.

        The result is the `.grad` of what the optimizer updates: the parameter, its slice if the optimizer is
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
                pending = self._in_flight.popleft()
                with self.timed(pending.section):
                    pending.finish()
        for reduction in self._queue:
            reduction.is_ready = False
        self._next_index = 0
        for param, (master, _) in self.masters.items():
            master.grad, param.grad = param.grad, None

    def _start_ready_buckets(self) -> None:
        """Starts buckets that are ready, up to the limit in flight.

        Collectives of overlapping groups deadlock if two ranks start them in different orders. So a bucket
        starts only after all buckets before it in the queue, although a later one may be ready first; the
        queue has the same order on all ranks.
        """
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
        """Returns this rank's share of the squared global gradient norm (float64, 0-dim). Each entry of each
        gradient is counted on exactly one rank."""
        gradients = [p.grad for p in self._norm_parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        if self._device.type == "cuda":
            norms = _device_norms(gradients)
        else:
            norms = torch.cat([norm for gradient in gradients for norm in _block_norms(gradient)])
        return norms.double().square().sum()

    def clip_gradients(self, norm: float, limit: float) -> None:
        """Scales all gradients so that their global norm, now `norm`, is at most `limit`."""
        factor = min(limit / (norm + _CLIP_EPSILON), 1.0)
        for param in self.optimized_slices:
            if param.grad is not None:
                param.grad.mul_(factor)

    def write_weights(self) -> None:
        """Rounds the masters that this rank has updated into the weights that modules compute with. Masters
        on the host have been written already."""
        for group in self.master_groups:
            if not group.is_on_host:
                group.write_weights()

    @property
    def sharded_buckets(self) -> list[ShardedBucket]:
        """The buckets of sharded parameters, in the order in which a backward completes them."""
        return [
            ShardedBucket(bucket.section, bucket.params, bucket.flat, bucket.group)
            for bucket in self._queue
            if isinstance(bucket, _GradientBucket) and bucket.flat is not None
        ]


def _order_by_readiness(
    queued: Iterable[_PendingReduction], places: Mapping[nn.Parameter, int]
) -> list[_PendingReduction]:
    """Returns the buckets of a section in the order in which a backward completes them, then the exchanges of
    their presence.

    A backward accumulates the last of the model's parameters first. All groups of a section take turns:
    experts would otherwise wait for the first of all other parameters. `places` are positions in the model,
    which are the same on all ranks.
    """
    presences, buckets = list[_PendingReduction](), list[tuple[int, _PendingReduction]]()
    for reduction in queued:
        if isinstance(reduction, _GradientPresence):
            presences.append(reduction)
        else:
            buckets.append((min(map(places.__getitem__, reduction.params)), reduction))
    return [*(b for _, b in sorted(buckets, key=lambda pair: -pair[0])), *presences]


def _split_evenly(params: Iterable[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Distributes `params` over `count` ranks so that each gets about as many entries (greedily, the next
    parameter to the rank with the fewest)."""
    shares, entries = [list[nn.Parameter]() for _ in range(count)], [0] * count
    for param in params:
        least = entries.index(min(entries))
        shares[least].append(param)
        entries[least] += param.numel()
    return shares


def _device_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of each gradient in one launch for all of the same dtype. Its sums of blocks are in
    float32, or in float64 for float64 gradients: a norm in a wider dtype would copy the whole gradient."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        by_dtype.setdefault(real.dtype, []).append(real)
    norms = list[torch.Tensor]()
    for dtype, some in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms += torch._foreach_norm(some, 2, wide)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([norm.double() for norm in norms])


def _block_norms(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields norms [n]; the sum of their squares is the squared norm of `gradient`.

    On a CPU, float64 sums take four times as long as float32 sums, and the norm of a short float32 block is
    as exact as its entries. So long gradients are summed by blocks.
    """
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    if flat.dtype == torch.float32 and flat.device.type == "cpu" and flat.numel() >= NORM_BLOCK_ENTRIES:
        in_blocks = flat.numel() // NORM_BLOCK_ENTRIES * NORM_BLOCK_ENTRIES
        yield torch.linalg.vector_norm(flat[:in_blocks].view(-1, NORM_BLOCK_ENTRIES), dim=1)
        flat = flat[in_blocks:]
    if flat.numel():
        yield torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)


def _assign_gradients(total: torch.Tensor, params: Sequence[nn.Parameter]) -> None:
    """Makes views of the flat buffer `total` the gradients of `params`; they replace the gradients of this
    rank alone."""
    for param, part in zip(params, total.split([p.numel() for p in params]), strict=True):
        param.grad = part.view(param.shape).to(param.grad_dtype or param.dtype)


def _group_into_buckets(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Splits parameters into buckets of one dtype and at most `BUCKET_BYTES`, in order."""
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
