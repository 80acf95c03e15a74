"""Small hand-made plans and random ones (hypothesis strategies) for tests of the scheduler and the checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from secc.runtime.plan.schema import (
    PLAN_VERSION,
    Cost,
    Edge,
    Mesh,
    ModelRef,
    Plan,
    Section,
    SubgroupCost,
    Symbol,
)
from secc.runtime.plan.step_program import SampleMeta, owes_backward

SYMBOLS = (Symbol("B", "rows", "ids", 0), Symbol("S", "width", "ids", 1), Symbol("I", "rows", "images", 0))
KEYS = ("images", "audio")


def make_section(
    name: str,
    ranks: Iterable[int],
    *,
    when: Iterable[str] = (),
    mode: str = "train",
    micro_batch: int = 1,
    forward: str = "100*B",
    backward: str = "200*B",
    tp: int = 1,
    cp: int = 1,
    sharding: str = "none",
) -> Section:
    ranks = tuple(ranks)
    mesh = Mesh(ranks, len(ranks) // (tp * cp), 1, tp, cp)
    return Section(
        name,
        "",
        mode,
        tuple(when),
        (),
        (),
        mesh,
        micro_batch,
        sharding=sharding,
        cost=Cost(forward, backward),
    )


def make_stages(
    name: str, ranks: Sequence[Iterable[int]], *, in_flight: Sequence[int] = (), **options: Any
) -> list[Section]:
    """Returns the stages of a pipeline; `ranks` and `in_flight` have each stage's ranks and in-flight
    limit.
    """
    made = [make_section(f"{name}_{i}", r, **options) for i, r in enumerate(ranks)]
    room = in_flight or (0,) * len(made)
    return [
        dataclasses.replace(s, pipeline=name, stage=i, in_flight=n)
        for i, (s, n) in enumerate(zip(made, room, strict=True))
    ]


def stage_edges(pipeline: Sequence[Section], grad: bool = True) -> list[Edge]:
    """Returns the edges between a pipeline's stages."""
    return [
        Edge(f"{a.name}_out", a.name, b.name, "float32", ("B", "S", "8"), -1, "", grad)
        for a, b in pairwise(pipeline)
    ]


def make_edge(src: str, dst: str, *, grad: bool = True, name: str = "") -> Edge:
    return Edge(name or f"{src}_to_{dst}", src, dst, "float32", ("B", "8"), 0, "1", grad)


def make_plan(
    sections: Iterable[Section], edges: Iterable[Edge], world_size: int, widths: str = "own"
) -> Plan:
    return Plan(
        PLAN_VERSION,
        "",
        ModelRef("", ""),
        world_size,
        0,
        widths,
        SYMBOLS,
        (),
        tuple(sections),
        tuple(edges),
        (),
        (),
        {},
        {},
        {},
    )


def with_prefetch_memory_for(p: Plan, samples: int) -> Plan:
    """Returns the plan with prefetch memory on each rank for the results of `samples` samples on `make_edge`
    edges.
    """
    return dataclasses.replace(p, run_ahead_gib=samples * 32 / 2**30)


def make_sample(i: int, *keys: str, images: int = 1, length: int = 10) -> SampleMeta:
    return SampleMeta(i, frozenset(keys), {"B": 1, "S": length, "I": images if "images" in keys else 0})


cost_texts = st.sampled_from(["0", "7*B", "B*S", "5*I + 3*S", "max(B*S, 40)"])


def limit_bytes(section: Section, room: int, saved: str = "S", between: str = "") -> Section:
    """Returns the section with this expression for the bytes that a micro-batch saves, and `room` bytes for
    all of them (0: any number). between: what a split backward keeps in addition between its parts.
    """
    cost = dataclasses.replace(section.cost, saved=saved, kept_between=between)
    return dataclasses.replace(section, room_bytes=room, cost=cost)


@st.composite
def with_memory_bound(draw: st.DrawFn, section: Section) -> Section:
    """Draws a section with or without a limit on the bytes that its micro-batches save."""
    between = draw(st.sampled_from(["", "2*B"])) if section.weight_permille else ""
    return limit_bytes(section, draw(st.sampled_from([0, 0, 9, 40])), "3*B + 5*I", between)


