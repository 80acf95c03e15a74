"""`split-stages`: replaces a section with `pp` above 1 by that many sections, its pipeline stages, or by a
multiple with several `chunks` of layers on each rank.

The section's calls (`secc.passes.boundaries.stage_cuts`) are divided so that the longest stage is as short as
possible by the cost model, then so that few bytes cross: with a heavy head the last stage has fewer layers.
Glue that several stages need is sent or computed again, whichever is cheaper, by the minimum cut that also
settles boundaries of sections. Ranks of a section are ordered (dp, pp, cp, tp).

A stage may hold `in_flight` micro-batches between forward and backward: twice as many as there are stages, so
that ragged micro-batches do not wait for each other, or as many as memory allows, but no fewer than 1F1B
(PipeDream-Flush, Narayanan et al. 2021) holds. With `backward=split`, stages that others wait for compute
gradients of parameters later, in idle time (zero-bubble scheduling, Qi et al. 2023).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from secc.alloc.problem.candidate_memory import memory_on_rank
from secc.alloc.problem.candidates import price_candidate
from secc.alloc.problem.in_flight import (
    IN_FLIGHT_PER_STAGE,
    divide_in_flight_room,
    in_flight_alternating,
    least_in_flight,
)
from secc.alloc.problem.micro_batch_times import (
    micro_batch_time_expressions,
    subgroup_costs,
)
from secc.alloc.problem.section_load import SectionLoad, compute_rank_load
from secc.alloc.problem.size_spread import measure_spread
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.refine.in_flight_limits import InFlightLimit, bytes_of_one, in_flight_bytes
from secc.cluster import GIB, Cluster, parse_cluster
from secc.cost.model.collectives import RankSpan, span_of_ranks
from secc.cost.model.memory import RankMemory
from secc.cost.model.patterns_and_transfers import (
    input_patterns,
    micro_batch_sizes,
    most_frequent_sizes,
    section_handles_pattern,
)
from secc.cost.model.section_cost import section_cost
from secc.errors import ImpossibleChoice, UserError
from secc.ir.analysis.dataflow import find_gradient_values, get_number, get_string, strongest_mode
from secc.ir.dialect.ops import (
    CallOp,
    GraphOp,
    SectionOp,
    graph_of,
    section_of,
    set_section,
    strings_attr,
    strings_of,
)
from secc.ir.dialect.python_attributes import float_attr, int_attr, int_list_attr
from secc.ir.dialect.readable_names import make_unique
from secc.passes.annotate_costs import write_section_cost, write_subgroup_costs
from secc.passes.boundaries.boundary_min_cut import BoundaryPrices
from secc.passes.boundaries.stage_cuts import StageUnits, balance_stages
from secc.passes.sections.assign_ops import required_modes, update_section_mode
from secc.passes.sink_boundaries import settle_boundary
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import SubgroupCost, rank_position

DEFAULT_CLUSTER = "1x8xH100"  # for IR that no allocation has been made for: only the ratios of times matter


@dataclass(frozen=True)
class SplitStages(ModulePass):
    name = "split-stages"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        wanted = [s for s in graph.sections if (get_number(s, "pp") or 1) > 1]
        cluster = _plan_cluster(graph)
        stages = [
            stage
            for section in wanted
            for stage in _split_section(graph, section, cluster.view_of_ranks(_ranks_of(section)))
        ]
        if stages:
            _note_costs(graph, stages, cluster)


def _plan_cluster(graph: GraphOp) -> Cluster:
    return Cluster.from_dict(json.loads(get_string(graph, "cluster") or "{}")) or parse_cluster(
        DEFAULT_CLUSTER
    )


def _split_section(graph: GraphOp, section: SectionOp, cluster: Cluster) -> list[SectionOp]:
    """Replaces a section by its stages. Raises UserError if it cannot be cut into that number of stages."""
    parts, units = _stage_count(section), StageUnits(graph, section.sym.data)
    if parts > len(units.layers):
        raise _refuse_split(section, parts, _describe_units(units), most=len(units.layers))
    ends = balance_stages(_unit_times(graph, section, units, cluster), units.cuts, parts)
    if ends is None:
        reason, where = next(iter(units.impossible.values()), ("it has too few places to cut", ""))
        raise _refuse_split(section, parts, reason, where)
    stages = _declare_stages(graph, section, parts)
    for op, unit in units.unit_of_op.items():
        set_section(op, stages[bisect_left(ends, unit)].sym.data)
    _assign_blocks(graph, section, stages)
    for j, dst in enumerate(stages):
        for src in stages[:j]:
            settle_boundary(graph, src.sym.data, dst.sym.data, BoundaryPrices(growth=0.0))
    for stage in stages:
        update_section_mode(graph, stage)
    section.detach()
    section.erase()
    return stages


def _stage_count(section: SectionOp) -> int:
    return int(get_number(section, "pp") or 1) * int(get_number(section, "chunks") or 1)


def _describe_units(units: StageUnits) -> str:
    blocks = list(dict.fromkeys(path for path, *_ in units.calls))
    if len(units.layers) == len(units.calls) and len(blocks) < 4:
        return (
            f"it calls {' and '.join(blocks)} whole, and there is nothing to cut between"
            if blocks
            else "it has no blocks"
        )
    return f"it has {len(units.layers)} layers"


def _refuse_split(section: SectionOp, parts: int, reason: str, where: str = "", most: int = 1) -> UserError:
    name = section.sym.data
    if (get_number(section, "chunks") or 1) > 1:
        remedy = f"leave out {name}.chunks and {name}.placement"
        error = UserError(f"section {name!r} cannot be cut into {parts} stages: {reason}", where, remedy)
        return ImpossibleChoice(error, [f"{name}.chunks"])
    remedy = f"set {name}.pp to at most {most}" if most > 1 else f"leave out {name}.pp"
    error = UserError(f"section {name!r} cannot be cut into {parts} stages: {reason}", where, remedy)
    return ImpossibleChoice(error, [f"{name}.pp={parts}" if most > 1 else f"{name}.pp"])


def _unit_times(graph: GraphOp, section: SectionOp, units: StageUnits, cluster: Cluster) -> list[int]:
    """Returns forward and backward ns of each unit for a micro-batch on a rank, averaged over the dataset's
    patterns and samples."""
    name, samples, recompute = (
        section.sym.data,
        int(get_number(section, "micro_batch") or 1),
        get_string(section, "recompute") or "none",
    )
    seen = tuple(p for p in input_patterns(graph) if section_handles_pattern(section, p))
    mean_sizes = most_frequent_sizes(graph, seen)
    members: dict[int, list[Operation]] = {}
    for op, unit in units.unit_of_op.items():
        members.setdefault(unit, []).append(op)
    wanted = set[SSAValue]().union(*map(find_gradient_values, graph.cases))
    texts: list[str] = []
    for unit, (path, *_) in enumerate(units.calls):
        part = SectionOp.create(
            properties={"sym": StringAttr(f"{name} {unit}"), "blocks": strings_attr([path])}
        )
        for op in members[unit]:
            set_section(op, part.sym.data)
        mode = strongest_mode(required_modes(members[unit], wanted))
        part.mode = StringAttr(mode)
        whole = SectionLoad(part, mode, section_cost(graph, part), "0", {}, "", seen, mean_sizes=mean_sizes)
        load = compute_rank_load(whole, _shape_of_stage(section), cluster)
        texts.append(f"{load.forward_ns} + {load.backward_ns[recompute]}")

    def mean_ns(text: str) -> int:
        spread = measure_spread(graph, seen, text)
        times = (
            (p.share, spread.mean_ns(p.when, evaluate_expr(text, micro_batch_sizes(graph, p.sizes, samples))))
            for p in seen
        )
        return sum(round(share * ns) for share, ns in times)

    times = {text: mean_ns(text) for text in {*texts}}
    return [times[text] for text in texts]


def _declare_stages(graph: GraphOp, section: SectionOp, parts: int) -> list[SectionOp]:
    """The stages before their section, each with its ranks, which several stages may share."""
    name, taken = section.sym.data, [s.sym.data for s in graph.sections]
    ranks = [int(r.value.data) for r in section.attributes["ranks"]] if "ranks" in section.attributes else []  # pyright: ignore
    size = int(get_number(section, "tp") or 1) * int(get_number(section, "cp") or 1)
    pp, placement = int(get_number(section, "pp") or 1), get_string(section, "placement") or "loop"
    stages: list[SectionOp] = []
    for i in range(parts):
        taken.append(make_unique(f"{name}_{i}", taken))
        properties = {**section.properties, "sym": StringAttr(taken[-1])}
        own = [r for k, r in enumerate(ranks) if k // size % pp == rank_position(i, pp, placement)]
        attributes = section.attributes | {
            "pipeline": StringAttr(name),
            "stage": int_attr(i),
            "pp": int_attr(1),
            "ranks": int_list_attr(own),
        }
        stages.append(SectionOp.create(properties=properties, attributes=attributes))
        graph.body.block.insert_op_before(stages[-1], section)
    return stages


def _assign_blocks(graph: GraphOp, section: SectionOp, stages: Sequence[SectionOp]) -> None:
    """Gives each stage the blocks that it calls, in the section's order; the first one keeps blocks that
    nothing calls."""
    calls: dict[str, set[str]] = {}
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                calls.setdefault(section_of(op) or "", set()).add(op.target.data)
    idle = set(strings_of(section.blocks)).difference(*calls.values())
    for i, stage in enumerate(stages):
        held = calls.get(stage.sym.data, set()) | (idle if i == 0 else set[str]())
        stage.blocks = strings_attr(b for b in strings_of(section.blocks) if b in held)


# -- what a stage costs
# --------------------------------------------------------------------------------------------------


def _note_costs(graph: GraphOp, stages: Sequence[SectionOp], cluster: Cluster) -> None:
    """Write each stage's cost, times, room in flight and memory, as `allocate` writes a section's."""
    work = build_workload(graph, cluster, int(get_number(graph, "global_batch") or 1))
    counts: dict[str, int] = {}
    for stage in stages:
        counts[get_string(stage, "pipeline") or ""] = counts.get(get_string(stage, "pipeline") or "", 0) + 1
    for stage in stages:
        load = _rank_load(work, stage)
        if load.mode == "forward":
            stage.attributes["recompute"] = StringAttr("none")
        if not load.cost.trainable and get_string(stage, "sharding") != "zero3":
            stage.attributes["sharding"] = StringAttr("none")
        unused = "optimizer" if load.mode != "forward" else "activations"
        if not load.cost.trainable and get_string(stage, "offload") in ("optimizer", unused):
            stage.attributes["offload"] = StringAttr("none")
            load = _rank_load(work, stage)
        recompute = get_string(stage, "recompute") or "none"
        held, later = load.cost_under_recompute(recompute), _weight_permille(work, load)
        between = held.kept_between if later else "0"
        write_section_cost(
            stage,
            replace(
                work.loads[load.name].cost, saved=held.saved, streamed=held.streamed, kept_between=between
            ),
        )
        dp, _, sharding, _ = _candidate_choice(stage)
        forward_ns, backward_ns = micro_batch_time_expressions(
            work, load, dp, sharding, recompute, _replica_span(stage, cluster)
        )
        in_flight = _in_flight_limit(
            work, load, counts[get_string(stage, "pipeline") or ""], _bytes_of_others(graph, work, stage)
        )
        stage.attributes |= {
            "weight_permille": int_attr(later),
            "in_flight": int_attr(in_flight if load.mode != "forward" else 0),
            "label": StringAttr(load.label),
            "forward_ns": StringAttr(forward_ns),
            "backward_ns": StringAttr(backward_ns),
            "host_gib": float_attr(round(_held_micro_batches(work, load)[1].host_bytes(in_flight) / GIB, 4)),
        }
    for stage in stages:
        held = [s for s in graph.sections if set(_ranks_of(s)) & set(_ranks_of(stage))] or [stage]
        memory = sum(_rank_memory(work, _rank_load(work, s)) for s in held)
        stage.attributes["memory_gib"] = float_attr(round(memory / GIB, 4))
        usable = work.cluster.view_of_ranks(_ranks_of(stage)).device.usable_memory
        if (excess := sum(_least_rank_memory(work, _rank_load(work, s)) for s in held) - usable) > 0:
            stage.attributes["missing_gib"] = float_attr(round(excess / GIB, 4))
        pipeline = get_string(stage, "pipeline") or ""
        own = [s for s in held if get_string(s, "pipeline") == pipeline]
        rooms = sum(_in_flight_bytes(work, _rank_load(work, s), memory, len(held)) for s in own)
        largest = _held_micro_batches(work, _rank_load(work, stage))[1].largest_sample
        shape, place = _pipeline_shape(stage, counts[pipeline])
        room = divide_in_flight_room(shape, place, rooms, largest)
        stage.attributes["room_bytes"] = int_attr(room)
        passing = _held_micro_batches(work, _rank_load(work, stage))[1].transient_bytes(
            _candidate_choice(stage)[2]
        )
        stage.attributes["working_bytes"] = int_attr(passing)
        if get_string(stage, "cp_per") == "micro_batch":
            limit = InFlightLimit(int(get_number(stage, "in_flight") or 0), room)
            found = bytes_of_one(limit, shape, place) or int(get_number(stage, "subgroup_bytes") or 0)
            write_subgroup_costs(stage, _subgroup_costs(work, stage), found)


def _subgroup_costs(work: Workload, stage: SectionOp) -> tuple[SubgroupCost, ...]:
    """What samples of a stage cost that some ranks of cp compute without the others."""
    load = _rank_load(work, stage)
    own = replace(work, cluster=work.cluster.view_of_ranks(_ranks_of(stage)))
    chosen = price_candidate(own, load, *_candidate_choice(stage))
    degrees = get_string(stage, "cp_degrees") or "any"
    chosen = replace(chosen, cp_per="micro_batch", cp_degrees=degrees)
    return subgroup_costs(own, work.loads[load.name], chosen)


def _weight_permille(work: Workload, load: SectionLoad) -> int:
    """The share of a split backward that comes later: parameters' gradients, where others wait for the
    rest."""
    cost, awaited = (
        load.cost,
        any(c.dst == load.name and c.grad and work.loads[c.src].mode != "forward" for c in work.crossings),
    )
    if (
        get_string(load.section, "backward") != "split"
        or load.mode != "train"
        or not awaited
        or not cost.params
    ):
        return 0
    return load.weight_permille.get(get_string(load.section, "recompute") or "none", 0)


def _rank_load(work: Workload, section: SectionOp) -> SectionLoad:
    """A section's load on one of its ranks."""
    own = work.cluster.view_of_ranks(_ranks_of(section))
    return compute_rank_load(work.loads[section.sym.data], _shape_of_stage(section), own)


