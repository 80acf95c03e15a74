"""Turns a baseline's layout (ranks, replicas, stages and tensor parallelism of each section) into a plan for
the simulator.

The sections are those of the compared plan, whole, from the IR in its directory; times come from the same
cost model. Three simplifications favour baselines. Stages are cut wherever they are wanted, even if the
model's layers were not captured one by one; heads and losses are in the last one, which has fewer layers
where that is faster. Activations between stages cost a link's latency, but no
bytes. A parameter of several sections is reduced by one of them alone.
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
from secc.alloc.problem.section_load import SectionLoad, compute_rank_load
from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.refine.in_flight_limits import in_flight_bytes
from secc.bounds.traffic import parameter_bytes
from secc.cluster import Cluster, parse_cluster
from secc.codegen import plan_builder as plan_codegen
from secc.cost.model.memory import RankMemory
from secc.cost.model.patterns_and_transfers import InputPattern
from secc.driver import what_if
from secc.ir.analysis.tp_layouts import assume_expert_shards
from secc.ir.dialect.ops import BodyOp, CallOp, ReceiveOp, graph_of
from secc.ir.text_io import module_text
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Cost, Edge, Mesh, ModelRef, Plan, Section

MIN_LAYER_CALLS = 2  # an edge with this many dependent calls reaches layers, and not only a head
UNBOUNDED_IN_FLIGHT = 1 << 30  # micro-batches in flight: more than a step has


@dataclass(frozen=True)
class BaselineContext:
    """What all baselines of a plan share.

    plan: the plan with every section whole, on rank 0.
    ranks: number of devices, including any that the plan leaves idle.
    last_stage_edges: edges that only the last stage of their consumer needs, such as a teacher's hidden
        states for a student's loss.
    """

    plan: Plan
    work: Workload
    ranks: int
    last_stage_edges: frozenset[str]

    def mean_tokens(self, pattern: InputPattern) -> int:
        """Tokens of the mean sample of a pattern."""
        return count_tokens(self.plan, self.work.mean_micro_batch_sizes(pattern, 1))


@dataclass(frozen=True)
class SectionLayout:
    """A section under a layout: its candidate, its ranks in order (dp, pp, cp, tp) with tp fastest, and its
    memory on one rank.

      alternating_in_flight: micro-batches that memory counts where their number is not bounded.
      extra_in_flight: how many micro-batches more than 1F1B needs a stage may hold, None for as many as bytes
          allow.
    """

    chosen: Candidate
    ranks: tuple[int, ...]
    memory: RankMemory
    alternating_in_flight: int = 1
    extra_in_flight: int | None = 0

    def in_flight(self, stage: int) -> int:
        """In-flight limit of a stage; 0 if only few are needed."""
        if self.extra_in_flight is None:
            return UNBOUNDED_IN_FLIGHT
        return self.chosen.pp - stage + self.extra_in_flight if self.chosen.pp > 1 else self.extra_in_flight

    def counted_in_flight(self, stage: int) -> int:
        """Number of micro-batches in flight that the memory estimate counts."""
        bounded = 0 if self.extra_in_flight is None else self.in_flight(stage)
        return min(bounded or self.alternating_in_flight, self.chosen.micro_batches)

    def stage_of(self, rank: int) -> int:
        """Stage of a rank, -1 for ranks of other sections."""
        return (
            self.ranks.index(rank) // self.chosen.stage_ranks % self.chosen.pp if rank in self.ranks else -1
        )

    def bytes_on_rank(self, rank: int) -> int:
        """Bytes of this section on a rank."""
        stage = self.stage_of(rank)
        return self.memory.total_bytes(self.counted_in_flight(stage)) if stage >= 0 else 0


@dataclass(frozen=True)
class BaselineLayout:
    """Layouts by section name. A micro-batch is filled up to the tokens of `samples_per_micro_batch` mean
    samples; sections in `forwards_first` do all forwards first."""

    sections: Mapping[str, SectionLayout]
    samples_per_micro_batch: int
    forwards_first: frozenset[str] = frozenset()

    def bytes_on_rank(self, rank: int) -> int:
        """Bytes of all sections on a rank."""
        return sum(part.bytes_on_rank(rank) for part in self.sections.values())

    def peak_bytes(self) -> int:
        """Bytes on the fullest rank. Replicas do the same work, so only the first rank of each stage is
        considered."""
        return max(
            self.bytes_on_rank(r)
            for part in self.sections.values()
            for r in part.ranks[: part.chosen.stage_ranks * part.chosen.pp : part.chosen.stage_ranks]
        )

    @property
    def used_ranks(self) -> int:
        """Number of devices with work."""
        return len({r for part in self.sections.values() for r in part.ranks})


def load_context(directory: Path) -> BaselineContext:
    """Loads the context of the plan in `directory`. Raises UserError for a directory without the IR of a
    plan."""
    plan = load_plan(directory)
    steps, path = what_if.load_before_allocate(directory)
    module = module_text.read_module(path)
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
    pass_pipeline.run_passes(module, [asked, *steps[1:]])
    whole = plan_codegen.build_plan(module, plan.model, {})
    fresh = graph_of(module_text.read_module(path))
    cluster = Cluster.from_dict(plan.cluster) or parse_cluster(asked.cluster)
    late = frozenset(e.name for e in whole.edges if not e.grad and not _reaches_layers(module, e))
    ranks = plan.world_size if allocate.objective == "gpus" else allocate.ranks or cluster.ranks
    return BaselineContext(
        dataclasses.replace(whole, cluster=plan.cluster),
        build_workload(fresh, cluster, plan.global_batch),
        ranks,
        late,
    )


def _reaches_layers(module: ModuleOp, edge: Edge) -> bool:
    """Whether several calls of the consumer depend on an edge: then its first stage needs it."""
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
            if calls >= MIN_LAYER_CALLS:
                return True
    return False


def count_tokens(plan: Plan, sizes: Mapping[str, int]) -> int:
    """Number of entries of a sample's labels; at least 1."""
    labels = next((i for i in plan.inputs if i.key == plan.labels_key), None)
    return max(1, prod(evaluate_expr(d, sizes) for d in labels.dims)) if labels is not None else 1


