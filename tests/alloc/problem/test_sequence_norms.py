"""How norms of a section under tp work: the faster way, or on parts of sequences if memory needs it."""

from __future__ import annotations

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.sequence_norms import list_norms
from secc.alloc.problem.types import Candidate, ReplicaShape
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.cluster import parse_cluster
from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from tests.alloc.problem.test_row_parts import GRAPH

TP_8 = ReplicaShape(tp=8)


def build_sequence_workload(length: int, moved: int, cluster: str = "1x8xH100", layers: int = 1) -> Workload:
    """A decoder that keeps 2 MB for each token of samples of one length, and moves `moved` bytes for each."""
    text = GRAPH.format(mean=length).replace('"1000000*B*S"', f'"{moved}*B*S"')
    text = text.replace(" layers 1 {", f" layers {layers} {{")
    text = text.replace(" bytes = 4", " tp = [2 : i64, 4 : i64, 8 : i64], bytes = 4", 1)
    graph = graph_of(parse_module(text))
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(
        ["B", "S"], [(frozenset[str](), {"B": 1, "S": length})]
    )
    return build_workload(graph, parse_cluster(cluster), 8)


def norms_of_shape(
    work: Workload, shape: ReplicaShape = TP_8, *pins: str, refused: str = ""
) -> tuple[str, ...]:
    parsed = parse_pins([f"lm.{pin}" for pin in pins], ["lm"], [refused] if refused else [])
    return list_norms(work, work.loads["lm"], shape, parsed)


def solve(work: Workload, refused: str = "") -> Candidate | None:
    """The best plan with tp=8 and without cp, None if nothing fits."""
    pins = parse_pins(["lm.tp=8", "lm.cp=1", "lm.dp=1"], ["lm"], [refused] if refused else [])
    problem = build_problem(work, 8, "auto", pins)
    solution = solve_allocation(problem)
    return None if solution is None else problem.sections["lm"][solution.assignment.choice["lm"]]


def test_the_faster_way_comes_first() -> None:
    assert norms_of_shape(build_sequence_workload(2048, 0)) == (
        "whole",
        "sequence",
    )  # a quarter more is exchanged
    assert norms_of_shape(build_sequence_workload(2048, 10**8)) == (
        "sequence",
    )  # a part of the traffic of norms
    assert solve(build_sequence_workload(2048, 0)).norms == "whole"  # pyright: ignore[reportOptionalMemberAccess]
    assert solve(build_sequence_workload(2048, 10**8)).norms == "sequence"  # pyright: ignore[reportOptionalMemberAccess]


def test_ranks_of_tp_may_divide_the_rows_of_a_rank_of_cp() -> None:
    shape = ReplicaShape(tp=4, cp=2)
    assert norms_of_shape(build_sequence_workload(2048, 0), shape) == ("whole", "sequence")
    assert norms_of_shape(build_sequence_workload(2048, 10**8), shape) == ("sequence",)


def test_parts_of_the_sequence_are_taken_where_memory_needs_them() -> None:
    """150,000 tokens keep 300 GB: a rank 38% of it with whole sequences, 23% with parts."""
    work = build_sequence_workload(150_000, 0)
    found = solve(work)
    assert found is not None and found.norms == "sequence"
    assert solve(work, refused="lm.norms=sequence") is None


def test_stages_come_in_both_forms() -> None:
    """The form with less memory is slower here, so it counts only for stages."""
    work = build_sequence_workload(8192, 0, layers=8)
    problem = build_problem(work, 8, "auto", parse_pins(["lm.tp=2", "lm.cp=1"], ["lm"], []))
    forms: dict[tuple[object, ...], set[str]] = {}
    for c in problem.sections["lm"]:
        choices = c.dp, c.micro_batch, c.recompute, c.sharding, c.backward_parts
        forms.setdefault((c.pp > 1, *choices), set()).add(c.norms)
    assert {key[0] for key, norms in forms.items() if len(norms) == 2} == {True}


@pytest.mark.parametrize(
    ("shape", "cluster"),
    [(ReplicaShape(tp=1), "1x8xH100"), (ReplicaShape(cp=8), "1x8xH100"), (TP_8, "1x8xcpu")],
    ids=["one rank", "cp", "CPUs"],
)
def test_whole_sequences_are_the_only_way(shape: ReplicaShape, cluster: str) -> None:
    assert norms_of_shape(build_sequence_workload(2048, 10**8, cluster), shape) == ("whole",)


def test_pins_and_refusals_leave_one_way() -> None:
    work = build_sequence_workload(2048, 10**8)
    assert norms_of_shape(work, TP_8, "tp=8", "norms=sequence") == ("sequence",)
    assert norms_of_shape(work, TP_8, "norms=whole") == ("whole",)
    assert norms_of_shape(work, TP_8, refused="lm.norms=sequence") == ("whole",)
