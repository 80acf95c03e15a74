"""What moves besides samples' own work, in nanoseconds: messages between ranks, reductions of gradients, the optimizer's step.

The cluster is the one that the plan was made for; a plan without one (written by hand, say) moves everything at once. Parameters are
counted from plan.json's own table, which is what the ranks' reductions are made from, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from secc.cluster import Cluster, Link, Overheads
from secc.cost.collectives import all_gather_ns, all_reduce_ns, of_ranks, reduce_scatter_ns
from secc.cost.time import OPTIMIZER_PASSES
from secc.runtime.expr import evaluate
from secc.runtime.gradients import Holders, holders
from secc.runtime.plan import Edge, Plan

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
        return self.cluster.inside if a // self.cluster.per_node == b // self.cluster.per_node else self.cluster.between

    def fastest(self, edge: Edge) -> Link | None:
        """The link with the least latency between ranks of an edge's ends, or None where a sample may stay on its rank."""
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
        """A sum of the gradients of `held`; where their optimizer is sharded, parts of it, and the parameters gathered.

        Under `zero3` every backward has summed its gradients, and no parameter is gathered.
        """
        if self.cluster is None or len(held.ranks) < 2 or held.sharding == "zero3":
            return 0
        size, span = sum(map(self.bytes_on_rank, held.names)), of_ranks(held.ranks, self.cluster)
        if held.sharding == "none":
            return all_reduce_ns(size, span, self.cluster)
        return reduce_scatter_ns(size, span, self.cluster) + all_gather_ns(size, span, self.cluster)

    def closing_ns(self, section: str) -> int:
        """The reductions of the gradients that belong to a section alone, on the rank that they take longest on."""
        alone = [h for h in self.held if h.sections == (section,)]
        return max((sum(self.reduce_ns(h) for h in alone if r in h.ranks) for r in self.plan.section(section).mesh.ranks), default=0)

    @cached_property
    def cut(self) -> dict[str, int]:
        """Over how many ranks each parameter that is cut is cut, by the first of its names."""
        canonical = {n: tie.names[0] for tie in self.plan.ties for n in tie.names}
        return {canonical.get(shard.name, shard.name): s.mesh.tp for s in self.plan.sections for shard in s.shards}

    def bytes_on_rank(self, name: str) -> int:
        """Bytes that a rank has of a parameter."""
        return parameter_bytes(self.plan, name) // self.cut.get(name, 1)

    def optimizer_ns(self, rank: int) -> int:
        """The optimizer's step on a rank: what memory takes, and what comes with each tensor."""
        return self.updating_ns(rank) + sum(len(h.names) * self.overheads.tensor // _shards(h) for h in self.held if rank in h.ranks)

    def updating_ns(self, rank: int) -> int:
        """What memory takes in the optimizer's step on a rank."""
        if self.cluster is None:
            return 0
        size = sum(self.bytes_on_rank(p) // _shards(h) for h in self.held if rank in h.ranks for p in h.names)
        return 1000 * OPTIMIZER_PASSES * size // self.cluster.seen_by([rank]).device.bandwidth

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
    """Bytes of a parameter, from its entry `float32[64, 64] train` in the plan; 0 for a name the plan does not know."""
    found = re.fullmatch(r"(\w+)\[([\d, ]*)\].*", plan.model.parameters.get(name, ""))
    if found is None:
        return 0
    return getattr(torch, found[1]).itemsize * prod(int(n) for n in found[2].split(",") if n.strip())


def sample_bytes(edge: Edge, sizes: Mapping[str, int]) -> int:
    """Bytes that a sample of these sizes sends over an edge, alone in its micro-batch: its rows, at its own extents."""
    dims = {d: evaluate(text, sizes) for d, text in enumerate(edge.dims)}
    if edge.dim >= 0:
        dims |= {d: evaluate(text, sizes) for d, text, _ in edge.extents} | {edge.dim: evaluate(edge.rows, sizes)}
    return prod(dims.values()) * getattr(torch, edge.dtype).itemsize


def message_ns(link: Link | None, sizes: Iterable[int]) -> int:
    """Time of one message of these parts; nothing where it stays on its rank."""
    return 0 if link is None else link.message_ns(sum(sizes))
