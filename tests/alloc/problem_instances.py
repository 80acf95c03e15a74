"""Random small allocation problems, and the best assignment by trying all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from secc.alloc.problem.closed_form import PlanValue, evaluate_assignment
from secc.alloc.problem.types import (
    ALL_KINDS,
    STRATEGIES,
    AllocEdge,
    Assignment,
    Candidate,
    DevicePool,
    Problem,
)

MIB = 1 << 20


@st.composite
def section_candidates(draw: st.DrawFn, ranks: int) -> tuple[Candidate, ...]:
    """Two to four candidates; a replica more never takes longer, as in real tables, but memory and waits are
    free. Some have experts in parts, over the ranks of a replica or over all replicas; some sections are
    frozen, and stand idle for a part of the step unless they run ahead."""
    frozen = draw(st.booleans())
    number = st.integers(0, 40)
    memory = st.integers(0, 12).map(lambda n: n * MIB)
    return tuple(
        Candidate(
            dp=(dp := draw(st.integers(1, ranks))),
            micro_batch=draw(st.sampled_from([1, 2, 4])),
            tp=(tp := draw(st.sampled_from([1, 1, 2]))),
            ep=draw(st.sampled_from([1, 1, tp, tp * dp])),
            pp=draw(st.sampled_from([1, 1, 2])),
            time_ns=(time_ns := draw(st.integers(1, 100))),
            idle_ns=draw(st.integers(0, time_ns - 1)) if frozen else 0,
            runs_ahead=frozen and draw(st.booleans()),
            fill_ns=draw(number),
            drain_ns=draw(number),
            micro_batches=draw(st.integers(1, 4)),
            memory=(own := draw(memory)),
            memory_ahead=own + draw(memory),
            rounds=draw(st.integers(1, 3)),
            host_memory=draw(st.sampled_from([0, 0, 4 * MIB, 7 * MIB])),
        )
        for _ in range(draw(st.integers(2, 4)))
    )


@st.composite
def problem_edges(
    draw: st.DrawFn, src: str, dst: str, sections: dict[str, tuple[Candidate, ...]]
) -> AllocEdge:
    def times(section: str, scale: int = 1) -> tuple[int, ...]:
        return tuple(draw(st.integers(0, 40)) * scale for _ in sections[section])

    return AllocEdge(
        src, dst, times(src, MIB), times(dst, MIB), times(src), times(src), times(dst), times(dst), times(dst)
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """One to three sections on one to five ranks, edges going forward."""
    ranks = draw(st.integers(1, 5))
    names = "abc"[: draw(st.integers(1, 3))]
    sections = {name: draw(section_candidates(ranks)) for name in names}
    pairs = [(u, s) for i, u in enumerate(names) for s in names[i + 1 :] if draw(st.booleans())]
    return Problem(
        sections,
        tuple(draw(problem_edges(u, s, sections)) for u, s in pairs),
        ranks,
        capacity=draw(st.integers(4, 40)) * MIB,
        strategy=draw(st.sampled_from(("auto", *STRATEGIES))),
        together=tuple(draw(st.lists(st.sampled_from(pairs), max_size=1))) if pairs else (),
        per_node=draw(st.integers(1, 3)),
        host_capacity=draw(st.sampled_from([4, 10, 30])) * MIB,
    )


def assignments(problem: Problem) -> Iterator[Assignment]:
    """Every choice of candidates in every grouping, legal or not."""
    names = list(problem.sections)
    for choice in product(*(range(len(c)) for c in problem.sections.values())):
        for group in product(*(names[: i + 1] for i in range(len(names)))):
            if all(group[names.index(g)] == g for g in group):
                yield Assignment(dict(zip(names, choice, strict=True)), dict(zip(names, group, strict=True)))


def feasible_values(problem: Problem) -> Iterator[PlanValue]:
    """The values of all legal assignments."""
    for assignment in assignments(problem):
        try:
            yield evaluate_assignment(problem, assignment)
        except ValueError:
            continue


@st.composite
def mixed_problems(draw: st.DrawFn) -> Problem:
    """A problem whose ranks are of two kinds; some candidates run on one of them, some on all ranks."""
    found = draw(problems())
    per_node = draw(st.integers(1, 2))
    pools = tuple(
        DevicePool(per_node * draw(st.integers(1, 2)), draw(st.integers(4, 40)) * MIB) for _ in range(2)
    )
    ranks = sum(p.ranks for p in pools)

    def on_a_kind(c: Candidate) -> Candidate:
        kind = draw(st.sampled_from([0, 1, 0, 1, ALL_KINDS]))
        return replace(c, kind=kind, **({"dp": ranks, "tp": 1, "pp": 1} if kind == ALL_KINDS else {}))

    sections = {s: tuple(map(on_a_kind, cs)) for s, cs in found.sections.items()}
    capacity = max(p.capacity for p in pools)
    return replace(
        found,
        sections=sections,
        ranks=ranks,
        capacity=capacity,
        pools=pools,
        per_node=per_node,
        strategy="auto",
    )
