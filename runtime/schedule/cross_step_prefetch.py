"""Running ahead: sections that nothing trained is upstream of compute forwards for the next global batch in
the idle end of a step.

A teacher whose students still train its last samples has nothing to do until the optimizer's step, and then
all students wait for its first ones. Both gaps close where it starts on the next batch instead. What may
cross the step's end is what no update changes: the forwards of sections that hold no trained parameter and
only have such sections upstream (`sections`).

Which micro-batches those are depends on their own global batch alone (`early`): the first ones that the
critical section wants, as many as a rank may keep the results of (`Plan.run_ahead_gib`). So a batch is cut
and ordered in the same way whatever became of the steps before it, and sums come out bit by bit the same in a
run that was resumed: the order takes early micro-batches for ready when the step starts. A step among others
(`spliced`) has what is left of its own program and then, behind its reductions, the early part of the next
one. In the first step of a run, also of a resumed one, a rank computes its own early micro-batches itself,
and the last step runs nothing ahead. Results stay on the ranks that made them, and are sent in the step that
uses them; between sections that both run ahead, they are sent ahead, too.

The stages of a pipeline have the same early micro-batches, since a tensor passes between them whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from secc.runtime.errors import UserError
from secc.runtime.plan.batch_sizes import combine_sizes, pad_sample_sizes
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import Edge, Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    Instruction,
    MicroBatch,
    MicroBatchSets,
    SampleMeta,
    Schedule,
    gathers_parameters,
)
from secc.runtime.schedule.micro_batches import MicroBatchTable

GIB = 1 << 30
# micro-batches that do not fit any more before a replica's results count as full: small ones level the ranks
PREFETCH_PATIENCE = 16

SampleSizes = Sequence[Mapping[str, int]]  # of each sample in a micro-batch


def find_prefetchable_sections(plan: Plan, graph: SectionGraph) -> list[Section]:
    """The sections that may run ahead, producers first: no backward, no trained parameter, whole on each
    replica, the same for all sections upstream, and on ranks that nothing else runs on, which would otherwise
    be idle for no longer than others are."""
    found: list[Section] = []
    for s in graph.topological_order:
        frozen = (
            s.mode == "forward"
            and not gathers_parameters(s)
            and not any(plan.model.parameters.get(name, "").endswith(" train") for name in s.params)
        )
        if frozen and graph.ancestors[s.name] <= {f.name for f in found}:
            found.append(s)
    others = {rank for s in plan.sections if s not in found for rank in s.mesh.ranks}
    apart = [s for s in found if others.isdisjoint(s.mesh.ranks)]
    while lacking := [s for s in apart if not _prefetch_requirements(s, graph) <= {a.name for a in apart}]:
        apart = [s for s in apart if s not in lacking]
    return apart


def _prefetch_requirements(section: Section, graph: SectionGraph) -> set[str]:
    """The sections that must run ahead, too, where one does: those upstream, and the stages of its
    pipeline."""
    return graph.ancestors[section.name] | {s.name for s in graph.pipeline_stages[section.name]}


def with_prefetch_memory(plan: Plan, gib: float | None) -> Plan:
    """The plan with so much memory for results on a rank, None for its own. Raises UserError where no section
    can run ahead."""
    if gib is None:
        return plan
    if gib and not find_prefetchable_sections(plan, SectionGraph(plan)):
        message = "no section of the plan can run ahead: each has a backward, needs what trains, or shares ranks with one that does"
        raise UserError(
            message,
            remedy="leave --run-ahead out, or compile with the frozen section on ranks of its own (--strategy apart)",
        )
    return replace(plan, run_ahead_gib=gib)


def select_prefetched(
    plan: Plan, graph: SectionGraph, tables: Mapping[str, MicroBatchTable], samples: Sequence[SampleMeta]
) -> dict[str, frozenset[int]]:
    """The micro-batches that the step before may compute, by section; nothing where the plan gives no memory
    for it."""
    running = find_prefetchable_sections(plan, graph) if plan.run_ahead_gib > 0 else []
    return (
        _PrefetchSelection(
            plan, graph, tables, pad_sample_sizes(plan, samples), running
        ).select_micro_batches()
        if running
        else {}
    )


class _PrefetchSelection:
    """Takes micro-batches in the order in which they are wanted, until the ranks have no room for their
    results."""

    def __init__(
        self,
        plan: Plan,
        graph: SectionGraph,
        tables: Mapping[str, MicroBatchTable],
        sizes: SampleSizes,
        running: Sequence[Section],
    ) -> None:
        self.plan, self.graph, self.tables, self.sizes = plan, graph, tables, sizes
        self.stages_by_section = {s.user_section_name: graph.pipeline_stages[s.name] for s in running}
        self.output_edges = {s.name: [e for e in plan.edges if e.src == s.name] for s in running}
        self.memory_limit = int(plan.run_ahead_gib * GIB)
        self.held_bytes: Counter[tuple[str, int]] = Counter()  # bytes of a section's replica
        self.selected: defaultdict[str, set[int]] = defaultdict(set)  # micro-batches of a whole section
        self.ready_samples: defaultdict[str, set[int]] = defaultdict(set)  # their samples
        own = {whole: {s.name for s in stages} for whole, stages in self.stages_by_section.items()}
        into = {whole: {e.src for e in plan.edges if e.dst in names} - names for whole, names in own.items()}
        self.needed_samples = {
            whole: {src: _table_samples(tables[src]) for src in sources} for whole, sources in into.items()
        }

    def select_micro_batches(self) -> dict[str, frozenset[int]]:
        wanted = [
            (turn, self.graph.depth[stages[0].name], whole, index)
            for whole, stages in self.stages_by_section.items()
            for index, turn in enumerate(self.tables[stages[0].name].critical_start_ns)
        ]
        full: Counter[tuple[str, int]] = Counter()
        while wanted:
            later = self.take_fitting(sorted(wanted), full)
            if len(later) == len(wanted):
                break
            # what they need may have come behind them: a consumer's micro-batch has the turn of its first
            # sample
            wanted = later
        return {
            s.name: frozenset(self.selected[whole])
            for whole, stages in self.stages_by_section.items()
            for s in stages
            if self.selected[whole]
        }

    def take_fitting(
        self, wanted: Sequence[tuple[int, int, str, int]], full: Counter[tuple[str, int]]
    ) -> list[tuple[int, int, str, int]]:
        """Take what there is room for; those that cannot be taken yet come back."""
        later: list[tuple[int, int, str, int]] = []
        for key in wanted:
            _, _, whole, index = key
            micro = self.tables[self.stages_by_section[whole][0].name].micro_batches[index]
            if full[whole, micro.replica] >= PREFETCH_PATIENCE:
                continue
            if not self.has_prefetched_inputs(whole, micro):
                later.append(key)
            elif self.reserve_memory(whole, micro):
                self.selected[whole].add(index)
                self.ready_samples[whole].update(micro.samples)
            else:
                full[whole, micro.replica] += 1
        return later

    def has_prefetched_inputs(self, whole: str, micro: MicroBatch) -> bool:
        """Whether all that a micro-batch needs of other sections is early, too."""
        needed = self.needed_samples[whole].items()
        return all(
            has.intersection(micro.samples)
            <= self.ready_samples[self.plan.find_section(src).user_section_name]
            for src, has in needed
        )

    def reserve_memory(self, whole: str, micro: MicroBatch) -> bool:
        """Whether each stage's ranks have room for the results; if so, they take it."""
        sizes = combine_sizes([self.sizes[p] for p in micro.samples], self.plan.symbols)
        more = {
            (s.name, micro.replica): sum(edge_tensor_bytes(e, sizes) for e in self.output_edges[s.name])
            for s in self.stages_by_section[whole]
        }
        if any(self.held_bytes[key] + size > self.memory_limit for key, size in more.items()):
            return False
        self.held_bytes.update(more)
        return True


