"""`place`: puts the ranks that `allocate` counted out onto nodes, so that what exchanges most is near.

A replica's tensor parallelism stays inside a node; which group of sections takes which devices, and whether a
pipeline's replicas or its stages are neighbours, is searched (`secc.alloc.placement.rank_placement`).
Sections on the same ranks keep the same ranks. What the placement costs stands in the graph's prediction; on
one node there is nothing to place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.alloc.placement.rank_placement import Chain, Cost, Flow, Group, Places, Sum, cost, in_a_row, search
from secc.alloc.problem.candidates import Load, Workload, on_rank, workload
from secc.cluster import Cluster
from secc.cost.model.patterns_and_transfers import micro_batch
from secc.ir.analysis.dataflow import number_of, text_of
from secc.ir.dialect.ops import GraphOp, SectionOp, graph_of
from secc.ir.dialect.python_attributes import integers
from secc.runtime.plan.expr_eval import evaluate

PLACEMENT = "placement"  # the entry of a prediction


@dataclass(frozen=True)
class Place(ModulePass):
    name = "place"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        cluster = Cluster.from_dict(json.loads(text_of(graph, "cluster") or "{}"))
        if cluster is None or int(number_of(graph, "world_size") or 1) <= cluster.per_node:
            return
        work = workload(graph, cluster, int(number_of(graph, "global_batch") or 1))
        sections = {s.sym.data: s for s in graph.sections}
        groups = _groups(sections)
        problem = _problem(work, sections, groups)
        before = cost(problem, in_a_row(problem, [g.name for g in problem.groups], frozenset()))
        placed, after = search(problem)
        for name, section in sections.items():
            section.attributes["ranks"] = integers(placed[groups[name]])
        _note(graph, cluster, before, after)


def _groups(sections: Mapping[str, SectionOp]) -> dict[str, str]:
    """The group of each section: the first section on the same ranks."""
    first: dict[tuple[int, ...], str] = {}
    return {name: first.setdefault(ranks_of(section), name) for name, section in sections.items()}


def ranks_of(section: SectionOp) -> tuple[int, ...]:
    """The ranks that `allocate` gave a section, () before it."""
    found = section.attributes.get("ranks")
    return tuple(int(r.value.data) for r in found) if found is not None else ()  # pyright: ignore


def _mesh(section: SectionOp, key: str) -> int:
    return int(number_of(section, key) or 1)


def _problem(work: Workload, sections: Mapping[str, SectionOp], group: Mapping[str, str]) -> Places:
    members: dict[str, list[SectionOp]] = {}
    for name in sorted(sections, key=lambda n: ranks_of(sections[n])):
        members.setdefault(group[name], []).append(sections[name])
    return Places(
        work.cluster,
        tuple(_group(work.cluster, name, found) for name, found in members.items()),
        tuple(
            _sum(work, load, sections[name], group[name])
            for name, load in work.loads.items()
            if load.mode == "train"
        ),
        tuple(_flows(work, group)),
        tuple(
            _chain(work, load, sections[name], group[name])
            for name, load in work.loads.items()
            if _mesh(sections[name], "pp") > 1
        ),
    )


def _group(cluster: Cluster, name: str, sections: list[SectionOp]) -> Group:
    """Stages may be outside where nothing else has the same ranks, whose order a section with other replicas
    would not want."""
    unit = max(_mesh(s, "tp") for s in sections)
    ranks = ranks_of(sections[0])
    return Group(
        name,
        len(ranks) // unit,
        unit,
        _mesh(sections[0], "pp") if len(sections) == 1 else 1,
        _nodes(cluster, ranks),
    )


def _nodes(cluster: Cluster, ranks: tuple[int, ...]) -> range:
    """The nodes of the kind of device that these ranks are."""
    first = 0
    for part in cluster.parts:
        if all(first <= r // cluster.per_node < first + part.nodes for r in ranks):
            return range(first, first + part.nodes)
        first += part.nodes
    return range(0)


def _sum(work: Workload, load: Load, section: SectionOp, group: str) -> Sum:
    tp, pp = _mesh(section, "tp"), _mesh(section, "pp")
    size = on_rank(load, tp, pp, work.cluster).cost.wide_bytes
    return Sum(group, size, pp, tp, sharded=(text_of(section, "sharding") or "none") != "none")


def _flows(work: Workload, group: Mapping[str, str]) -> list[Flow]:
    found: list[Flow] = []
    for c in work.crossings:
        back = c.grad and work.loads[c.src].mode != "forward" and work.loads[c.dst].mode != "forward"
        size = _of_step(work, work.loads[c.src], c.size)
        if group[c.src] != group[c.dst]:
            found.append(Flow(group[c.src], group[c.dst], size, size if back else 0))
    return found


def _chain(work: Workload, load: Load, section: SectionOp, group: str) -> Chain:
    """What enters a layer travels from one stage to the next."""
    size = _of_step(work, load, load.cost.summed) // max(1, load.cost.layers)
    return Chain(
        group, _mesh(section, "pp"), _mesh(section, "tp"), size, size if load.mode != "forward" else 0
    )


def _of_step(work: Workload, load: Load, size: str) -> int:
    """What a text about a micro-batch is for all samples of a step."""
    return sum(
        evaluate(size, micro_batch(work.graph, p.sizes, ceil(work.global_batch * p.share)))
        for p in load.active
    )


def _note(graph: GraphOp, cluster: Cluster, before: Cost, after: Cost) -> None:
    prediction = json.loads(text_of(graph, "prediction") or "{}")
    nodes = -(-int(number_of(graph, "world_size") or 1) // cluster.per_node)
    prediction[PLACEMENT] = {"nodes": nodes, **_figures(after), "in_a_row": _figures(before)}
    graph.attributes["prediction"] = StringAttr(json.dumps(prediction))


def _figures(found: Cost) -> dict[str, float]:
    return {
        "bytes_between_nodes": found.between,
        "bytes_inside_nodes": found.inside,
        "gradient_sums_s": found.sums_ns / 10**9,
        "communication_s": found.time_ns / 10**9,
    }
