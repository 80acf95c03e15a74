"""Measures the contribution of each part of the allocation.

    python -m tools.bench_ablations PLANS [ID ...]     prints a table; `--json FILE` writes it

PLANS is a folder with the plan of each workload in a folder of its name, as `tools.bench_baselines` leaves
it. Allocation runs again from the IR in the plan, as `allocate` does it and in other ways; nothing is
captured or compiled. Each choice is scheduled as ranks would, on the same samples
(`secc.alloc.refine.schedule_evaluation`). A figure is that step over the step of `allocate`'s choice.

| column | choice |
| --- | --- |
| solver alone | the best by closed forms, without refinement |
| means only | refined on mean samples |
| uniform | every section on all ranks with one micro-batch size |
| greedy | sections apart, ranks in proportion to their work, each in the fastest way that fits |
| random | the median of 20 plans that fit |
| without sink-boundaries | sections send what their modules return |
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Assignment, Problem, Solution
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.refine import prefetch_memory
from secc.alloc.refine.local_search import refine_by_simulation
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.alloc.solver.allocation_solver import solve_allocation
from secc.cluster import parse_cluster
from secc.cost.model.step_overheads import cluster_with_overheads
from secc.driver import what_if
from secc.ir.analysis import sample_sizes
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.text_io import module_text
from secc.passes.allocate import MULTI_RANK_MARGIN, assign_ranks
from tools.bench_workloads import WORKLOADS
from tools.benchmark_table import BenchmarkTable, add_json_option

ABLATION_COLUMNS = (
    "workload",
    "plan, s",
    "solver alone",
    "means only",
    "uniform",
    "greedy",
    "random",
    "without sink-boundaries",
)
SINK_PASS = "sink-boundaries"
RANDOM_PLANS, MAX_RANDOM_DRAWS = 20, 20_000


@dataclass(frozen=True)
class AblationSetting:
    """A workload's problem before `allocate`, and its trial."""

    work: Workload
    problem: Problem
    evaluator: PlanEvaluator

    def step_seconds(self, a: Assignment | None) -> float | None:
        """Seconds of a step, None for no plan or one that does not fit."""
        tried = self.evaluator.evaluate(a, assign_ranks(self.problem, a)) if a is not None else None
        return tried.time_ns / 1e9 if tried is not None and tried.fits else None

    @cached_property
    def solver_plan(self) -> Solution | None:
        """The best by closed forms."""
        return solve_allocation(self.problem, margin=MULTI_RANK_MARGIN)

    def choose_plan(self, trial: PlanEvaluator) -> Assignment | None:
        """What `allocate` chooses by a trial."""
        if self.solver_plan is None:
            return None
        return refine_by_simulation(
            trial,
            self.problem,
            self.solver_plan.assignment,
            partial(assign_ranks, self.problem),
            MULTI_RANK_MARGIN,
        ).assignment


def make_setting(graph: GraphOp, allocate: Any) -> AblationSetting:
    cluster = cluster_with_overheads(graph, parse_cluster(allocate.cluster))
    work = build_workload(graph, cluster, allocate.global_batch)
    pins = Pins(refused=frozenset(allocate.refused))
    asked = prefetch_memory.with_prefetch_buffers(
        build_problem(work, cluster.ranks, "auto", pins), work, None
    )
    return AblationSetting(work, asked, PlanEvaluator(work, asked, None))


def proportional_assignment(asked: Problem) -> Assignment | None:
    """Sections apart on ranks in proportion to their work on one; None where those do not fit, or are no
    whole nodes."""
    alone = {s: min(c.time_ns * c.ranks for c in cs) for s, cs in asked.sections.items()}
    choice: dict[str, int] = {}
    left = asked.ranks
    for s in sorted(alone, key=lambda s: alone[s]):
        share = (
            max(1, round(asked.ranks * alone[s] / sum(alone.values())))
            if len(choice) < len(alone) - 1
            else left
        )
        fitting = [
            (i, c)
            for i, c in enumerate(asked.sections[s])
            if c.ranks <= share and max(c.memory, c.memory_ahead) <= asked.capacity
        ]
        if not fitting:
            return None
        choice[s], chosen = min(fitting, key=lambda x: (-x[1].ranks, x[1].time_ns))
        left -= chosen.ranks
    found = Assignment({s: choice[s] for s in asked.sections}, {s: s for s in asked.sections})
    return found if _is_feasible(asked, found) else None


