"""A baseline's layout as a plan that the simulator executes: which ranks, replicas, stages and tensor
parallelism each section has.

The sections are those of the plan that is compared, taken whole from the IR that its directory keeps; times
come from the same cost model. Three things are kinder to a baseline than they would be in truth. Stages are
cut evenly wherever they are wanted, also where the model's layers were not captured one by one. What passes
between stages costs a link's latency, but no bytes. And a parameter of several sections is reduced by one of
them alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import ModuleOp

from secc import pass_pipeline
from secc.alloc.problem.candidates import Load, Workload, on_rank, workload
from secc.alloc.problem.types import Candidate
from secc.alloc.refine.in_flight_limits import size
from secc.bounds.traffic import parameter_bytes
from secc.cluster import Cluster, parse
from secc.codegen import plan_builder as plan_codegen
from secc.cost.model.memory import Memory
from secc.cost.model.patterns_and_transfers import Pattern
from secc.driver import what_if
from secc.ir.dialect.ops import BodyOp, CallOp, ReceiveOp, graph_of
from secc.ir.text_io import module_text
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.plan.schema import Cost, Edge, Mesh, ModelRef, Plan, Section, load

SEVERAL = 2  # calls behind an edge: more than a head beside the layers
ANY = 1 << 30  # micro-batches in flight: more than a step has


@dataclass(frozen=True)
class Base:
    """What all baselines of a plan share: `plan` has every section whole, on rank 0; `ranks` is how many
    devices there are, also where the plan leaves some idle.

    `late` has the edges that only the last stage of their consumer needs, such as a teacher's hidden states
    for a student's loss.
    """

    plan: Plan
    work: Workload
    ranks: int
    late: frozenset[str]

    def tokens(self, pattern: Pattern) -> int:
        """Of the mean sample of a pattern."""
        return tokens(self.plan, self.work.sizes(pattern, 1))


@dataclass(frozen=True)
class Part:
    """A section under a layout: its configuration and its ranks, ordered (dp, pp, tp) with tp fastest.

    `memory` is that of one of its ranks, `turns` how many micro-batches that counts where their number is not
    bounded, and `room` how many more than 1F1B needs a stage may hold between forward and backward, None for
    as many as bytes allow.
    """

    chosen: Candidate
    ranks: tuple[int, ...]
    memory: Memory
    turns: int = 1
    room: int | None = 0

    def in_flight(self, stage: int) -> int:
        """How many micro-batches a stage may hold, 0 where nothing else asks for more than a few."""
        if self.room is None:
            return ANY
        return self.chosen.pp - stage + self.room if self.chosen.pp > 1 else self.room

    def counted(self, stage: int) -> int:
        """How many of them its memory is counted with."""
        bounded = 0 if self.room is None else self.in_flight(stage)
        return min(bounded or self.turns, self.chosen.micro_batches)

    def stage_of(self, rank: int) -> int:
        """The stage that a rank has, -1 for ranks of other sections."""
        return self.ranks.index(rank) // self.chosen.tp % self.chosen.pp if rank in self.ranks else -1

    def needs(self, rank: int) -> int:
        """Bytes on a rank."""
        stage = self.stage_of(rank)
        return self.memory.total(self.counted(stage)) if stage >= 0 else 0


@dataclass(frozen=True)
class Layout:
    """Each section's part, by name. `samples`: how many mean samples' tokens fill a micro-batch. `ahead`: who
    does all forwards first."""

    parts: Mapping[str, Part]
    samples: int
    ahead: frozenset[str] = frozenset()

    def needs(self, rank: int) -> int:
        """Bytes on a rank."""
        return sum(part.needs(rank) for part in self.parts.values())

    def fullest(self) -> int:
        """Bytes on the rank that needs the most. Parts of alike ranks: the first ones of their stages
        tell."""
        return max(
            self.needs(r)
            for part in self.parts.values()
            for r in part.ranks[: part.chosen.tp * part.chosen.pp : part.chosen.tp]
        )

    @property
    def ranks(self) -> int:
        """How many devices have work."""
        return len({r for part in self.parts.values() for r in part.ranks})


def base(directory: Path) -> Base:
    """The base of the plan in `directory`. Raises UserError for a directory without the IR of a plan."""
    plan = load(directory)
    steps, path = what_if.before_allocate(directory)
    module = module_text.parse(path.read_text(), str(path))
    names = [s.sym.data for s in graph_of(module).sections]
    allocate: Any = steps[0]
    asked = dataclasses.replace(
        allocate,
        ranks=1,
        global_batch=plan.global_batch,
        strategy="colocate",
        fit=False,
        set=tuple(f"{n}.micro_batch=1" for n in names),
    )
    pass_pipeline.run(module, [asked, *steps[1:]])
    whole = plan_codegen.build(module, plan.model, {})
    fresh = graph_of(module_text.parse(path.read_text(), str(path)))
    cluster = Cluster.from_dict(plan.cluster) or parse(asked.cluster)
    late = frozenset(e.name for e in whole.edges if not e.grad and not _reaches_layers(module, e))
    ranks = plan.world_size if allocate.objective == "gpus" else allocate.ranks or cluster.ranks
    return Base(
        dataclasses.replace(whole, cluster=plan.cluster),
        workload(fresh, cluster, plan.global_batch),
        ranks,
        late,
    )


def _reaches_layers(module: ModuleOp, edge: Edge) -> bool:
    """Whether several calls of its consumer depend on what an edge brings: then the first stage needs it."""
    for body in module.walk():
        if isinstance(body, BodyOp) and body.section.root_reference.data == edge.dst:
            reached = {
                r
                for op in body.walk()
                if isinstance(op, ReceiveOp) and op.edge.data == edge.name
                for r in op.results
            }
            calls = 0
            for op in body.walk():
                if not reached.isdisjoint(op.operands):
                    reached |= set(op.results)
                    calls += isinstance(op, CallOp)
            if calls >= SEVERAL:
                return True
    return False


def tokens(plan: Plan, sizes: Mapping[str, int]) -> int:
    """The entries of a sample's labels; at least 1."""
    labels = next((i for i in plan.inputs if i.key == plan.labels_key), None)
    return max(1, prod(evaluate(d, sizes) for d in labels.dims)) if labels is not None else 1


