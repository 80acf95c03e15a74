"""Compares one cp for all samples of a section with one for each micro-batch, and both with baselines, in the
simulator.

    python -m tools.compare_dynamic_cp PLAN ...        prints a table; `--json FILE` writes it

Each PLAN is the directory of a compiled workload (`tools/workloads`). It is planned again from the IR that
the directory keeps: freely but with `cp_per=section`, which gives the best plan with a static cp, and with
all choices pinned but how samples are dealt. All plans and baselines, which have a static cp, take the same
samples: the first global batches of the workload's dataset. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from secc.api.simulation import simulate_plan
from secc.baselines.compare import BaselineComparison
from secc.driver.replan_from_run import plan_pins
from secc.driver.what_if import replan_with_changes
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.simulate.events import SimulatedStep
from secc.simulate.global_batches import load_global_batches
from tools.benchmark_table import BenchmarkTable, add_json_option

STEPS = 3
BASELINES = ("uniform", "mimo")
COLUMNS = (
    "workload",
    "best layout, static cp",
    "step, s",
    "layout of the plan",
    "all ranks, s",
    "1 or all, s",
    "any degree, s",
    "plan, s",
    "ratio",
    "samples by degree",
    *(f"{name} / plan" for name in BASELINES),
    "GiB, static",
    "GiB, plan",
)
ABOUT = (
    f"Simulated steps, mean of {STEPS} global batches of each workload; times are those of the cost model, "
    "nothing has been timed on a GPU. Best layout, static cp: of a free search in which all of cp share "
    "each sample. layout of the plan: of the sections that have cp; its steps if all ranks of cp share each "
    "sample, if a sample goes to one rank or to all, and to any divisor of cp. ratio: of the plan's step to "
    "that with static cp. samples by degree: of sections that deal them. uniform, mimo: with a cp "
    "that is static. GiB: the most that a rank holds in the first batch."
)


def with_dealing(plan: Plan, *words: str) -> tuple[str, ...]:
    """The pins of a plan with other ones for how samples are dealt, in each section with cp."""
    kept = [pin for pin in plan_pins(plan) if ".cp_per=" not in pin and ".cp_degrees=" not in pin]
    return (*kept, *(f"{s.name}.{word}" for s in plan.user_sections if s.mesh.cp > 1 for word in words))


def describe_layout(plan: Plan) -> str:
    """Degrees of the sections with cp, of all where none has it."""
    sections = [s for s in plan.user_sections if s.mesh.cp > 1] or plan.user_sections
    return "; ".join(
        f"{s.name}: "
        + ", ".join(f"{key} {n}" for key in ("dp", "pp", "tp", "cp") if (n := getattr(s.mesh, key)) > 1)
        for s in sections
    )


def samples_by_degree(steps: Sequence[SimulatedStep]) -> str:
    """How many samples of sections that deal them are computed by how many ranks of a replica."""
    found = Counter[int]()
    for step in steps:
        costs = PredictedCosts(step.plan, step.samples, step.schedule.own_samples)
        for section in (s for s in step.plan.sections if s.may_deal):
            for micro in step.schedule.micro_batches[section.name]:
                (parts,) = costs.deal_samples(section, [micro.samples])
                found[section.mesh.cp // max(1, len(parts))] += len(micro.samples)
    return ", ".join(f"{degree}: {found[degree]}" for degree in sorted(found))


def compare(directory: Path) -> tuple[object, ...]:
    """The row of a workload's plan directory."""
    plan = load_plan(directory)
    _, static = replan_with_changes(directory, [f"{s.name}.cp_per=section" for s in plan.user_sections])
    ways = (("cp_per=section",), ("cp_per=micro_batch", "cp_degrees=one_or_all"), ("cp_per=micro_batch",))
    pinned = [replan_with_changes(directory, with_dealing(plan, *words))[1] for words in ways]
    made = [simulate_plan(directory, p, steps=STEPS) for p in (static, *pinned, plan)]
    static_s, *dealt_s, plan_s = [simulated.measures.step_time_s for simulated in made]
    memory = [simulated.first_measures.peak_memory_gib for simulated in (made[0], made[-1])]
    batches, comparison = (
        list(load_global_batches(directory, plan, steps=STEPS)),
        BaselineComparison(directory),
    )
    baselines = [comparison.find_best(name, batches).step_time_s for name in BASELINES]
    return (
        directory.name,
        describe_layout(static),
        f"{static_s:.2f}",
        describe_layout(plan),
        *(f"{s:.2f}" for s in dealt_s),
        f"{plan_s:.2f}",
        f"{plan_s / static_s:.3f}",
        samples_by_degree(made[-1].steps),
        *("-" if s is None else f"{s / plan_s:.2f}" for s in baselines),
        *("-" if gib is None else f"{gib:.1f}" for gib in memory),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    add_json_option(parser)
    given = parser.parse_args()
    table = BenchmarkTable(COLUMNS, ABOUT, given.json)
    for directory in given.plans:
        table.add_row(*compare(directory))


if __name__ == "__main__":
    main()
