"""The solver against brute force, and the value of an assignment against hand-made numbers."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import (
    AllocEdge,
    Assignment,
    Candidate,
    Problem,
    Solution,
    exclude_candidates,
)
from secc.alloc.solver import cpsat_model as model
from secc.alloc.solver import subproblem
from secc.alloc.solver.cpsat_model import solve_allocation, solve_least_memory, solve_least_time
from secc.alloc.solver.greedy_start import greedy_assignment
from tests.alloc import problem_instances

GIB = 1 << 30


@settings(max_examples=250, deadline=None)
@given(problem_instances.problems())
def test_solver_agrees_with_brute_force(problem: Problem) -> None:
    best = min(((v.time_ns, v.ranks) for v in problem_instances.feasible_values(problem)), default=None)
    solution = solve_allocation(problem)
    if solution is None or best is None:
        assert solution is None and best is None
        return
    assert (solution.time_ns, solution.ranks) == best
    assert (solution.status, solution.gap) == ("OPTIMAL", 0.0)


def test_a_frozen_pipeline_is_never_idle_on_ranks_of_its_own() -> None:
    """So the slower of two teachers is the faster one there, also within a deadline."""
    teacher = Candidate(dp=1, micro_batch=1, time_ns=100, idle_ns=30, runs_ahead=True, pp=2, micro_batches=4)
    flat = replace(teacher, time_ns=90, idle_ns=0)
    student = Candidate(dp=2, micro_batch=1, time_ns=80, micro_batches=4, in_flight=4)
    problem = Problem({"teacher": (teacher, flat), "student": (student,)}, (), ranks=4, capacity=GIB)
    choice = {"teacher": 0, "student": 0}
    apart = Assignment(choice, {"teacher": "teacher", "student": "student"})
    together = Assignment(choice, {"teacher": "teacher", "student": "teacher"})
    assert evaluate_assignment(problem, apart).time_ns == 80
    assert evaluate_assignment(problem, together).time_ns == 180
    for deadline in None, 80:
        found = solve_allocation(replace(problem, deadline=deadline))
        assert found is not None and (found.assignment, found.time_ns) == (apart, 80)
    idle = {"teacher": (replace(teacher, runs_ahead=False), flat), "student": (student,)}
    found = solve_allocation(replace(problem, sections=idle))
    assert found is not None and (found.assignment.choice["teacher"], found.time_ns) == (1, 90)


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(problem_instances.problems(), problem_instances.mixed_problems()),
    st.none() | st.integers(20, 200),
)
def test_pruning_of_large_problems_keeps_the_optimum(problem: Problem, deadline: int | None) -> None:
    asked = replace(problem, deadline=deadline)
    with patch.object(model, "WARM_START_CANDIDATES", 0):
        found, plain = solve_allocation(asked), solve_allocation(asked, margin=0.25)
    known, plainer = solve_allocation(asked), solve_allocation(asked, margin=0.25)
    assert _figures(found) == _figures(known)
    assert _figures(plain) == _figures(plainer)


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(problem_instances.problems(), problem_instances.mixed_problems()),
    st.integers(1, 4),
    st.sampled_from((0, 1 << 30)),
)
def test_excluded_candidates_are_not_chosen(problem: Problem, most: int, warm_start: int) -> None:
    """The rest is as if they did not exist, with and without a greedy start."""
    restricted = exclude_candidates(problem, lambda c: c.micro_batch > most)
    best: tuple[int, int] | None = None
    for a in problem_instances.assignments(problem):
        if all(problem.sections[s][i].micro_batch <= most for s, i in a.choice.items()):
            try:
                value = evaluate_assignment(problem, a)
            except ValueError:
                continue
            best = min(best or (value.time_ns, value.ranks), (value.time_ns, value.ranks))
    with patch.object(model, "WARM_START_CANDIDATES", warm_start):
        solution = solve_allocation(restricted)
    assert _figures(solution) == best
    if solution is not None:
        assert evaluate_assignment(problem, solution.assignment).time_ns == solution.time_ns


@settings(max_examples=60, deadline=None)
@given(st.one_of(problem_instances.problems(), problem_instances.mixed_problems()), st.integers(10, 200))
def test_pruning_keeps_every_assignment_within_the_bound(problem: Problem, most: int) -> None:
    left = subproblem.prune_by_step_time(problem, most)
    whole = [(v.time_ns, v.ranks) for v in problem_instances.feasible_values(problem)]
    found = (
        []
        if left is None
        else [(v.time_ns, v.ranks) for v in problem_instances.feasible_values(left.problem)]
    )
    assert sorted(v for v in found if v[0] <= most) == sorted(v for v in whole if v[0] <= most)
    if left is not None:
        for a in problem_instances.assignments(left.problem):
            for s, i in left.to_whole(a).choice.items():
                assert problem.sections[s][i] == left.problem.sections[s][a.choice[s]]


@settings(max_examples=60, deadline=None)
@given(st.one_of(problem_instances.problems(), problem_instances.mixed_problems()), st.integers(10, 400))
def test_greedy_assignments_are_within_the_bound(problem: Problem, most: int) -> None:
    if (found := greedy_assignment(problem, most)) is not None:
        assert evaluate_assignment(problem, found).time_ns <= most


def test_greedy_assignments_divide_the_ranks() -> None:
    """Twelve ranks for works of one to two: four and eight of them, apart; on the same ones memory is
    short."""
    few = [Candidate(n, 1, 1200 // n, memory=3 * GIB) for n in (2, 4, 8)]
    many = [Candidate(n, 1, 2400 // n, memory=3 * GIB) for n in (2, 4, 8)]
    problem = Problem({"a": tuple(few), "b": tuple(many)}, (), 12, 4 * GIB)
    assert greedy_assignment(problem, 10**6) == Assignment({"a": 1, "b": 2}, {"a": "a", "b": "b"})
    assert greedy_assignment(problem, 299) is None


def test_greedy_assignments_fill_whole_nodes() -> None:
    """The fewest ranks would be 1 + 4; with a node of 4 for each section all are whole."""

    def ways(work: int) -> tuple[Candidate, ...]:
        return tuple(Candidate(dp=n, micro_batch=1, time_ns=work // n) for n in (1, 2, 4))

    problem = Problem({"a": ways(100), "b": ways(400)}, (), 8, capacity=1, strategy="apart", per_node=4)
    assert greedy_assignment(problem, 10**6) == Assignment({"a": 2, "b": 2}, {"a": "a", "b": "b"})


def _figures(solution: Solution | None) -> tuple[int, int] | None:
    return None if solution is None else (solution.time_ns, solution.ranks)


@settings(max_examples=120, deadline=None)
@given(problem_instances.mixed_problems())
def test_solver_agrees_with_brute_force_on_mixed_devices(problem: Problem) -> None:
    best = min(((v.time_ns, v.ranks) for v in problem_instances.feasible_values(problem)), default=None)
    solution = solve_allocation(problem)
    assert best == (None if solution is None else (solution.time_ns, solution.ranks))


@settings(max_examples=120, deadline=None)
@given(problem_instances.problems(), st.integers(20, 200))
def test_fewest_ranks_for_a_deadline_agree_with_brute_force(problem: Problem, deadline: int) -> None:
    asked = replace(problem, deadline=deadline)
    best = min(((v.ranks, v.time_ns) for v in problem_instances.feasible_values(asked)), default=None)
    solution = solve_allocation(asked)
    if solution is None or best is None:
        assert solution is None and best is None
        least = solve_least_time(asked)
        fits = [v.time_ns for v in problem_instances.feasible_values(replace(asked, deadline=1 << 40))]
        assert least == min(fits, default=None) and (least is None or least > deadline)
        return
    assert (solution.ranks, solution.time_ns) == best
    assert (solution.status, solution.gap) == ("OPTIMAL", 0.0)


@settings(max_examples=60, deadline=None)
@given(problem_instances.problems())
def test_a_margin_allows_narrower_replicas_only(problem: Problem) -> None:
    fastest, plain = solve_allocation(problem), solve_allocation(problem, margin=0.25)
    if fastest is None or plain is None:
        assert plain is None and fastest is None
        return
    assert plain.time_ns <= 1.25 * fastest.time_ns and plain.gap <= 0.25
    widths = [
        sum(problem.sections[s][i].width for s, i in x.assignment.choice.items()) for x in (fastest, plain)
    ]
    assert widths[1] <= widths[0]


@settings(max_examples=60, deadline=None)
@given(problem_instances.problems())
def test_below_the_least_memory_nothing_fits(problem: Problem) -> None:
    need = solve_least_memory(problem)
    unlimited = replace(problem, capacity=1 << 40)
    assert (need is None) == (next(problem_instances.feasible_values(unlimited), None) is None)
    if need:
        assert solve_allocation(replace(problem, capacity=need)) is not None
        assert solve_allocation(replace(problem, capacity=need - (1 << 20))) is None


def _pair(**edge: int) -> Problem:
    """An encoder of 100 ns on one rank that feeds a model of 300 ns on one rank or 150 on two, with one
    edge."""
    values = (
        dict.fromkeys(
            (
                "sent_bytes",
                "returned_bytes",
                "latency_ns",
                "slack_ns",
                "independent_ns",
                "message_ns",
                "round_trip_ns",
            ),
            0,
        )
        | edge
    )
    counts = {
        "sent_bytes": 1,
        "latency_ns": 1,
        "slack_ns": 1,
        "returned_bytes": 2,
        "independent_ns": 2,
        "message_ns": 2,
        "round_trip_ns": 2,
    }
    encoder = (Candidate(dp=1, micro_batch=1, time_ns=100, memory=GIB, memory_ahead=3 * GIB),)
    model = (
        Candidate(dp=1, micro_batch=1, time_ns=300, memory=4 * GIB),
        Candidate(dp=2, micro_batch=1, time_ns=150, memory=4 * GIB),
    )
    sections = {"encoder": encoder, "model": model}
    return Problem(
        sections,
        (AllocEdge("encoder", "model", **{k: (v,) * counts[k] for k, v in values.items()}),),
        3,
        16 * GIB,
    )


APART = Assignment({"encoder": 0, "model": 1}, {"encoder": "encoder", "model": "model"})
SHARED = Assignment({"encoder": 0, "model": 0}, {"encoder": "encoder", "model": "encoder"})


def test_sharing_adds_times_and_memory() -> None:
    value = evaluate_assignment(_pair(latency_ns=1000), SHARED)
    assert (value.time_ns, value.ranks, value.memory) == (400, 1, {"encoder": 5 * GIB})


def test_apart_takes_the_longest_section_and_exposed_waits() -> None:
    assert (
        evaluate_assignment(_pair(latency_ns=30, independent_ns=40), APART).time_ns == 150
    )  # hidden behind work that needs no encoder
    assert evaluate_assignment(_pair(latency_ns=30, independent_ns=10), APART).time_ns == 170
    assert evaluate_assignment(_pair(latency_ns=30, independent_ns=40, message_ns=15), APART).time_ns == 155
    assert (
        evaluate_assignment(_pair(round_trip_ns=90, slack_ns=20), APART).time_ns == 170
    )  # the encoder waits for its last gradients


def test_apart_runs_ahead_and_holds_messages() -> None:
    assert evaluate_assignment(_pair(sent_bytes=GIB, returned_bytes=2 * GIB), APART).memory == {
        "encoder": 4 * GIB,
        "model": 6 * GIB,
    }


def test_a_deadline_frees_ranks() -> None:
    assert (solve_allocation(_pair()).ranks, solve_allocation(replace(_pair(), deadline=400)).ranks) == (3, 1)  # pyright: ignore[reportOptionalMemberAccess]
    assert solve_allocation(replace(_pair(), deadline=399)).ranks == 2  # pyright: ignore[reportOptionalMemberAccess]
    assert (
        solve_allocation(replace(_pair(), deadline=149)) is None
        and solve_least_time(replace(_pair(), deadline=149)) == 150
    )


def test_small_in_flight_budgets_take_several_rounds() -> None:
    problem = _pair(latency_ns=30, round_trip_ns=90)
    encoder = replace(problem.sections["encoder"][0], rounds=3, memory_ahead=2 * GIB)
    capped = replace(problem, sections={**problem.sections, "encoder": (encoder,)})
    assert evaluate_assignment(capped, APART).time_ns == 3 * (30 + 90 + 45)
    assert evaluate_assignment(capped, SHARED).time_ns == evaluate_assignment(problem, SHARED).time_ns == 400
    both = replace(
        problem,
        sections={**problem.sections, "encoder": (problem.sections["encoder"][0], encoder)},
        capacity=9 * GIB,
    )
    edges = tuple(replace(e, sent_bytes=(0, 0), latency_ns=(30, 30), slack_ns=(0, 0)) for e in both.edges)
    solution = solve_allocation(replace(both, edges=edges, strategy="apart"))
    assert solution is not None and solution.assignment.choice["encoder"] == 0


@pytest.mark.parametrize(("latency", "groups"), [(0, 2), (1000, 1)])
def test_solver_weighs_waiting_against_sharing(latency: int, groups: int) -> None:
    solution = solve_allocation(_pair(latency_ns=latency))
    assert solution is not None and len(set(solution.assignment.group.values())) == groups


def test_coarse_units_stay_exact_enough() -> None:
    small, scale = _pair(latency_ns=30, independent_ns=10), 10**9
    edges = tuple(replace(e, latency_ns=(30 * scale,), independent_ns=(10 * scale,) * 2) for e in small.edges)
    sections = {
        s: tuple(replace(c, time_ns=c.time_ns * scale) for c in cs) for s, cs in small.sections.items()
    }
    solution = solve_allocation(replace(small, sections=sections, edges=edges))
    assert solution is not None and solution.time_ns == 170 * scale
