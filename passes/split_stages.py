"""`split-stages`: a section with `pp` above 1 becomes that many sections, its stages, which the rest of the
compiler treats as any other.

The section's calls in a row (`secc.passes.boundaries.stage_cuts`) are cut so that the longest stage is as
short as can be by the cost model, and among such cuts few bytes cross: with a heavy head the last stage has
fewer layers. Glue that several stages need is then sent or computed again, whichever is cheaper, by the
minimum cut that also settles boundaries of sections. Ranks of a section are ordered (dp, pp, tp).

A stage may hold `in_flight` micro-batches between forward and backward: twice as many as there are stages,
which keeps ragged micro-batches from waiting for each other, or what memory allows, but no fewer than 1F1B
has. Where the user asks for it (`backward=split`), stages whose backward others wait for compute their
parameters' gradients later, when nothing else is to be done.
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

from secc.alloc.problem.candidates import (
    Load,
    Workload,
    candidate,
    in_turn,
    on_rank,
    room,
    times_of,
    workload,
)
from secc.alloc.refine.in_flight_limits import size
from secc.cluster import GIB, Cluster, Device, parse
from secc.cost.model import roofline
from secc.cost.model.collectives import Span, of_ranks
from secc.cost.model.memory import Memory
from secc.cost.model.patterns_and_transfers import is_active, micro_batch, patterns
from secc.cost.model.section_cost import section_cost
from secc.errors import Impossible, UserError
from secc.ir.analysis.dataflow import number_of, strongest, text_of, with_gradient
from secc.ir.dialect.ops import CallOp, GraphOp, SectionOp, graph_of, section_of, set_section, strings, texts
from secc.ir.dialect.python_attributes import integer, integers, number
from secc.ir.dialect.readable_names import unique
from secc.passes.annotate_costs import annotate
from secc.passes.boundaries.boundary_min_cut import Prices
from secc.passes.boundaries.stage_cuts import Units, cut
from secc.passes.sections.assign_ops import modes, settle_mode
from secc.passes.sink_boundaries import settle
from secc.runtime.plan.expr_eval import evaluate

AHEAD = 2  # times as many micro-batches in flight as there are stages, where memory allows
ANY_CLUSTER = "1x8xH100"  # for IR that no allocation has been made for: only the ratios of times matter


@dataclass(frozen=True)
class SplitStages(ModulePass):
    name = "split-stages"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        wanted = [s for s in graph.sections if (number_of(s, "pp") or 1) > 1]
        cluster = _cluster(graph)
        stages = [
            stage
            for section in wanted
            for stage in _split(graph, section, cluster.seen_by(_ranks(section)).device)
        ]
        if stages:
            _note_costs(graph, stages, cluster)


def _cluster(graph: GraphOp) -> Cluster:
    return Cluster.from_dict(json.loads(text_of(graph, "cluster") or "{}")) or parse(ANY_CLUSTER)


def _split(graph: GraphOp, section: SectionOp, device: Device) -> list[SectionOp]:
    """Put the stages of a section in its place. Raises UserError if it cannot be cut into so many."""
    parts, units = int(number_of(section, "pp") or 1), Units(graph, section.sym.data)
    if parts > len(units.layers):
        raise _refused(section, parts, _whole(units), most=len(units.layers))
    ends = cut(_times(graph, section, units, device), units.cuts, parts)
    if ends is None:
        reason, where = next(iter(units.impossible.values()), ("it has too few places to cut", ""))
        raise _refused(section, parts, reason, where)
    stages = _declare(graph, section, parts)
    for op, unit in units.of.items():
        set_section(op, stages[bisect_left(ends, unit)].sym.data)
    _own(graph, section, stages)
    for j, dst in enumerate(stages):
        for src in stages[:j]:
            settle(graph, src.sym.data, dst.sym.data, Prices(growth=0.0))
    for stage in stages:
        settle_mode(graph, stage)
    section.detach()
    section.erase()
    return stages


def _whole(units: Units) -> str:
    blocks = list(dict.fromkeys(path for path, *_ in units.calls))
    if len(units.layers) == len(units.calls) and len(blocks) < 4:
        return (
            f"it calls {' and '.join(blocks)} whole, and there is nothing to cut between"
            if blocks
            else "it has no blocks"
        )
    return f"it has {len(units.layers)} layers"


def _refused(section: SectionOp, parts: int, reason: str, where: str = "", most: int = 1) -> UserError:
    name = section.sym.data
    remedy = f"set {name}.pp to at most {most}" if most > 1 else f"leave out {name}.pp"
    error = UserError(f"section {name!r} cannot be cut into {parts} stages: {reason}", where, remedy)
    return Impossible(error, [f"{name}.pp={parts}" if most > 1 else f"{name}.pp"])


def _times(graph: GraphOp, section: SectionOp, units: Units, device: Device) -> list[int]:
    """Forward and backward ns of each unit for a micro-batch, in the mean over the dataset's patterns."""
    name, samples, recompute = (
        section.sym.data,
        int(number_of(section, "micro_batch") or 1),
        text_of(section, "recompute") or "none",
    )
    seen = [p for p in patterns(graph) if is_active(section, p)]
    members: dict[int, list[Operation]] = {}
    for op, unit in units.of.items():
        members.setdefault(unit, []).append(op)
    wanted = set[SSAValue]().union(*map(with_gradient, graph.cases))
    found: list[int] = []
    for unit, (path, *_) in enumerate(units.calls):
        part = SectionOp.create(properties={"sym": StringAttr(f"{name} {unit}"), "blocks": texts([path])})
        for op in members[unit]:
            set_section(op, part.sym.data)
        mode = strongest(modes(members[unit], wanted))
        part.mode = StringAttr(mode)
        cost = section_cost(graph, part)
        text = f"{roofline.forward_ns(cost, device)} + {roofline.backward_ns(cost, mode, device, recompute)}"
        found.append(sum(round(p.share * evaluate(text, micro_batch(graph, p.sizes, samples))) for p in seen))
    return found


