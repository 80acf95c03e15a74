"""Cross-step prefetch: frozen sections compute forwards of the next global batch in the idle end of a step.

A teacher has nothing to do while its students train the last samples of a step, and then all students wait
for its first outputs. Both gaps close if it starts on the next batch instead. Only work that no parameter
update changes may cross the end of a step: forwards of sections without trained parameters that have only
such sections upstream (`find_prefetchable_sections`).

The choice of micro-batches depends on their own global batch alone (`select_prefetched`): the first ones that
the critical section wants, as many as a rank has memory for (`Plan.run_ahead_gib`). So a batch is cut and
ordered the same whatever happened in earlier steps, and sums stay bit-equal in a resumed run: the scheduler
takes prefetchable micro-batches as ready when the step starts. A spliced step (`splice_prefetch`) runs the
remainder of its own program and then, after its reductions, the prefetched part of the next one. In the first
step of a run, also of a resumed one, ranks compute their prefetchable micro-batches themselves, and the last
step prefetches nothing. Results stay on the ranks that made them and are sent in the step that uses them;
between two prefetching sections they are sent at once.

A rank that is through with its own step prefetches from what other ranks have computed for it (a teacher's
features of images), and these may be busy with their own step for long. So sections that feed other
prefetching sections, and wait for no other rank themselves, do not wait for the end of their ranks' programs:
they run before the forwards that end after the first rank is through (`_find_early_place`).

At the end of a step each stage of a pipeline has prefetched more than the next one, by at least the longest
micro-batch (`_counts_of_stages`). So frozen pipelines fill and drain once in a run, and a long micro-batch
delays no later stage.

Replicas that exchange tokens prefetch whole rounds (`gather_rounds`). Rounds in which a replica has no
samples are left to the step that needs them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    gather_rounds,
    gathers_parameters,
    replicas_in_lockstep,
    runs_in_lockstep,
)
from secc.runtime.schedule.micro_batches import MicroBatchTable

GIB = 1 << 30
# How many micro-batches may fail to fit before a replica counts as full; smaller ones may still fit after
# that.
PREFETCH_PATIENCE = 16

SampleSizes = Sequence[Mapping[str, int]]  # symbol values of each sample
_Unit = tuple[int, ...]  # indices of micro-batches that are computed together
_WantedUnit = tuple[int, int, str, _Unit]  # critical start time, depth of the section, section, unit


def find_prefetchable_sections(plan: Plan, graph: SectionGraph) -> list[Section]:
    """Returns the sections that may prefetch, producers first.

    They have no backward, no trained parameter, unsharded replicas and micro-batches, the same holds for
    all their ancestors, and no other section runs on their ranks (otherwise these are not idle at the end of
    a step).
    """
    frozen_sections: list[Section] = []
    for s in graph.topological_order:
        frozen = (
            s.mode == "forward"
            and not gathers_parameters(s)
            and not s.whole_batch
            and not any(plan.model.parameters.get(name, "").endswith(" train") for name in s.params)
        )
        if frozen and graph.ancestors[s.name] <= {f.name for f in frozen_sections}:
            frozen_sections.append(s)
    busy_ranks = {rank for s in plan.sections if s not in frozen_sections for rank in s.mesh.ranks}
    prefetchable = [s for s in frozen_sections if busy_ranks.isdisjoint(s.mesh.ranks)]
    while incomplete := [
        s for s in prefetchable if not _prefetch_requirements(s, graph) <= {a.name for a in prefetchable}
    ]:
        prefetchable = [s for s in prefetchable if s not in incomplete]
    return prefetchable


def _prefetch_requirements(section: Section, graph: SectionGraph) -> set[str]:
    """Returns the sections that must prefetch, too, if one does: its ancestors and the stages of its
    pipeline.
    """
    return graph.ancestors[section.name] | {s.name for s in graph.pipeline_stages[section.name]}


def with_prefetch_memory(plan: Plan, gib: float | None) -> Plan:
    """Returns the plan with `gib` GiB on each rank for prefetched results, or unchanged for None.

    Raises UserError if no section can prefetch.
    """
    if gib is None:
        return plan
    if gib and not find_prefetchable_sections(plan, SectionGraph(plan)):
        raise UserError(
            "no section of the plan can run ahead: each has a backward, depends on trained parameters, "
            "or shares ranks with a section that does",
            remedy="leave --run-ahead out, or compile with the frozen section on ranks of its own "
            "(--strategy apart)",
        )
    return replace(plan, run_ahead_gib=gib)


def select_prefetched(
    plan: Plan, graph: SectionGraph, tables: Mapping[str, MicroBatchTable], samples: Sequence[SampleMeta]
) -> dict[str, frozenset[int]]:
    """Returns the micro-batches that the previous step may compute, by section; {} without prefetch
    memory.
    """
    prefetching = find_prefetchable_sections(plan, graph) if plan.run_ahead_gib > 0 else []
    return (
        _PrefetchSelection(
            plan, graph, tables, pad_sample_sizes(plan, samples), prefetching
        ).select_micro_batches()
        if prefetching
        else {}
    )


class _PrefetchSelection:
    """Selects micro-batches by critical start time until the ranks' prefetch memory is full; those of a round
    together.

    Keys: a user section's name in `stages_by_section`, `units` and `selected` (indices of the micro-batches
    that are computed together), `ready_samples` and `needed_samples` (by source section); (section or stage,
    replica) in `held_bytes`.
    """

    def __init__(
        self,
        plan: Plan,
        graph: SectionGraph,
        tables: Mapping[str, MicroBatchTable],
        sizes: SampleSizes,
        prefetching: Sequence[Section],
    ) -> None:
        self.plan, self.graph, self.tables, self.sizes = plan, graph, tables, sizes
        self.stages_by_section = {s.user_section_name: graph.pipeline_stages[s.name] for s in prefetching}
        self.output_edges = {s.name: [e for e in plan.edges if e.src == s.name] for s in prefetching}
        self.memory_limit = int(plan.run_ahead_gib * GIB)
        self.held_bytes: Counter[tuple[str, int]] = Counter()
        # by section and index of the micro-batch
        self.known_result_bytes: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)
        self.units = {
            section: _list_units(stages[0], tables[stages[0].name])
            for section, stages in self.stages_by_section.items()
        }
        self.selected: defaultdict[str, list[_Unit]] = defaultdict(list)
        self.ready_samples: defaultdict[str, set[int]] = defaultdict(set)
        stage_names = {
            section: {s.name for s in stages} for section, stages in self.stages_by_section.items()
        }
        sources_of = {
            section: {e.src for e in plan.edges if e.dst in names} - names
            for section, names in stage_names.items()
        }
        self.needed_samples = {
            section: {src: _table_samples(tables[src]) for src in sources}
            for section, sources in sources_of.items()
        }

    def select_micro_batches(self) -> dict[str, frozenset[int]]:
        """Returns the selected micro-batches by section."""
        wanted = [
            (_critical_start(unit, table), self.graph.depth[stages[0].name], section, unit)
            for section, stages in self.stages_by_section.items()
            for table in (self.tables[stages[0].name],)
            for unit in self.units[section]
        ]
        full: Counter[tuple[str, int]] = Counter()
        while wanted:
            postponed = self.take_fitting(sorted(wanted), full)
            if len(postponed) == len(wanted):
                break
            # Inputs of postponed micro-batches may have been selected after them: a consumer's micro-batch
            # has the critical start time of its first sample.
            wanted = postponed
        return {name: chosen for name, chosen in self.stagger_stages() if chosen}

    def stagger_stages(self) -> Iterator[tuple[str, frozenset[int]]]:
        """Yields the micro-batches of each section or stage: in the first one all that are selected, and
        fewer in each later one."""
        for section, stages in self.stages_by_section.items():
            table, first_replica = self.tables[stages[0].name], self.first_replica_of(stages[0])
            by_replica: defaultdict[int, list[_Unit]] = defaultdict(list)
            longest = Counter[int]()
            for unit in sorted(self.selected[section], key=lambda u: (_critical_start(u, table), u)):
                by_replica[first_replica(table.micro_batches[unit[0]])].append(unit)
            for m, ns in zip(table.micro_batches, table.forward_ns, strict=True):
                longest[first_replica(m)] = max(longest[first_replica(m)], ns)
            counts = {
                replica: _counts_of_stages(
                    [max(table.forward_ns[m] for m in unit) for unit in units], longest[replica], len(stages)
                )
                for replica, units in by_replica.items()
            }
            for number, stage in enumerate(stages):
                chosen = (
                    u for replica, units in by_replica.items() for u in units[: counts[replica][number]]
                )
                yield stage.name, frozenset(m for unit in chosen for m in unit)

    def first_replica_of(self, section: Section) -> Callable[[MicroBatch], int]:
        """Returns a function that returns the first of the replicas with which a micro-batch's replica runs
        in lockstep."""
        together = replicas_in_lockstep(section)
        return lambda micro: micro.replica - micro.replica % together

    def take_fitting(
        self, wanted: Sequence[_WantedUnit], full: Counter[tuple[str, int]]
    ) -> list[_WantedUnit]:
        """Selects the micro-batches that fit into memory; returns those with inputs that are not selected
        yet.
        """
        postponed: list[_WantedUnit] = []
        for key in wanted:
            _, _, section, unit = key
            micros = [self.tables[self.stages_by_section[section][0].name].micro_batches[m] for m in unit]
            if full[section, micros[0].replica] >= PREFETCH_PATIENCE:
                continue
            if not all(self.has_prefetched_inputs(section, micro) for micro in micros):
                postponed.append(key)
            elif self.reserve_memory(section, micros):
                self.selected[section].append(unit)
                self.ready_samples[section].update(p for micro in micros for p in micro.samples)
            else:
                full[section, micros[0].replica] += 1
        return postponed

    def has_prefetched_inputs(self, section: str, micro: MicroBatch) -> bool:
        """Returns whether all inputs of a micro-batch from other sections are prefetched, too."""
        needed = self.needed_samples[section].items()
        return all(
            source_samples.intersection(micro.samples)
            <= self.ready_samples[self.plan.find_section(src).user_section_name]
            for src, source_samples in needed
        )

    def reserve_memory(self, section: str, micros: Sequence[MicroBatch]) -> bool:
        """Reserves memory for results of micro-batches on each stage's ranks; returns False if one does not
        fit.
        """
        stages = self.stages_by_section[section]
        more = {
            (s.name, micro.replica): size
            for micro in micros
            for s, size in zip(stages, self.count_result_bytes(section, micro), strict=True)
        }
        if any(self.held_bytes[key] + size > self.memory_limit for key, size in more.items()):
            return False
        for key, size in more.items():
            self.held_bytes[key] += size
        return True

    def count_result_bytes(self, section: str, micro: MicroBatch) -> list[int]:
        """Returns the bytes of a micro-batch's results by stage (memoised: postponed ones are tried again).
        The tensors between stages are mostly of one kind, which is evaluated once."""
        known = self.known_result_bytes[section]
        if micro.index not in known:
            sizes = combine_sizes([self.sizes[p] for p in micro.samples], self.plan.symbols)
            edges_by_stage = [self.output_edges[s.name] for s in self.stages_by_section[section]]
            kinds = {(e.dims, e.dtype): e for edges in edges_by_stage for e in edges}
            size_of = {kind: edge_tensor_bytes(e, sizes) for kind, e in kinds.items()}
            known[micro.index] = [sum(size_of[e.dims, e.dtype] for e in edges) for edges in edges_by_stage]
        return known[micro.index]


def _list_units(section: Section, table: MicroBatchTable) -> list[_Unit]:
    """Returns the micro-batches that are computed together: rounds without an empty one, else each alone."""
    if not runs_in_lockstep(section):
        return [(m,) for m in range(len(table.micro_batches))]
    rounds = gather_rounds([section], {section.name: table.micro_batches})
    return [
        tuple(m.index for m in unit)
        for unit in dict.fromkeys(rounds.values())
        if all(m.samples for m in unit)
    ]


def _critical_start(unit: _Unit, table: MicroBatchTable) -> int:
    return min(table.critical_start_ns[m] for m in unit)


def _counts_of_stages(forward_ns: Sequence[int], longest: int, stages: int) -> list[int]:
    """Returns how many of a replica's selected micro-batches, in order, each stage prefetches.

    Each leaves to the next step as many that the stage before it has prefetched as take `longest` ns, so that
    it has work while the longest micro-batch passes. The last stage keeps half of them, for consumers at the
    start of a step.
    """
    counts = [len(forward_ns)]
    for number in range(1, stages):
        count, left = counts[-1], 0
        while count and left < longest:
            count -= 1
            left += forward_ns[count]
        least = len(forward_ns) - len(forward_ns) // 2 * number // (stages - 1)
        counts.append(max(count, least))
    return counts


def _table_samples(table: MicroBatchTable) -> set[int]:
    return {p for m in table.micro_batches for p in m.samples}


def edge_tensor_bytes(edge: Edge, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of an edge's tensor in a micro-batch with these symbol values."""
    return prod(evaluate_expr(text, sizes) for text in edge.dims) * getattr(torch, edge.dtype).itemsize