@st.composite
def with_dealt_samples(draw: st.DrawFn, made: Sequence[Section]) -> list[Section]:
    """Draws whether the ranks of cp divide every sample of a section, or of its stages, or subgroups of them
    may compute different samples."""
    cp = made[0].mesh.cp
    if cp == 1 or draw(st.booleans()):
        return [*made]
    degrees = [n for n in range(1, cp) if cp % n == 0]
    chosen = draw(st.sampled_from([degrees, degrees[:1], degrees[-1:]]))
    found: list[Section] = []
    for section in made:
        subgroups = tuple(
            SubgroupCost(n, Cost(draw(cost_texts), draw(cost_texts), saved=f"10*B*S//{n}")) for n in chosen
        )
        limit = draw(st.sampled_from([0, 100, 300, 1 << 40]))
        changes: dict[str, Any] = {"subgroups": subgroups, "subgroup_bytes": limit}
        found.append(dataclasses.replace(section, cp_per="micro_batch", **changes))
    return found


def with_expert_parts(draw: st.DrawFn, made: Sequence[Section]) -> list[Section]:
    """Returns the stages of a section, some with experts divided among groups of replicas."""
    mesh = made[0].mesh
    together = draw(st.sampled_from([1, 1, *(n for n in range(2, mesh.dp + 1) if mesh.dp % n == 0)]))
    ep = mesh.tp * together if together > 1 else 1
    return [dataclasses.replace(s, mesh=dataclasses.replace(s.mesh, ep=ep)) for s in made]


@st.composite
def random_pipelines(draw: st.DrawFn, name: str, world: int) -> list[Section]:
    """Draws a section, or the stages of one on any ranks, as a list."""
    first = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    options: dict[str, Any] = {
        "when": draw(st.sampled_from([(), ("images",), ("audio",), KEYS])),
        "mode": draw(st.sampled_from(["train", "dgrad", "forward"])),
        "micro_batch": draw(st.integers(1, 3)),
        "sharding": draw(st.sampled_from(["none", "none", "zero3"])),
    }
    count = draw(st.sampled_from([1, 1, 2, 3]))
    if count == 1:
        options["tp"] = draw(st.sampled_from([n for n in range(1, len(first) + 1) if len(first) % n == 0]))
        left = len(first) // options["tp"]
        options["cp"] = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        made = make_section(name, first, **options, forward=draw(cost_texts), backward=draw(cost_texts))
        made = dataclasses.replace(made, in_flight=draw(st.integers(0, 3)))
        (made,) = draw(with_dealt_samples(with_expert_parts(draw, [made])))
        return [draw(with_memory_bound(made))]
    ranks = [first, *(draw(st.permutations(range(world)))[: len(first)] for _ in range(count - 1))]
    in_flight = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    options["cp"] = draw(st.sampled_from([n for n in range(1, len(first) + 1) if len(first) % n == 0]))
    made = make_stages(
        name, ranks, in_flight=in_flight, **options, forward=draw(cost_texts), backward=draw(cost_texts)
    )
    may_split = options["mode"] == "train" and options["sharding"] == "none" and options["cp"] == 1
    split = 500 if may_split and draw(st.booleans()) else 0
    parts = [draw(st.sampled_from([split, split, 0])) for _ in made]
    made = made if split else draw(with_dealt_samples(with_expert_parts(draw, made)))
    return [
        draw(with_memory_bound(dataclasses.replace(s, weight_permille=part)))
        for s, part in zip(made, parts, strict=True)
    ]


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Draws an acyclic graph of sections and pipelines with any meshes, modes, predicates, micro-batch sizes
    and costs.
    """
    world = draw(st.integers(1, 5))
    parts = [draw(random_pipelines(f"s{i}", world)) for i in range(draw(st.integers(1, 4)))]
    sections = [s for part in parts for s in part]
    whole = [e for part in parts for e in stage_edges(part, owes_backward(part[0]))]
    between = [
        (a, b) for i, part in enumerate(parts) for a in part for later in parts[i + 1 :] for b in later
    ]
    chosen = draw(st.lists(st.sampled_from(between), max_size=5)) if between else []
    edges = [
        make_edge(
            a.name, b.name, grad=owes_backward(a) and owes_backward(b) and draw(st.booleans()), name=f"e{i}"
        )
        for i, (a, b) in enumerate(chosen)
    ]
    return make_plan(
        draw(st.permutations(sections)), whole + edges, world, draw(st.sampled_from(["own", "global"]))
    )


random_batches = st.lists(
    st.tuples(st.sets(st.sampled_from(KEYS)), st.integers(1, 3), st.integers(1, 30)), max_size=9
).map(
    lambda rows: [make_sample(i, *keys, images=n, length=length) for i, (keys, n, length) in enumerate(rows)]
)