def _declare(graph: GraphOp, section: SectionOp, parts: int) -> list[SectionOp]:
    """The stages before their section, each with its ranks."""
    name, taken = section.sym.data, [s.sym.data for s in graph.sections]
    ranks = [int(r.value.data) for r in section.attributes["ranks"]] if "ranks" in section.attributes else []  # pyright: ignore
    tp = int(number_of(section, "tp") or 1)
    stages: list[SectionOp] = []
    for i in range(parts):
        taken.append(unique(f"{name}_{i}", taken))
        properties = {**section.properties, "sym": StringAttr(taken[-1])}
        own = [r for k, r in enumerate(ranks) if k // tp % parts == i]
        attributes = section.attributes | {
            "pipeline": StringAttr(name),
            "stage": integer(i),
            "pp": integer(1),
            "ranks": integers(own),
        }
        stages.append(SectionOp.create(properties=properties, attributes=attributes))
        graph.body.block.insert_op_before(stages[-1], section)
    return stages


def _own(graph: GraphOp, section: SectionOp, stages: Sequence[SectionOp]) -> None:
    """Give each stage the blocks that it calls, in the section's order; the first one keeps those that
    nothing calls."""
    calls: dict[str, set[str]] = {}
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                calls.setdefault(section_of(op) or "", set()).add(op.target.data)
    idle = set(strings(section.blocks)).difference(*calls.values())
    for i, stage in enumerate(stages):
        held = calls.get(stage.sym.data, set()) | (idle if i == 0 else set[str]())
        stage.blocks = texts(b for b in strings(section.blocks) if b in held)


# -- what a stage costs
# ----------------------------------------------------------------------------------------------------------------


def _note_costs(graph: GraphOp, stages: Sequence[SectionOp], cluster: Cluster) -> None:
    """Write each stage's cost, times, room in flight and memory, as `allocate` writes a section's."""
    work = workload(graph, cluster, int(number_of(graph, "global_batch") or 1))
    counts: dict[str, int] = {}
    for stage in stages:
        counts[text_of(stage, "pipeline") or ""] = counts.get(text_of(stage, "pipeline") or "", 0) + 1
    for stage in stages:
        load = _rank(work, stage)
        if load.mode == "forward":
            stage.attributes["recompute"] = StringAttr("none")
        if not load.cost.trainable and text_of(stage, "sharding") != "zero3":
            stage.attributes["sharding"] = StringAttr("none")
        recompute = text_of(stage, "recompute") or "none"
        annotate(stage, replace(work.loads[load.name].cost, saved=load.under(recompute).saved))
        dp, _, sharding, _ = _choice(stage)
        forward_ns, backward_ns = times_of(work, load, dp, sharding, recompute, _span(stage, cluster))
        in_flight = _in_flight(work, load, counts[text_of(stage, "pipeline") or ""])
        stage.attributes |= {
            "weight_permille": integer(_weight_permille(work, load)),
            "in_flight": integer(in_flight if load.mode != "forward" else 0),
            "label": StringAttr(load.label),
            "forward_ns": StringAttr(forward_ns),
            "backward_ns": StringAttr(backward_ns),
        }
    for stage in stages:
        held = [s for s in graph.sections if set(_ranks(s)) & set(_ranks(stage))] or [stage]
        memory = sum(_memory(work, _rank(work, s)) for s in held)
        stage.attributes["memory_gib"] = number(round(memory / GIB, 4))
        stage.attributes["room_bytes"] = integer(_room_bytes(work, _rank(work, stage), memory, len(held)))


def _weight_permille(work: Workload, load: Load) -> int:
    """The share of a split backward that comes later: parameters' gradients, where others wait for the
    rest."""
    cost, awaited = (
        load.cost,
        any(c.dst == load.name and c.grad and work.loads[c.src].mode != "forward" for c in work.crossings),
    )
    if text_of(load.section, "backward") != "split" or load.mode != "train" or not awaited or not cost.params:
        return 0
    return 1000 * cost.trainable // (cost.params + cost.trainable)


def _rank(work: Workload, section: SectionOp) -> Load:
    """A section's load on one of its ranks."""
    tp, pp = int(number_of(section, "tp") or 1), int(number_of(section, "pp") or 1)
    return on_rank(work.loads[section.sym.data], tp, pp, work.cluster.seen_by(_ranks(section)))


def _span(stage: SectionOp, cluster: Cluster) -> Span | None:
    """Where a stage's ranks are that sum gradients and gather parameters together, the widest place of tp;
    None before there are ranks."""
    ranks, tp = _ranks(stage), int(number_of(stage, "tp") or 1)
    return (
        max((of_ranks(ranks[place::tp], cluster) for place in range(tp)), key=lambda span: span.nodes)
        if ranks
        else None
    )


def _ranks(section: SectionOp) -> list[int]:
    found = section.attributes.get("ranks")
    return [int(r.value.data) for r in found] if found is not None else []  # pyright: ignore


def _choice(section: SectionOp) -> tuple[int, int, str, str]:
    dp, size = (int(number_of(section, key) or 1) for key in ("dp", "micro_batch"))
    return dp, size, text_of(section, "sharding") or "none", text_of(section, "recompute") or "none"


def _in_flight(work: Workload, load: Load, parts: int) -> int:
    """How many micro-batches a stage may hold: as many as help and memory allows, at least one for itself and
    each stage behind it.

    A pipeline that feeds sections on other ranks was given a number by `allocate`.
    """
    if given := int(number_of(load.section, "in_flight") or 0):
        return given
    least, most = parts - int(number_of(load.section, "stage") or 0), AHEAD * parts
    (_, rank), device = _held(work, load), work.cluster.seen_by(_ranks(load.section)).device
    return next((n for n in range(most, least, -1) if rank.total(n) <= device.usable), least)


def _memory(work: Workload, load: Load) -> int:
    """Bytes of a section on a rank, with what it may hold in flight."""
    held, rank = _held(work, load)
    return rank.total(held)


def _room_bytes(work: Workload, load: Load, memory: int, holders: int) -> int:
    """What the micro-batches of a stage may keep, on a rank whose sections need `memory` together."""
    if load.mode == "forward":
        return 0
    own = replace(work, cluster=work.cluster.seen_by(_ranks(load.section)))
    held, rank = _held(work, load)
    return size(own, rank, held, memory - rank.total(held), holders)


def _held(work: Workload, load: Load) -> tuple[int, Memory]:
    """Micro-batches that a section holds on a rank at once, and the rank's memory."""
    count = candidate(work, load, *_choice(load.section)).micro_batches
    held = int(number_of(load.section, "in_flight") or 0)
    return min(held, count) if held else in_turn(work, load, count), room(
        work, load, *_choice(load.section), count
    )
