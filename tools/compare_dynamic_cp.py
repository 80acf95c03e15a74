"""Compares one cp for all samples of a section with one for each micro-batch, in the simulator.

    python -m tools.compare_dynamic_cp PLAN ...        prints a table; `--json FILE` writes it

Each PLAN is the directory of a compiled workload (`tools/workloads`) in which sections have cp. All its
choices are pinned and planned again from the IR that the directory keeps, with `cp_per=section` and with
`cp_per=micro_batch` for each section with cp that may have it. Both plans take the same samples: the first
global batches of the workload's dataset. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from secc.api.simulation import simulate_plan
from secc.driver.replan_from_run import plan_pins
from secc.driver.what_if import replan_with_changes
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.simulate.events import SimulatedStep
from tools.benchmark_table import BenchmarkTable, add_json_option

STEPS = 3
COLUMNS = (
    "workload",
    "sections with cp",
    "step, one cp, s",
    "1 or all ranks, s",
    "any degree, s",
    "ratio",
    "samples by degree",
    "GiB",
    "GiB, any degree",
)
ABOUT = (
    f"Simulated steps of the same layouts, mean of {STEPS} global batches of each workload; times are those "
    "of the cost model, nothing has been timed on a GPU. one cp: all ranks of cp share each sample. 1 or all "
    "ranks: of a micro-batch. any degree: any divisor of cp. ratio: of the last to the first. samples by "
    "degree: of sections with cp. GiB: the most that a rank holds in the first batch."
)


def with_cp_per(plan: Plan, what: str) -> tuple[str, ...]:
    """The pins of a plan with another choice of what has one cp, where there is a choice."""
    return tuple(f"{pin.partition('=')[0]}={what}" if ".cp_per=" in pin else pin for pin in plan_pins(plan))


def without_degrees(plan: Plan) -> Plan:
    """The plan with samples on one rank of cp, or on all of them, only."""
    sections = (replace(s, subgroups=tuple(g for g in s.subgroups if g.ranks == 1)) for s in plan.sections)
    return replace(plan, sections=tuple(sections))


def samples_by_degree(steps: Sequence[SimulatedStep]) -> str:
    """How many samples of sections with cp are computed by how many ranks of a replica."""
    found = Counter[int]()
    for step in steps:
        costs = PredictedCosts(step.plan, step.samples, step.schedule.own_samples)
        for section in (s for s in step.plan.sections if s.mesh.cp > 1):
            for micro in step.schedule.micro_batches[section.name]:
                (parts,) = costs.deal_samples(section, [micro.samples])
                found[section.mesh.cp // max(1, len(parts))] += len(micro.samples)
    return ", ".join(f"{degree}: {found[degree]}" for degree in sorted(found))


def compare(directory: Path) -> tuple[object, ...]:
    """The row of a workload's plan directory."""
    plan = load_plan(directory)
    _, divided = replan_with_changes(directory, with_cp_per(plan, "section"))
    _, dealt = replan_with_changes(directory, with_cp_per(plan, "micro_batch"))
    made = [simulate_plan(directory, p, steps=STEPS) for p in (divided, without_degrees(dealt), dealt)]
    seconds = [simulated.measures.step_time_s for simulated in made]
    memory = [simulated.first_measures.peak_memory_gib for simulated in (made[0], made[-1])]
    layouts = (
        f"{s.name}: dp {s.mesh.dp}, tp {s.mesh.tp}, cp {s.mesh.cp}, micro-batch {s.micro_batch}"
        for s in plan.user_sections
        if s.mesh.cp > 1
    )
    return (
        directory.name,
        "; ".join(layouts),
        *(f"{s:.2f}" for s in seconds),
        f"{seconds[-1] / seconds[0]:.3f}",
        samples_by_degree(made[-1].steps),
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
