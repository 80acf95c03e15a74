"""What moves besides samples' own work, in nanoseconds: messages between ranks, reductions of gradients, the
optimizer's step.

The cluster is the one that the plan was made for; a plan without one (written by hand, say) moves everything
at once. Parameters are counted from plan.json's own table, which is what the ranks' reductions are made from,
too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from secc.cluster import Cluster, Link, Overheads
from secc.cost.model.collectives import all_gather_ns, all_reduce_ns, of_ranks, reduce_scatter_ns
from secc.cost.model.roofline import OPTIMIZER_PASSES
from secc.runtime.parameters.gradient_reduction import Holders, holders
from secc.runtime.parameters.mixed_precision import dtype_of
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.plan.schema import Edge, Plan

FREE = Link(0, 10**18)


@dataclass(frozen=True)
class Traffic:
    """Times of messages, reductions and optimizer steps under a plan."""

    plan: Plan

    @cached_property
    def cluster(self) -> Cluster | None:
        return Cluster.from_dict(self.plan.cluster)

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks: inside their node, or between nodes."""
        if self.cluster is None:
            return FREE
        return (
            self.cluster.inside
            if a // self.cluster.per_node == b // self.cluster.per_node
            else self.cluster.between
        )

    def fastest(self, edge: Edge) -> Link | None:
        """The link with the least latency between ranks of an edge's ends, or None where a sample may stay on
        its rank."""
        sources, targets = (self.plan.section(name).mesh.ranks for name in (edge.src, edge.dst))
        if set(sources) & set(targets):
            return None
        if self.cluster is None:
            return FREE
        per_node = self.cluster.per_node
        near = {r // per_node for r in sources} & {r // per_node for r in targets}
        return self.cluster.inside if near else self.cluster.between

    @cached_property
    def held(self) -> list[Holders]:
        """Trained parameters by the sections that hold them, as the ranks reduce them."""
        trained = [name for name, what in self.plan.model.parameters.items() if what.endswith(" train")]
        canonical = {n: tie.names[0] for tie in self.plan.ties for n in tie.names}
        names = {canonical.get(n, n) for n in trained}
        every = {n: canonical.get(n, n) for s in self.plan.sections for n in (*s.params, *names)}
        return holders(self.plan, sorted(names), every)

    def reduce_ns(self, held: Holders) -> int:
        """A sum of the gradients of `held`; where their optimizer is sharded, parts of it, and the parameters
        gathered.

        Under `zero3` every backward has summed its gradients, and no parameter is gathered.
        """
        if self.cluster is None or len(held.ranks) < 2 or held.sharding == "zero3":
            return 0
        summed, span = sum(map(self.summed_on_rank, held.names)), of_ranks(held.ranks, self.cluster)
        if held.sharding == "none":
            return all_reduce_ns(summed, span, self.cluster)
        gathered = sum(map(self.bytes_on_rank, held.names))
        return reduce_scatter_ns(summed, span, self.cluster) + all_gather_ns(gathered, span, self.cluster)

    def closing_ns(self, section: str) -> int:
        """The reductions of the gradients that belong to a section alone, on the rank that they take longest
        on."""
        alone = [h for h in self.held if h.sections == (section,)]
        return max(
            (
                sum(self.reduce_ns(h) for h in alone if r in h.ranks)
                for r in self.plan.section(section).mesh.ranks
            ),
            default=0,
        )

    @cached_property
    def cut(self) -> dict[str, int]:
        """Over how many ranks each parameter that is cut is cut, by the first of its names."""
        canonical = {n: tie.names[0] for tie in self.plan.ties for n in tie.names}
        return {
            canonical.get(shard.name, shard.name): s.mesh.tp for s in self.plan.sections for shard in s.shards
        }

    def bytes_on_rank(self, name: str) -> int:
        """Bytes that a rank has of a parameter, as modules compute with it."""
        return self._entries_on_rank(name) * self.dtype_of(name).itemsize

    def summed_on_rank(self, name: str) -> int:
        """Bytes of a parameter's gradient as ranks sum it: in float32 where the parameter has fewer bits
        (`runtime/parameters/sharded_optimizer.py`)."""
        return self._entries_on_rank(name) * torch.promote_types(self.dtype_of(name), torch.float32).itemsize

    def updated_on_rank(self, name: str) -> int:
        """Bytes of a parameter as the optimizer and its states have it: of its master, where the plan
        computes in fewer bits."""
        return self._entries_on_rank(name) * self._parameter(name)[0].itemsize

    def masters_on_rank(self, name: str) -> int:
        """Bytes of a parameter's master on a rank; 0 where it is updated itself."""
        updated = self.updated_on_rank(name)
        return updated if updated != self.bytes_on_rank(name) else 0

    def dtype_of(self, name: str) -> torch.dtype:
        """What modules compute with a parameter in: under mixed precision fewer bits than the model's own
        float32."""
        own, _ = self._parameter(name)
        return self._narrow if own == torch.float32 and self._narrow is not None else own

    @cached_property
    def _narrow(self) -> torch.dtype | None:
        return dtype_of(self.plan.dtype)

    @cached_property
    def _parameters(self) -> dict[str, tuple[torch.dtype, int]]:
        return {name: _parameter(what) for name, what in self.plan.model.parameters.items()}

    def _entries_on_rank(self, name: str) -> int:
        return self._parameter(name)[1] // self.cut.get(name, 1)

    def _parameter(self, name: str) -> tuple[torch.dtype, int]:
        return self._parameters.get(name, (torch.float32, 0))

    def optimizer_ns(self, rank: int) -> int:
        """The optimizer's step on a rank: what memory takes, and what comes with each tensor."""
        return self.updating_ns(rank) + sum(
            len(h.names) * self.overheads.tensor // _shards(h) for h in self.held if rank in h.ranks
        )

    def updating_ns(self, rank: int) -> int:
        """What memory takes in the optimizer's step on a rank."""
        if self.cluster is None:
            return 0
        moved = sum(self._updating(p) // _shards(h) for h in self.held if rank in h.ranks for p in h.names)
        return 1000 * moved // self.cluster.seen_by([rank]).device.bandwidth

    def _updating(self, name: str) -> int:
        """Bytes that the optimizer's step moves for a parameter; from its master it is written anew."""
        return OPTIMIZER_PASSES * self.updated_on_rank(name) + (
            self.bytes_on_rank(name) if self.masters_on_rank(name) else 0
        )

    def updated(self, rank: int) -> list[str]:
        """The parameters that a rank's optimizer updates."""
        return [p for h in self.held if rank in h.ranks for p in h.names]

    @cached_property
    def overheads(self) -> Overheads:
        """What a rank does beside computing."""
        return Overheads() if self.cluster is None else self.cluster.device.overheads


def _shards(held: Holders) -> int:
    """How many ranks share the optimizer's states."""
    return 1 if held.sharding == "none" else len(held.ranks)


def parameter_bytes(plan: Plan, name: str) -> int:
    """Bytes of a parameter as the model file has it; 0 for a name the plan does not know."""
    dtype, entries = _parameter(plan.model.parameters.get(name, ""))
    return dtype.itemsize * entries


def _parameter(what: str) -> tuple[torch.dtype, int]:
    """(dtype, number of entries) of a parameter, from its entry `float32[64, 64] train` in the plan."""
    found = re.fullmatch(r"(\w+)\[([\d, ]*)\].*", what)
    if found is None:
        return torch.float32, 0
    return getattr(torch, found[1]), prod(int(n) for n in found[2].split(",") if n.strip())


def sample_bytes(edge: Edge, sizes: Mapping[str, int]) -> int:
    """Bytes that a sample of these sizes sends over an edge, alone in its micro-batch: its rows, at its own
    extents."""
    dims = {d: evaluate(text, sizes) for d, text in enumerate(edge.dims)}
    if edge.dim >= 0:
        dims |= {d: evaluate(text, sizes) for d, text, _ in edge.extents} | {
            edge.dim: evaluate(edge.rows, sizes)
        }
    return prod(dims.values()) * getattr(torch, edge.dtype).itemsize


def message_ns(link: Link | None, sizes: Iterable[int]) -> int:
    """Time of one message of these parts; nothing where it stays on its rank."""
    return 0 if link is None else link.message_ns(sum(sizes))