def _shape_of_stage(section: SectionOp) -> ReplicaShape:
    """What ranks of a stage divide between them; stages are divided already."""
    tp, cp, ep = (int(get_number(section, key) or 1) for key in ("tp", "cp", "ep"))
    return ReplicaShape(
        tp=tp,
        cp=cp,
        ep=ep,
        backward_parts=2 if get_string(section, "backward") == "split" else 1,
        offload=get_string(section, "offload") or "none",
        norms=get_string(section, "norms") or "whole",
        overlap=get_string(section, "overlap") or "none",
    )


def _replica_span(stage: SectionOp, cluster: Cluster) -> RankSpan | None:
    """The span over nodes of the ranks that sum gradients and gather parameters together (the widest over tp
    ranks); None before ranks are assigned."""
    ranks, tp = _ranks_of(stage), int(get_number(stage, "tp") or 1)
    return (
        max((span_of_ranks(ranks[place::tp], cluster) for place in range(tp)), key=lambda span: span.nodes)
        if ranks
        else None
    )


def _ranks_of(section: SectionOp) -> list[int]:
    found = section.attributes.get("ranks")
    return [int(r.value.data) for r in found] if found is not None else []  # pyright: ignore


def _candidate_choice(section: SectionOp) -> tuple[int, int, str, str]:
    dp, size = (int(get_number(section, key) or 1) for key in ("dp", "micro_batch"))
    return dp, size, get_string(section, "sharding") or "none", get_string(section, "recompute") or "none"


