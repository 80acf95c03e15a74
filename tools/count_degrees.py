"""Counts what degrees of cp between one rank and all of a section's would save: of samples that do not fit
one rank, each would take as few ranks as it fits, as FlexSP (2024) and ByteScale (2025) do.

    python -m tools.count_degrees PLAN:SECTION ...       prints a table; `--json FILE` writes it

PLAN is the directory of a compiled workload (`tools/workloads`) and SECTION a section of it with cp. Every
sample of the first global batches is priced as a micro-batch of its own on 1, 2, 4, ... ranks, if these have
the memory. What is compared is the work of a rank: a step cannot be shorter than it, but longer, as ranks
wait for each other. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from pathlib import Path
from statistics import mean

from secc.alloc.problem.candidates import undivided_cost
from secc.driver.replan_from_run import plan_pins
from secc.driver.what_if import load_before_allocate
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.passes.allocate import Allocate
from secc.runtime.plan.expr_eval import evaluate_expr_columns
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Cost
from secc.simulate.global_batches import load_global_batches
from tools.benchmark_table import BenchmarkTable, add_json_option

STEPS = 3
COLUMNS = (
    "workload",
    "layout",
    "one cp, s",
    "1 and cp, s",
    "all degrees, s",
    "saved by degrees",
    "samples by degree",
)
ABOUT = (
    f"Work of a rank in a step by the cost model, mean of {STEPS} global batches: each sample alone, on all "
    "ranks of cp; on one of them if it fits and takes less work; on any power of two of them. Not simulated, "
    "and nothing has been timed on a GPU. samples by degree: of all batches, where all degrees are allowed."
)


def count_degrees(directory: Path, section: str) -> tuple[object, ...]:
    """The row of a section of a workload's plan directory."""
    plan = load_plan(directory)
    found = next(s for s in plan.sections if s.name == section)
    (allocate, *_), ir_file = load_before_allocate(directory)
    assert isinstance(allocate, Allocate)
    allocate = dataclasses.replace(allocate, set=plan_pins(plan), fit=False)
    solved = allocate.solve_closed_form(graph_of(parse_module(ir_file.read_text())))
    chosen = solved.problem.sections[section][solved.solution.assignment.choice[section]]
    degrees = [2**k for k in range(chosen.cp.bit_length())]
    load = solved.work.loads[section]
    costs = {d: undivided_cost(solved.work, load, chosen, d) for d in degrees}
    work: dict[str, list[float]] = {"one": [], "two": [], "all": []}
    used: Counter[int] = Counter()
    for samples in load_global_batches(directory, plan, 0, False, STEPS):
        priced = PredictedCosts(plan, samples)
        by_degree = {d: _rank_ns(priced, d, costs[d], found.room_bytes, d == chosen.cp) for d in degrees}
        for name, allowed in (("one", degrees[-1:]), ("two", [1, chosen.cp]), ("all", degrees)):
            best = [min((by_degree[d][i], d) for d in allowed) for i in range(len(samples))]
            work[name].append(sum(ns for ns, _ in best) / (chosen.dp * chosen.cp) / 1e9)
            if name == "all":
                used.update(d for _, d in best)
    one, two, every = (mean(work[name]) for name in ("one", "two", "all"))
    return (
        directory.name,
        f"{section}: dp {chosen.dp}, tp {chosen.tp}, cp {chosen.cp}",
        *(f"{seconds:.2f}" for seconds in (one, two, every)),
        f"{1 - every / two:.1%}",
        ", ".join(f"{d}: {used[d]}" for d in degrees),
    )


def _rank_ns(priced: PredictedCosts, degree: int, cost: Cost, room: int, always: bool) -> list[float]:
    """Work in ns of `degree` ranks for each sample; infinite if it does not fit and need not (`always`)."""
    columns, count = priced.sample_columns, priced.sample_count
    forward, backward, saved = (
        evaluate_expr_columns(text, columns, count)
        for text in (cost.forward_ns, cost.backward_ns, cost.saved)
    )
    return [
        degree * (f + b) if always or size <= room else float("inf")
        for f, b, size in zip(forward, backward, saved, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", metavar="PLAN:SECTION")
    add_json_option(parser)
    given = parser.parse_args()
    table = BenchmarkTable(COLUMNS, ABOUT, given.json)
    for text in given.sections:
        directory, _, section = text.rpartition(":")
        table.add_row(*count_degrees(Path(directory), section))


if __name__ == "__main__":
    main()