def _table_samples(table: MicroBatchTable) -> set[int]:
    return {p for m in table.micro_batches for p in m.samples}


def edge_tensor_bytes(edge: Edge, sizes: Mapping[str, int]) -> int:
    """Bytes of an edge's tensor in a micro-batch of these sizes."""
    return prod(evaluate_expr(text, sizes) for text in edge.dims) * getattr(torch, edge.dtype).itemsize


def without_prefetched_time(
    tables: Mapping[str, MicroBatchTable], chosen: MicroBatchSets
) -> dict[str, MicroBatchTable]:
    """The tables in which early micro-batches take no time and come first."""
    return {
        name: _without_forward_time(table, chosen[name]) if name in chosen else table
        for name, table in tables.items()
    }


def _without_forward_time(table: MicroBatchTable, chosen: frozenset[int]) -> MicroBatchTable:
    forward = [0 if m in chosen else ns for m, ns in enumerate(table.forward_ns)]
    return replace(
        table,
        forward_ns=forward,
        critical_start_ns=[-1 if m in chosen else t for m, t in enumerate(table.critical_start_ns)],
    )


# -- steps among others
# -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NextStepIndices:
    """Where the early micro-batches of the next schedule stand in this one."""

    index: Mapping[str, Mapping[int, int]]

    def __call__(self, i: Instruction, edges: Mapping[str, Edge]) -> Instruction:
        if i.kind == "F":
            return i._replace(micro=self.index[i.section][i.micro])
        edge = edges[i.edge]
        return i._replace(
            src_micro=self.index[edge.src][i.src_micro], dst_micro=self.index[edge.dst][i.dst_micro]
        )