def _bytes_of_others(graph: GraphOp, work: Workload, stage: SectionOp) -> int:
    """Bytes that sections outside of the stage's pipeline need on its ranks."""
    ranks, pipeline = set(_ranks_of(stage)), get_string(stage, "pipeline")
    return sum(
        _rank_memory(work, _rank_load(work, s))
        for s in graph.sections
        if get_string(s, "pipeline") != pipeline and ranks & set(_ranks_of(s))
    )


def _in_flight_limit(work: Workload, load: SectionLoad, parts: int, others: int) -> int:
    """The number of micro-batches that a stage may hold: as many as help and memory allows, with `others`
    bytes of other sections on its ranks; at least one for itself and each stage behind it.

    A pipeline that feeds sections on other ranks keeps the number that `allocate` chose.
    """
    if given := int(get_number(load.section, "in_flight") or 0):
        return given
    shape, stage = _pipeline_shape(load.section, parts)
    least = least_in_flight(shape.pp, shape.chunks, stage)
    _, rank = _held_micro_batches(work, load)
    device = work.cluster.view_of_ranks(_ranks_of(load.section)).device
    most = divide_in_flight_room(shape, stage, IN_FLIGHT_PER_STAGE * shape.stages)
    if shape.chunks == 1:
        return next((n for n in range(most, least, -1) if rank.fits_device(n, device, others)), least)
    others += shape.chunks * (rank.fixed + rank.gradients)  # of all stages on the rank
    room = divide_in_flight_room(shape, stage, max(0, device.usable_memory - others), rank.largest_sample)
    return max(least, min(most, (room - rank.kept_between) // max(1, rank.activation)))


def _pipeline_shape(stage: SectionOp, parts: int) -> tuple[ReplicaShape, int]:
    """The number of ranks and chunks of a pipeline with `parts` stages, as far as in-flight limits depend on
    them, and the number of one of its stages."""
    chunks = int(get_number(stage, "chunks") or 1)
    placement = get_string(stage, "placement") or "loop"
    shape = ReplicaShape(pp=parts // chunks, chunks=chunks, placement=placement)
    return shape, int(get_number(stage, "stage") or 0)


def _rank_memory(work: Workload, load: SectionLoad) -> int:
    """Bytes of a section on a rank, with what it may hold in flight."""
    held, rank = _held_micro_batches(work, load)
    return rank.total_bytes(held)


def _least_rank_memory(work: Workload, load: SectionLoad) -> int:
    """Bytes of a section on a rank with one micro-batch in flight."""
    held, rank = _held_micro_batches(work, load)
    return rank.total_bytes(min(held, 1))


def _in_flight_bytes(work: Workload, load: SectionLoad, memory: int, holders: int) -> int:
    """The bytes that micro-batches of a stage may keep, on a rank with sections that need `memory` bytes
    together."""
    if load.mode == "forward":
        return 0
    own = replace(work, cluster=work.cluster.view_of_ranks(_ranks_of(load.section)))
    held, rank = _held_micro_batches(work, load)
    return in_flight_bytes(own, rank, held, memory - rank.total_bytes(held), holders)


def _held_micro_batches(work: Workload, load: SectionLoad) -> tuple[int, RankMemory]:
    """Micro-batches that a section holds on a rank at once, and the rank's memory."""
    count = price_candidate(work, load, *_candidate_choice(load.section)).micro_batches
    held = int(get_number(load.section, "in_flight") or 0)
    return min(held, count) if held else in_flight_alternating(work, load, count), memory_on_rank(
        work, load, *_candidate_choice(load.section), count
    )