def _is_feasible(asked: Problem, a: Assignment) -> bool:
    """Whether an assignment fits the memory and the nodes."""
    try:
        evaluate_assignment(asked, a)
    except ValueError:
        return False
    return True


def draw_random_plans(asked: Problem) -> list[Assignment]:
    """Random plans that fit."""
    rng, found, names = random.Random(0), list[Assignment](), list(asked.sections)
    for _ in range(MAX_RANDOM_DRAWS):
        choice = {s: rng.randrange(len(cs)) for s, cs in asked.sections.items()}
        group: dict[str, str] = {}
        for i, s in enumerate(names):
            same = [
                g
                for g in names[:i]
                if group[g] == g and asked.sections[g][choice[g]].ranks == asked.sections[s][choice[s]].ranks
            ]
            group[s] = rng.choice([s, *same])
        if _is_feasible(asked, a := Assignment(choice, group)):
            found.append(a)
        if len(found) == RANDOM_PLANS:
            break
    return found


def graph_before_sinking(directory: Path, graph: GraphOp) -> GraphOp | None:
    """The graph before `sink-boundaries`, with the samples of `graph`; None where the plan does not keep
    it."""
    dumps = sorted((directory / "ir").glob("*.mlir"))
    at = next((i for i, path in enumerate(dumps) if path.stem.partition("-")[2] == SINK_PASS), 0)
    if not at:
        return None
    before = graph_of(module_text.parse_module(dumps[at - 1].read_text()))
    before.attributes[sample_sizes.SAMPLES_ATTRIBUTE] = graph.attributes[sample_sizes.SAMPLES_ATTRIBUTE]
    return before


def ablation_row(name: str, plans: Path) -> list[str]:
    """The cells of a workload."""
    (allocate, *_), path = what_if.load_before_allocate(plans / name)
    graph = graph_of(module_text.parse_module(path.read_text(), str(path)))
    own = make_setting(graph, allocate)
    plan = own.step_seconds(own.choose_plan(own.evaluator))
    uniform = solve_allocation(replace(own.problem, strategy="uniform"), margin=MULTI_RANK_MARGIN)
    kept = graph.attributes.pop(sample_sizes.SAMPLES_ATTRIBUTE)
    means = own.choose_plan(PlanEvaluator(own.work, own.problem, None))
    graph.attributes[sample_sizes.SAMPLES_ATTRIBUTE] = kept
    alone, uniform_plan = (
        found.assignment if found is not None else None for found in (own.solver_plan, uniform)
    )
    times = [step for a in draw_random_plans(own.problem) if (step := own.step_seconds(a)) is not None]
    other = (
        make_setting(before, allocate)
        if (before := graph_before_sinking(plans / name, graph)) is not None
        else None
    )
    without = other.step_seconds(other.choose_plan(other.evaluator)) if other is not None else None
    steps = [
        *map(own.step_seconds, (alone, means, uniform_plan, proportional_assignment(own.problem))),
        statistics.median(times) if times else None,
        without,
    ]
    return [
        name,
        f"{plan:.3f}" if plan else "-",
        *(f"{step / plan:.2f}" if step and plan else "-" for step in steps),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", type=Path)
    parser.add_argument("workloads", nargs="*", metavar="ID", default=list(WORKLOADS))
    add_json_option(parser)
    options = parser.parse_args()
    about = "Step of other choices over allocate's, in the order that ranks run; null: nothing fits."
    table = BenchmarkTable(ABLATION_COLUMNS, about, options.json)
    for name in options.workloads:
        table.add_row(*ablation_row(name, options.plans))


if __name__ == "__main__":
    main()