def plan_from_layout(base: BaselineContext, layout: BaselineLayout) -> Plan:
    """The plan of a layout."""
    stages = {s.name: list(_build_stages(base, s, layout)) for s in base.plan.sections}
    edges = [
        dataclasses.replace(
            e,
            src=stages[e.src][-1].name,
            dst=stages[e.dst][-1 if e.name in base.last_stage_edges else 0].name,
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
        for own_stages in stages.values()
        for a, b in pairwise(own_stages)
    ]
    sections = _deduplicate_parameters([s for own_stages in stages.values() for s in own_stages])
    world = 1 + max(r for s in sections for r in s.mesh.ranks)
    model = _model_on_rank(base.plan, sections)
    return dataclasses.replace(
        base.plan, sections=tuple(sections), edges=tuple(edges), world_size=world, model=model, ties=()
    )


def _build_stages(base: BaselineContext, section: Section, layout: BaselineLayout) -> Iterator[Section]:
    """Yields a section's stages; the section itself without a pipeline."""
    layout_of_section = layout.sections[section.name]
    c = layout_of_section.chosen
    rank = compute_rank_load(base.work.loads[section.name], c.shape, base.work.cluster)
    held = rank.cost_under_recompute(c.recompute)
    between = "" if held.kept_between == "0" else held.kept_between
    shares = list(_split_parameters(base.plan, section.params, c.pp))
    section_op, replicas = base.work.loads[section.name].section, max(1, c.ep // c.tp)
    parameters = {name: base.plan.model.parameters.get(name, "") for name in section.params}
    shards = assume_expert_shards(base.work.graph, section_op, parameters, c.tp, replicas)
    experts = {shard.name: shard for shard in shards} if replicas > 1 else {}
    for i in range(c.pp):
        stage_ranks = tuple(
            r for k, r in enumerate(layout_of_section.ranks) if k // c.stage_ranks % c.pp == i
        )
        whole_forward, whole_backward = rank.pass_ns(c.recompute)
        forward = rank.stages.forward_of_stage(whole_forward, i)
        backward = rank.stages.backward_of_stage(whole_backward, i)
        stage_fields = (
            {"name": f"{section.name}.{i}", "pipeline": section.name, "stage": i} if c.pp > 1 else {}
        )
        yield dataclasses.replace(
            section,
            **stage_fields,
            mesh=Mesh(stage_ranks, c.dp, 1, c.tp, c.cp, c.ep),
            params=shares[i],
            shards=tuple(experts[n] for n in shares[i] if n in experts),
            cost=Cost(forward, backward, rank.label, saved=held.saved, kept_between=between),
            micro_batch=base.plan.global_batch,  # tokens and bytes bound what is packed
            in_flight=layout_of_section.in_flight(i),
            room_bytes=_in_flight_bytes(base.work, rank, layout, i),
            sharding=c.sharding,
            recompute=c.recompute,
        )


def _in_flight_bytes(work: Workload, load: SectionLoad, layout: BaselineLayout, stage: int) -> int:
    """Bytes that the micro-batches of a stage may keep, bounded as in plans
    (`secc.alloc.refine.in_flight_limits`)."""
    if load.mode == "forward":
        return 0
    part = layout.sections[load.name]
    rank = part.ranks[stage * part.chosen.stage_ranks]
    holders = sum(
        rank in p.ranks and work.loads[name].mode != "forward" for name, p in layout.sections.items()
    )
    return in_flight_bytes(
        work,
        part.memory,
        part.counted_in_flight(stage),
        layout.bytes_on_rank(rank) - part.bytes_on_rank(rank),
        holders,
    )


def _split_parameters(plan: Plan, params: tuple[str, ...], parts: int) -> Iterator[tuple[str, ...]]:
    """Splits parameters, in order, into parts of about equal bytes."""
    sizes = [parameter_bytes(plan, name) for name in params]
    total, parts_of_parameters, bytes_before = sum(sizes), [list[str]() for _ in range(parts)], 0
    for name, size in zip(params, sizes, strict=True):
        parts_of_parameters[min(parts - 1, (bytes_before + size // 2) * parts // max(total, 1))].append(name)
        bytes_before += size
    yield from map(tuple, parts_of_parameters)


def _deduplicate_parameters(sections: list[Section]) -> list[Section]:
    """Sections with each parameter left only in the first section that holds it."""
    seen: set[str] = set()
    deduplicated: list[Section] = []
    for s in sections:
        deduplicated.append(dataclasses.replace(s, params=tuple(p for p in s.params if p not in seen)))
        seen |= set(s.params)
    return deduplicated


def _model_on_rank(plan: Plan, sections: list[Section]) -> ModelRef:
    """Table of parameters with the entries that one rank has under tensor parallelism; experts in parts stay
    whole here, since their shards say how they are divided."""
    table = dict(plan.model.parameters)
    for s in sections:
        experts = {shard.name for shard in s.shards}
        for name in (n for n in s.params if n not in experts) if s.mesh.tp > 1 else ():
            if found := re.fullmatch(r"(\w+)\[([\d, ]*)\](.*)", table.get(name, "")):
                entries = prod(int(n) for n in found[2].split(",") if n.strip())
                table[name] = f"{found[1]}[{-(-entries // s.mesh.tp)}]{found[3]}"
    return dataclasses.replace(plan.model, parameters=table)


def count_layers(base: BaselineContext, section: str) -> int:
    """Number of layers between which a section can be cut; at least 1."""
    return max(1, base.work.stackable_layers(base.work.loads[section]))