def without_prefetched_time(
    tables: Mapping[str, MicroBatchTable], prefetchable: MicroBatchSets
) -> dict[str, MicroBatchTable]:
    """Returns the tables with prefetchable micro-batches that take no forward time and come first."""
    return {
        name: _without_forward_time(table, prefetchable[name]) if name in prefetchable else table
        for name, table in tables.items()
    }


def _without_forward_time(table: MicroBatchTable, prefetchable: frozenset[int]) -> MicroBatchTable:
    forward = [0 if m in prefetchable else ns for m, ns in enumerate(table.forward_ns)]
    first = max(table.critical_start_ns, default=0) + 1  # before all others, and in the same order
    start = [ns - first if m in prefetchable else ns for m, ns in enumerate(table.critical_start_ns)]
    return replace(table, forward_ns=forward, critical_start_ns=start)


# -- splicing


@dataclass(frozen=True)
class _NextStepIndices:
    """Index in this step of each prefetchable micro-batch of the next one, by section."""

    index: Mapping[str, Mapping[int, int]]

    def __call__(self, i: Instruction, edges: Mapping[str, Edge]) -> Instruction:
        """Returns an instruction of the next step's schedule with the indices of this step."""
        if i.kind == "F":
            return i._replace(micro=self.index[i.section][i.micro])
        edge = edges[i.edge]
        return i._replace(
            src_micro=self.index[edge.src][i.src_micro], dst_micro=self.index[edge.dst][i.dst_micro]
        )