def planned(base: Base, layout: Layout) -> Plan:
    """The plan of a layout."""
    stages = {s.name: list(_stages(base, s, layout)) for s in base.plan.sections}
    edges = [
        dataclasses.replace(
            e, src=stages[e.src][-1].name, dst=stages[e.dst][-1 if e.name in base.late else 0].name
        )
        for e in base.plan.edges
    ]
    edges += [
        Edge(
            f"{a.name} to {b.name}",
            a.name,
            b.name,
            "float32",
            ("0",),
            -1,
            "",
            a.mode != "forward" and b.mode != "forward",
        )
        for own in stages.values()
        for a, b in pairwise(own)
    ]
    sections = _once([s for own in stages.values() for s in own])
    world = 1 + max(r for s in sections for r in s.mesh.ranks)
    model = _on_rank(base.plan, sections)
    return dataclasses.replace(
        base.plan, sections=tuple(sections), edges=tuple(edges), world_size=world, model=model, ties=()
    )


def _stages(base: Base, section: Section, layout: Layout) -> Iterator[Section]:
    """A section's stages, alike in time; itself alone without pipeline."""
    part = layout.parts[section.name]
    c = part.chosen
    rank = on_rank(base.work.loads[section.name], c.tp, c.pp, base.work.cluster)
    cost = Cost(
        rank.forward_ns, rank.backward_ns[c.recompute], rank.label, saved=rank.under(c.recompute).saved
    )
    shares = list(_shares(base.plan, section.params, c.pp))
    for i in range(c.pp):
        own = tuple(r for k, r in enumerate(part.ranks) if k // c.tp % c.pp == i)
        named = {"name": f"{section.name}.{i}", "pipeline": section.name, "stage": i} if c.pp > 1 else {}
        yield dataclasses.replace(
            section,
            **named,
            mesh=Mesh(own, c.dp, 1, c.tp),
            params=shares[i],
            cost=cost,
            micro_batch=base.plan.global_batch,  # tokens and bytes bound what is packed
            in_flight=part.in_flight(i),
            room_bytes=_room_bytes(base.work, rank, layout, i),
            sharding=c.sharding,
            recompute=c.recompute,
        )


def _room_bytes(work: Workload, load: Load, layout: Layout, stage: int) -> int:
    """What the micro-batches of a stage may keep, as plans bound it
    (`secc.alloc.refine.in_flight_limits`)."""
    if load.mode == "forward":
        return 0
    part = layout.parts[load.name]
    rank = part.ranks[stage * part.chosen.tp]
    holders = sum(rank in p.ranks and work.loads[name].mode != "forward" for name, p in layout.parts.items())
    return size(work, part.memory, part.counted(stage), layout.needs(rank) - part.needs(rank), holders)


def _shares(plan: Plan, params: tuple[str, ...], parts: int) -> Iterator[tuple[str, ...]]:
    """Parameters cut in their order into parts of about the same bytes."""
    sizes = [parameter_bytes(plan, name) for name in params]
    total, found, passed = sum(sizes), [list[str]() for _ in range(parts)], 0
    for name, own in zip(params, sizes, strict=True):
        found[min(parts - 1, (passed + own // 2) * parts // max(total, 1))].append(name)
        passed += own
    yield from map(tuple, found)


def _once(sections: list[Section]) -> list[Section]:
    """The sections with each parameter left to the first that holds it."""
    seen: set[str] = set()
    found: list[Section] = []
    for s in sections:
        found.append(dataclasses.replace(s, params=tuple(p for p in s.params if p not in seen)))
        seen |= set(s.params)
    return found


def _on_rank(plan: Plan, sections: list[Section]) -> ModelRef:
    """The table of parameters with what a rank has of each under tensor parallelism."""
    table = dict(plan.model.parameters)
    for s in sections:
        for name in s.params if s.mesh.tp > 1 else ():
            if found := re.fullmatch(r"(\w+)\[([\d, ]*)\](.*)", table.get(name, "")):
                entries = prod(int(n) for n in found[2].split(",") if n.strip())
                table[name] = f"{found[1]}[{-(-entries // s.mesh.tp)}]{found[3]}"
    return dataclasses.replace(plan.model, parameters=table)


def layers(base: Base, section: str) -> int:
    """How many layers a section can be cut between; at least 1."""
    return max(1, base.work.places(base.work.loads[section]))
