"""Times of what a step does besides samples' own work: messages between ranks, gradient reductions, optimizer
steps.

The cluster is the one that the plan was made for; without one (a plan written by hand) all of these take no
time. Parameters are counted from the table in plan.json, from which the ranks' reductions are also made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod

import torch

from secc.cluster import Cluster, Link, Overheads
from secc.cost.model.collectives import (
    RankSpan,
    all_gather_ns,
    all_reduce_ns,
    reduce_scatter_ns,
    span_of_ranks,
)
from secc.cost.model.memory import OPTIMIZER_STATES_PER_PARAMETER
from secc.cost.model.roofline import OPTIMIZER_MEMORY_PASSES, offloaded_step_ns
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES, OFFLOADED_BUCKETS
from secc.runtime.parameters.gradient_reduction import ReductionGroup, build_reduction_groups
from secc.runtime.parameters.mixed_precision import compute_dtype
from secc.runtime.parameters.reduction_times import TimedReduction
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import Edge, Mesh, Plan, Section

FREE_LINK = Link(0, 10**18)
_STATE_TENSORS = OPTIMIZER_STATES_PER_PARAMETER + 1  # with masters, as large as the parameters they update


@dataclass(frozen=True)
class ClosingTimes:
    """Ns of the gradient sums of a section's parameters on a rank, of the gathers of what was updated, and
    of the part of the gathers that no forward hides."""

    sums: int
    gathers: int
    open_gathers: int


@dataclass(frozen=True)
class _GroupOfReplicas:
    """Parameters that all replicas of a section sum, with their bytes on a rank."""

    held: ReductionGroup
    gradient_bytes: int
    parameter_bytes: int
    open_share: Fraction


@dataclass(frozen=True)
class Traffic:
    """Times, in ns, of messages, reductions and optimizer steps under a plan."""

    plan: Plan

    @cached_property
    def cluster(self) -> Cluster | None:
        """Cluster of the plan, None if it has none."""
        return Cluster.from_dict(self.plan.cluster)

    def link_between(self, a: int, b: int) -> Link:
        """Link between two ranks: inside a node, or between nodes."""
        if self.cluster is None:
            return FREE_LINK
        return (
            self.cluster.inside
            if a // self.cluster.per_node == b // self.cluster.per_node
            else self.cluster.between
        )

    def fastest_link(self, edge: Edge) -> Link | None:
        """Link with the least latency between the ends of an edge; None if a sample may stay on its rank."""
        sources, targets = (self.plan.find_section(name).mesh.ranks for name in (edge.src, edge.dst))
        if set(sources) & set(targets):
            return None
        if self.cluster is None:
            return FREE_LINK
        per_node = self.cluster.per_node
        near = {r // per_node for r in sources} & {r // per_node for r in targets}
        return self.cluster.inside if near else self.cluster.between

    @cached_property
    def reduction_groups(self) -> list[ReductionGroup]:
        """Trained parameters by the sections that hold them, as the ranks reduce them."""
        trained = [name for name, what in self.plan.model.parameters.items() if what.endswith(" train")]
        canonical = {n: tie.names[0] for tie in self.plan.ties for n in tie.names}
        names = {canonical.get(n, n) for n in trained}
        canonical_names = {n: canonical.get(n, n) for s in self.plan.sections for n in (*s.params, *names)}
        return build_reduction_groups(self.plan, sorted(names), canonical_names)

    @cached_property
    def timed_reductions(self) -> list[TimedReduction]:
        """The reductions that take time."""
        return [
            TimedReduction(
                held.sections,
                held.ranks,
                self.sum_ns(held),
                self.gather_ns(held),
                self.bucket_share(held),
                self.open_share(held),
            )
            for held in self.reduction_groups
            if len(held.ranks) > 1
        ]

    def sum_ns(self, held: ReductionGroup) -> int:
        """Time to sum the gradients of a group: an all-reduce, or with a sharded optimizer a reduce-scatter.

        0 under ZeRO-3, where every backward reduces its gradients and no parameter is gathered at the end.
        """
        if self.cluster is None:
            return 0
        summed = sum(map(self.gradient_bytes_on_rank, held.names))
        return self._sum_over_ns(held, summed, span_of_ranks(held.ranks, self.cluster))

    def _sum_over_ns(self, held: ReductionGroup, summed: int, span: RankSpan) -> int:
        if self.cluster is None or span.ranks < 2 or held.sharding == "zero3":
            return 0
        collective = all_reduce_ns if held.sharding == "none" else reduce_scatter_ns
        return collective(summed, span, self.cluster)

    def gather_ns(self, held: ReductionGroup) -> int:
        """Time to gather the parameters of a group after the optimizer step; 0 if every rank has them."""
        if self.cluster is None:
            return 0
        gathered = sum(map(self.bytes_on_rank, held.names))
        return self._gather_over_ns(held, gathered, span_of_ranks(held.ranks, self.cluster))

    def _gather_over_ns(self, held: ReductionGroup, gathered: int, span: RankSpan) -> int:
        if self.cluster is None or span.ranks < 2 or held.sharding in {"none", "zero3"}:
            return 0
        return all_gather_ns(gathered, span, self.cluster)

    def bucket_share(self, held: ReductionGroup) -> Fraction:
        """The part of a group's gradients that is summed in one bucket."""
        return min(Fraction(1), Fraction(BUCKET_BYTES, max(1, sum(map(self.bytes_on_rank, held.names)))))

    def open_share(self, held: ReductionGroup) -> Fraction:
        """The part of a group's gathered parameters that no forward hides: those outside of layers, and of
        one layer. All of them on CPUs, which copy the bytes themselves."""
        total = sum(map(self.bytes_on_rank, held.names))
        if self.cluster is None or self.cluster.device.backend == "cpu" or not total:
            return Fraction(1)
        layers: Counter[str] = Counter()
        for name in held.names:
            if (layer := self._layer_of(name, held.sections)) is not None:
                layers[layer] += self.bytes_on_rank(name)
        return Fraction(total - layers.total() + max(layers.values(), default=0), total)

    def _layer_of(self, name: str, sections: Sequence[str]) -> str | None:
        """The layer that a parameter belongs to, None outside of layers: its name up to the first number
        within a block that comes layer by layer, or the block if it is a layer itself, as in stages."""
        for unit in (unit for s in sections for unit in self.plan.find_section(s).units):
            if found := re.match(rf"{re.escape(unit)}\.(.*?\.)?\d+(?=\.)", name):
                return found[0]
            if unit in self._single_layers and name.startswith(f"{unit}."):
                return unit
        return None

    @cached_property
    def _single_layers(self) -> set[str]:
        """The blocks that are a layer each: with submodules, and without numbered ones."""
        units = sorted({unit for s in self.plan.sections for unit in s.units})
        inside = {unit: self._names_inside(unit) for unit in units}
        return {
            unit
            for unit, names in inside.items()
            if any("." in name for name in names) and not any(re.match(r"(.*?\.)?\d+\.", n) for n in names)
        }

    def _names_inside(self, block: str) -> list[str]:
        """The trained parameters of a block, named from the block on."""
        names = {name for held in self.reduction_groups for name in held.names}
        return [name.removeprefix(f"{block}.") for name in names if name.startswith(f"{block}.")]

    def section_closing_ns(
        self, section: str, backward_ns: int | None = None, forward_ns: int | None = None
    ) -> int:
        """Least time between a section's last backward and its updated parameters, on the rank where it takes
        longest: the last bucket is summed, and parameters are gathered that the next forward does not hide.

        Earlier buckets may be summed during that backward, which takes at most `backward_ns`: the rest of all
        sums, one after the other on a rank, comes behind it. A forward that hides gathers takes at most
        `forward_ns`. Parameters that other sections hold, too, do not count."""
        groups = [h for h in self.reduction_groups if h.sections == (section,)]
        times = [
            (set(h.ranks), self.sum_ns(h), self.bucket_share(h), self.gather_ns(h), self.open_share(h))
            for h in groups
        ]
        closing = 0
        for rank in self.plan.find_section(section).mesh.ranks:
            own = [t for t in times if rank in t[0]]
            summing = max((int(share * ns) for _, ns, share, _, _ in own), default=0)
            if backward_ns is not None:
                summing = max(summing, sum(ns for _, ns, _, _, _ in own) - backward_ns)
            gathering = sum(int(share * ns) for _, _, _, ns, share in own)
            if forward_ns is not None:
                gathering = max(gathering, sum(ns for _, _, _, ns, _ in own) - forward_ns)
            closing = max(closing, summing + gathering)
        return closing

    def closing_times(self, section: Section, replicas: int | None = None) -> list[ClosingTimes]:
        """The sums and gathers of the parameters that all replicas of a section hold and no other section,
        on each rank of tp. `replicas`: how many replicas hold them, with ranks as near each other as
        can be; default: those of the plan."""
        found: list[ClosingTimes] = []
        for groups in self._groups_by_tp_rank.get(section.name, ()):
            times = [self._sum_and_gather_ns(g, section.mesh, replicas) for g in groups]
            open_ns = sum(int(g.open_share * ns) for g, (_, ns) in zip(groups, times, strict=True))
            found.append(ClosingTimes(sum(ns for ns, _ in times), sum(ns for _, ns in times), open_ns))
        return list(dict.fromkeys(found))

    @cached_property
    def _groups_by_tp_rank(self) -> dict[str, list[list[_GroupOfReplicas]]]:
        """By section and rank of tp, the groups that all replicas hold, and no other section."""
        found: dict[str, list[list[_GroupOfReplicas]]] = {}
        for s in self.plan.sections:
            groups = [
                _GroupOfReplicas(
                    h,
                    sum(map(self.gradient_bytes_on_rank, h.names)),
                    sum(map(self.bytes_on_rank, h.names)),
                    self.open_share(h),
                )
                for h in self.reduction_groups
                if h.sections == (s.name,) and len(h.ranks) * s.mesh.tp >= len(s.mesh.ranks)
            ]
            ranks = s.mesh.ranks[: s.mesh.tp]
            found[s.name] = [[g for g in groups if rank in g.held.ranks] for rank in ranks]
        return found

    def _sum_and_gather_ns(
        self, group: _GroupOfReplicas, mesh: Mesh, replicas: int | None
    ) -> tuple[int, int]:
        """`sum_ns` and `gather_ns` of a group, or of one with `replicas` replicas."""
        if self.cluster is None:
            return 0, 0
        own = span_of_ranks(group.held.ranks, self.cluster)
        spans = [own]
        if replicas is not None:
            ranks = len(group.held.ranks) // mesh.dp * replicas
            # The ranks of tp are on one node, unless those of the plan are not.
            together = self.cluster.per_node * len(group.held.ranks) // len(mesh.ranks)
            together = min(ranks, max(together, own.ranks_per_node))
            spans = [RankSpan(k, -(-ranks // k)) for k in range(1, together + 1)]
        return (
            min(self._sum_over_ns(group.held, group.gradient_bytes, span) for span in spans),
            min(self._gather_over_ns(group.held, group.parameter_bytes, span) for span in spans),
        )

    @cached_property
    def shard_counts(self) -> dict[str, int]:
        """Number of parts of each sharded parameter, by its first name: for each rank of a replica, and of
        the replicas among which experts are divided. Experts that are modules lie whole on their ranks."""
        canonical = {n: tie.names[0] for tie in self.plan.ties for n in tie.names}
        return {
            canonical.get(shard.name, shard.name): s.mesh.tp * shard.replicas if shard.holder < 0 else 1
            for s in self.plan.sections
            for shard in s.shards
        }

    def bytes_on_rank(self, name: str) -> int:
        """Bytes that a rank holds of a parameter in the dtype that modules compute with."""
        return self._entries_on_rank(name) * self.compute_dtype(name).itemsize

    def gradient_bytes_on_rank(self, name: str) -> int:
        """Bytes of a parameter's gradient as ranks reduce it: at least float32
        (`runtime/parameters/sharded_optimizer.py`)."""
        return (
            self._entries_on_rank(name)
            * torch.promote_types(self.compute_dtype(name), torch.float32).itemsize
        )

    def updated_bytes_on_rank(self, name: str) -> int:
        """Bytes of what the optimizer updates: the master under mixed precision, else the parameter."""
        return self._entries_on_rank(name) * self._dtype_and_entries(name)[0].itemsize

    def master_bytes_on_rank(self, name: str) -> int:
        """Bytes of a parameter's float32 master on a rank; 0 if the parameter is updated itself."""
        updated = self.updated_bytes_on_rank(name)
        return updated if updated != self.bytes_on_rank(name) else 0

    def compute_dtype(self, name: str) -> torch.dtype:
        """Dtype that modules compute with: under mixed precision narrower than the model's float32."""
        own, _ = self._dtype_and_entries(name)
        return self._mixed_dtype if own == torch.float32 and self._mixed_dtype is not None else own

    @cached_property
    def _mixed_dtype(self) -> torch.dtype | None:
        return compute_dtype(self.plan.dtype)

    @cached_property
    def _parsed_parameters(self) -> dict[str, tuple[torch.dtype, int]]:
        return {name: _parse_parameter(what) for name, what in self.plan.model.parameters.items()}

    def _entries_on_rank(self, name: str) -> int:
        return self._dtype_and_entries(name)[1] // self.shard_counts.get(name, 1)

    def _dtype_and_entries(self, name: str) -> tuple[torch.dtype, int]:
        return self._parsed_parameters.get(name, (torch.float32, 0))

    def optimizer_ns(self, rank: int, prefetched: int = 0) -> int:
        """Optimizer step of a rank: memory traffic, plus a fixed overhead for each tensor.

        States in host memory are copied to the device and back meanwhile, without the `prefetched` bytes.
        """
        step_ns = self.optimizer_memory_ns(rank) + sum(
            len(h.names) * self.overheads.tensor // _shard_count(h) for h in self.reduction_groups_of(rank)
        )
        states = self.offloaded_state_bytes(rank) - prefetched
        if self.cluster is None or states <= 0:
            return step_ns
        return offloaded_step_ns(step_ns, states, self.cluster.view_of_ranks([rank]).device)

    def least_optimizer_ns(self, rank: int) -> int:
        """The least that an optimizer step takes: a bucket of states in host memory is fetched before it, and
        another one leaves during the next step."""
        return self.optimizer_ns(rank, self._largest_bucket_bytes)

    def streamed_state_bytes(self, rank: int) -> int:
        """Bytes of offloaded states that are on the device during the optimizer step."""
        buckets = (OFFLOADED_BUCKETS - 1) * _STATE_TENSORS * BUCKET_BYTES + self._largest_bucket_bytes
        return min(self.offloaded_state_bytes(rank), buckets)

    @cached_property
    def _largest_bucket_bytes(self) -> int:
        largest = max((self._offloaded_bytes(p) for p in self.plan.model.parameters), default=0)
        return max(largest, _STATE_TENSORS * BUCKET_BYTES)

    def offloaded_state_bytes(self, rank: int) -> int:
        """Bytes of optimizer states and masters that a rank has in host memory."""
        if not self.offloaded_names:
            return 0
        return sum(
            self._offloaded_bytes(p) // _shard_count(h)
            for h in self.reduction_groups_of(rank)
            for p in h.names
        )

    def _offloaded_bytes(self, name: str) -> int:
        """Bytes of a parameter's states and master if they are in host memory, before they are sharded."""
        if name not in self.offloaded_names:
            return 0
        return self.state_bytes(name)

    def state_bytes(self, name: str) -> int:
        """Bytes of a trained parameter's optimizer states and master on a rank, before they are sharded."""
        updated = self.updated_bytes_on_rank(name)
        return OPTIMIZER_STATES_PER_PARAMETER * updated + self.master_bytes_on_rank(name)

    @cached_property
    def offloaded_names(self) -> frozenset[str]:
        """The parameters, by their first names, with optimizer states in host memory."""
        canonical = {n: tie.names[0] for tie in self.plan.ties for n in tie.names}
        by_offload = {
            is_offloaded: {
                canonical.get(n, n)
                for s in self.plan.sections
                if (s.offload == "optimizer") == is_offloaded
                for n in s.params
            }
            for is_offloaded in (True, False)
        }
        return frozenset(by_offload[True] - by_offload[False])

    def optimizer_memory_ns(self, rank: int) -> int:
        """Time of the optimizer's memory traffic on a rank."""
        if self.cluster is None:
            return 0
        bytes_moved = sum(self._optimizer_bytes_by_group[i] for i in self._group_numbers.get(rank, ()))
        return 1000 * bytes_moved // self.cluster.view_of_ranks([rank]).device.moved_bytes_per_us

    def _optimizer_bytes(self, name: str) -> int:
        """Bytes that the optimizer step moves for a parameter; where it has a master, the parameter is
        rewritten from it."""
        return OPTIMIZER_MEMORY_PASSES * self.updated_bytes_on_rank(name) + (
            self.bytes_on_rank(name) if self.master_bytes_on_rank(name) else 0
        )

    def updated_parameters(self, rank: int) -> list[str]:
        """Parameters that a rank's optimizer updates."""
        return [p for h in self.reduction_groups_of(rank) for p in h.names]

    def reduction_groups_of(self, rank: int) -> list[ReductionGroup]:
        """The groups of parameters that a rank's optimizer updates."""
        return [self.reduction_groups[i] for i in self._group_numbers.get(rank, ())]

    @cached_property
    def _group_numbers(self) -> dict[int, list[int]]:
        """For each rank, the indices of its `reduction_groups`."""
        found: dict[int, list[int]] = {}
        for i, held in enumerate(self.reduction_groups):
            for rank in held.ranks:
                found.setdefault(rank, []).append(i)
        return found

    @cached_property
    def _optimizer_bytes_by_group(self) -> list[int]:
        """Bytes that the optimizer step of a rank moves for each of the `reduction_groups`."""
        return [
            sum(self._optimizer_bytes(p) // _shard_count(h) for p in h.names) for h in self.reduction_groups
        ]

    @cached_property
    def overheads(self) -> Overheads:
        """Overheads of a rank besides computing."""
        return Overheads() if self.cluster is None else self.cluster.device.overheads


def _shard_count(held: ReductionGroup) -> int:
    """Number of ranks that share the optimizer states."""
    return 1 if held.sharding == "none" else len(held.ranks)


def parameter_bytes(plan: Plan, name: str) -> int:
    """Bytes of a parameter in the model file's dtype; 0 for an unknown name."""
    dtype, entries = _parse_parameter(plan.model.parameters.get(name, ""))
    return dtype.itemsize * entries


def _parse_parameter(what: str) -> tuple[torch.dtype, int]:
    """(dtype, number of entries) from a parameter's entry in the plan, such as `float32[64, 64] train`."""
    match = re.fullmatch(r"(\w+)\[([\d, ]*)\].*", what)
    if match is None:
        return torch.float32, 0
    return getattr(torch, match[1]), prod(int(n) for n in match[2].split(",") if n.strip())


def sample_bytes(edge: Edge, sizes: Mapping[str, int]) -> int:
    """Bytes that a sample of these sizes sends over an edge if it is alone in its micro-batch."""
    dims = {d: evaluate_expr(text, sizes) for d, text in enumerate(edge.dims)}
    if edge.dim >= 0:
        dims |= {d: evaluate_expr(text, sizes) for d, text, _ in edge.extents} | {
            edge.dim: evaluate_expr(edge.rows, sizes)
        }
    return prod(dims.values()) * getattr(torch, edge.dtype).itemsize


def message_ns(link: Link | None, sizes: Iterable[int]) -> int:
    """Time of one message made of parts of these sizes; 0 if it stays on its rank."""
    return 0 if link is None else link.message_ns(sum(sizes))