def splice_prefetch(plan: Plan, this: Schedule, own: int, then: Schedule | None, warm: bool) -> Schedule:
    """Returns the schedule of a step with its neighbours' prefetched work.

    `this` is the step's own schedule, of `own` samples; `then` the next global batch's, None in the last
    step. `warm` says whether the previous step has computed `this.prefetchable`.
    """
    prefetched, coming = (this.prefetchable if warm else {}), (then.prefetchable if then is not None else {})
    if not prefetched and not coming:
        return this
    edges = {e.name: e for e in plan.edges}
    later = {name: sorted(micros) for name, micros in coming.items()}
    to_this_step = _NextStepIndices(
        {name: {m: len(this.micro_batches[name]) + k for k, m in enumerate(ms)} for name, ms in later.items()}
    )
    own_parts = [
        [i for i in program if not _is_prefetch_instruction(i, prefetched, edges)]
        for program in this.programs
    ]
    coming_parts = [
        [i for i in program if _is_prefetch_instruction(i, coming, edges)]
        for program in (then.programs if then is not None else [()] * len(own_parts))
    ]
    feeders = _find_feeders(plan, coming)
    early_parts = [[i for i in part if _runs_for(i, feeders, edges)] for part in coming_parts]
    first_end = min(
        (
            _forward_ns(this, part)
            for part, coming_part in zip(own_parts, coming_parts, strict=True)
            if coming_part
        ),
        default=0,
    )
    programs: list[tuple[Instruction, ...]] = []
    for part, coming_part, early in zip(own_parts, coming_parts, early_parts, strict=True):
        room = first_end - (_forward_ns(then, early) if then is not None else 0)
        place = _find_early_place(this, part, room, feeders, edges) if early else len(part) - 1
        late = (i for i in coming_part if not _runs_for(i, feeders, edges))
        programs.append(
            (
                *part[:place],
                *(to_this_step(i, edges) for i in early),
                *part[place:-1],
                *(to_this_step(i, edges) for i in late),
                part[-1],
            )
        )
    micros = {
        name: (*own_micros, *_shift_micro_batches(name, then, later.get(name, ()), len(own_micros), own))
        if then is not None
        else own_micros
        for name, own_micros in this.micro_batches.items()
    }
    return Schedule(
        micros,
        tuple(programs),
        prefetched=prefetched,
        own_samples=own,
        over_memory=this.over_memory,
        whole_backwards=this.whole_backwards,
    )