def splice_prefetch(plan: Plan, this: Schedule, own: int, then: Schedule | None, warm: bool) -> Schedule:
    """The schedule of a step of `own` samples among others: `warm` if the step before has computed its early
    micro-batches, `then` the next global batch's, None in the last step."""
    computed, coming = (this.prefetchable if warm else {}), (then.prefetchable if then is not None else {})
    if not computed and not coming:
        return this
    edges = {e.name: e for e in plan.edges}
    later = {name: sorted(micros) for name, micros in coming.items()}
    moved = _NextStepIndices(
        {name: {m: len(this.micro_batches[name]) + k for k, m in enumerate(ms)} for name, ms in later.items()}
    )
    programs: list[tuple[Instruction, ...]] = []
    for rank, program in enumerate(this.programs):
        kept = [i for i in program if not _is_prefetch_instruction(i, computed, edges)]
        ahead = (
            [moved(i, edges) for i in then.programs[rank] if _is_prefetch_instruction(i, coming, edges)]
            if then is not None
            else []
        )
        programs.append((*kept[:-1], *ahead, kept[-1]))
    micros = {
        name: (*some, *_shift_micro_batches(name, then, later.get(name, ()), len(some), own))
        if then is not None
        else some
        for name, some in this.micro_batches.items()
    }
    return Schedule(micros, tuple(programs), prefetched=computed, own_samples=own)


def _is_prefetch_instruction(i: Instruction, chosen: MicroBatchSets, edges: Mapping[str, Edge]) -> bool:
    """Whether an instruction computes an early micro-batch, or carries a tensor to one."""
    if i.kind == "F":
        return i.micro in chosen.get(i.section, ())
    return (
        i.kind in ("SEND", "RECV")
        and i.direction == "fwd"
        and i.dst_micro in chosen.get(edges[i.edge].dst, ())
    )


def _shift_micro_batches(
    name: str, then: Schedule, later: Sequence[int], start: int, own: int
) -> Iterator[MicroBatch]:
    for k, m in enumerate(later):
        micro = then.micro_batches[name][m]
        yield micro._replace(index=start + k, samples=tuple(p + own for p in micro.samples))
