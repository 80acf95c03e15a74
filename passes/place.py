"""`place`: maps the ranks that `allocate` assigned onto nodes, so that ranks that exchange much data are
close.

Tensor parallelism of a replica stays inside a node, and replicas that share experts are put on as few nodes
as possible. Which devices each group of sections takes, and whether replicas or stages of a pipeline are
neighbours, is searched (`secc.alloc.placement.rank_placement`). Sections that share ranks keep sharing them.
The graph's prediction has the cost of the placement; on one node nothing is placed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.alloc.placement.rank_placement import (
    EdgeTraffic,
    ExpertTraffic,
    GradientSum,
    PipelineTraffic,
    PlacementCost,
    PlacementGroup,
    PlacementProblem,
    place_consecutively,
    placement_cost,
    search_placement,
)
from secc.alloc.problem.section_load import SectionLoad, compute_rank_load
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload, build_workload
from secc.cluster import Cluster
from secc.cost.model.patterns_and_transfers import micro_batch_sizes
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.dialect.ops import GraphOp, SectionOp, graph_of
from secc.ir.dialect.python_attributes import int_list_attr
from secc.runtime.plan.expr_eval import evaluate_expr

PLACEMENT_KEY = "placement"  # the entry of a prediction


@dataclass(frozen=True)
class Place(ModulePass):
    name = "place"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        cluster = Cluster.from_dict(json.loads(get_string(graph, "cluster") or "{}"))
        if cluster is None or int(get_number(graph, "world_size") or 1) <= cluster.per_node:
            return
        work = build_workload(graph, cluster, int(get_number(graph, "global_batch") or 1))
        sections = {s.sym.data: s for s in graph.sections}
        groups = _group_sections(sections)
        problem = _build_problem(work, sections, groups)
        before = placement_cost(
            problem, place_consecutively(problem, [g.name for g in problem.groups], frozenset())
        )
        placed, after = search_placement(problem)
        for name, section in sections.items():
            section.attributes["ranks"] = int_list_attr(placed[groups[name]])
        _write_prediction(graph, cluster, before, after)


def _group_sections(sections: Mapping[str, SectionOp]) -> dict[str, str]:
    """The group of each section: the first section on the same ranks."""
    first: dict[tuple[int, ...], str] = {}
    return {name: first.setdefault(section_ranks(section), name) for name, section in sections.items()}


def section_ranks(section: SectionOp) -> tuple[int, ...]:
    """The ranks that `allocate` gave a section, () before it ran."""
    found = section.attributes.get("ranks")
    return tuple(int(r.value.data) for r in found) if found is not None else ()  # pyright: ignore


def _mesh_size(section: SectionOp, key: str) -> int:
    return int(get_number(section, key) or 1)


def _build_problem(
    work: Workload, sections: Mapping[str, SectionOp], group: Mapping[str, str]
) -> PlacementProblem:
    members: dict[str, list[SectionOp]] = {}
    for name in sorted(sections, key=lambda n: section_ranks(sections[n])):
        members.setdefault(group[name], []).append(sections[name])
    return PlacementProblem(
        work.cluster,
        tuple(_make_group(work.cluster, name, found) for name, found in members.items()),
        tuple(
            _gradient_sum(work, load, sections[name], group[name])
            for name, load in work.loads.items()
            if load.mode == "train"
        ),
        tuple(_find_flows(work, group)),
        tuple(
            _pipeline_chain(work, load, sections[name], group[name])
            for name, load in work.loads.items()
            if _mesh_size(sections[name], "pp") > 1
        ),
        tuple(
            _expert_traffic(work, load, sections[name], group[name])
            for name, load in work.loads.items()
            if _mesh_size(sections[name], "ep") > _mesh_size(sections[name], "tp")
        ),
    )


def _make_group(cluster: Cluster, name: str, sections: list[SectionOp]) -> PlacementGroup:
    """Describes the group of `sections`, which share their ranks, to the placement. Stages may be the outer
    axis only if no other group has these ranks: a section with other replicas needs another order of them."""
    unit = max(_mesh_size(s, "tp") * _mesh_size(s, "cp") for s in sections)
    ranks = section_ranks(sections[0])
    return PlacementGroup(
        name,
        len(ranks) // unit,
        unit,
        _mesh_size(sections[0], "pp") if len(sections) == 1 else 1,
        _nodes_of_kind(cluster, ranks),
    )


def _nodes_of_kind(cluster: Cluster, ranks: tuple[int, ...]) -> range:
    """The nodes of the kind of device that these ranks are."""
    first = 0
    for part in cluster.parts_by_kind:
        if all(first <= r // cluster.per_node < first + part.nodes for r in ranks):
            return range(first, first + part.nodes)
        first += part.nodes
    return range(0)


def _gradient_sum(work: Workload, load: SectionLoad, section: SectionOp, group: str) -> GradientSum:
    shape = _replica_shape(section)
    size = compute_rank_load(load, shape, work.cluster).cost.gradient_sum_bytes
    sharded = (get_string(section, "sharding") or "none") != "none"
    return GradientSum(group, size, shape.pp, shape.tp, sharded, shape.cp)


def _replica_shape(section: SectionOp) -> ReplicaShape:
    tp, pp, cp, ep = (_mesh_size(section, key) for key in ("tp", "pp", "cp", "ep"))
    return ReplicaShape(tp, pp, cp, ep)


def _find_flows(work: Workload, group: Mapping[str, str]) -> list[EdgeTraffic]:
    found: list[EdgeTraffic] = []
    for c in work.crossings:
        back = c.grad and work.loads[c.src].mode != "forward" and work.loads[c.dst].mode != "forward"
        size = _step_total(work, work.loads[c.src], c.size)
        if group[c.src] != group[c.dst]:
            found.append(EdgeTraffic(group[c.src], group[c.dst], size, size if back else 0))
    return found


def _pipeline_chain(work: Workload, load: SectionLoad, section: SectionOp, group: str) -> PipelineTraffic:
    """Traffic between neighbouring stages: the input of a layer, and its gradient."""
    size = _step_total(work, load, load.cost.layer_input_bytes) // max(1, load.cost.layers)
    size *= _mesh_size(section, "chunks")  # each passes all ranks
    return PipelineTraffic(
        group,
        _mesh_size(section, "pp"),
        _mesh_size(section, "tp") * _mesh_size(section, "cp"),
        size,
        size if load.mode != "forward" else 0,
    )


def _expert_traffic(work: Workload, load: SectionLoad, section: SectionOp, group: str) -> ExpertTraffic:
    """Traffic among the replicas that share experts: rows to experts and back, in forward and backward."""
    shape = _replica_shape(section)
    rank = compute_rank_load(load, shape, work.cluster)
    passes = 2 if load.mode == "forward" else 4
    size = passes * _step_total(work, load, rank.cost.routed_bytes) // _mesh_size(section, "dp")
    return ExpertTraffic(group, shape.pp, shape.tp * shape.cp, shape.ep // shape.tp, size)


def _step_total(work: Workload, load: SectionLoad, size: str) -> int:
    """The value of an expression over a micro-batch's sizes, summed over all samples of a step."""
    return sum(
        evaluate_expr(size, micro_batch_sizes(work.graph, p.sizes, ceil(work.global_batch * p.share)))
        for p in load.active_patterns
    )


def _write_prediction(graph: GraphOp, cluster: Cluster, before: PlacementCost, after: PlacementCost) -> None:
    prediction = json.loads(get_string(graph, "prediction") or "{}")
    nodes = -(-int(get_number(graph, "world_size") or 1) // cluster.per_node)
    prediction[PLACEMENT_KEY] = {
        "nodes": nodes,
        **_placement_figures(after),
        "in_a_row": _placement_figures(before),
    }
    graph.attributes["prediction"] = StringAttr(json.dumps(prediction))


def _placement_figures(found: PlacementCost) -> dict[str, float]:
    return {
        "bytes_between_nodes": found.between,
        "bytes_inside_nodes": found.inside,
        "gradient_sums_s": found.sums_ns / 10**9,
        "communication_s": found.time_ns / 10**9,
    }