def _find_feeders(plan: Plan, prefetched: MicroBatchSets) -> frozenset[str]:
    """Returns the prefetching sections with results that other prefetching sections need, if they wait for no
    other rank: their work may stand anywhere in a program."""
    user_section = {s.name: s.user_section_name for s in plan.sections}
    fed = {e.dst for e in plan.edges}
    return frozenset(
        e.src
        for e in plan.edges
        if {e.src, e.dst} <= prefetched.keys()
        and user_section[e.src] != user_section[e.dst]
        and e.src not in fed
        and plan.find_section(e.src).mesh.replica_size == 1
        and not runs_in_lockstep(plan.find_section(e.src))
    )


def _runs_for(i: Instruction, sections: frozenset[str], edges: Mapping[str, Edge]) -> bool:
    """Returns whether an instruction computes one of these sections, or sends its results."""
    return i.section in sections if i.kind == "F" else i.kind == "SEND" and edges[i.edge].src in sections


def _forward_ns(schedule: Schedule, part: Sequence[Instruction]) -> int:
    """Returns the time that a part of a program computes prefetching sections."""
    times = schedule.forward_ns
    return sum(times[i.section][i.micro] for i in part if i.kind == "F" and i.section in times)


def _find_early_place(
    this: Schedule, own: Sequence[Instruction], room: int, feeders: frozenset[str], edges: Mapping[str, Edge]
) -> int:
    """Returns where in a rank's program of this step the work of `feeders` for the next one comes: before the
    first forward that ends after `room` ns, but behind the feeders' own work, since channels keep the order.
    """
    last_own = max((k for k, i in enumerate(own) if _runs_for(i, feeders, edges)), default=-1)
    spent = 0
    for k, i in enumerate(own):
        spent += _forward_ns(this, (i,))
        if spent > room and i.kind == "F" and k > last_own:
            return k
    return len(own) - 1


def _is_prefetch_instruction(
    i: Instruction, micro_batches: MicroBatchSets, edges: Mapping[str, Edge]
) -> bool:
    """Returns whether an instruction computes one of these micro-batches, or carries a tensor to one."""
    if i.kind == "F":
        return i.micro in micro_batches.get(i.section, ())
    return (
        i.kind in ("SEND", "RECV")
        and i.direction == "fwd"
        and i.dst_micro in micro_batches.get(edges[i.edge].dst, ())
    )


def _shift_micro_batches(
    name: str, then: Schedule, later: Sequence[int], start: int, own: int
) -> Iterator[MicroBatch]:
    for k, m in enumerate(later):
        micro = then.micro_batches[name][m]
        yield micro._replace(index=start + k, samples=tuple(p + own for p in micro.samples))
