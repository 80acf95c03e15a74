"""Plans of the reference workloads against all baselines: `python -m tools.bench_baselines PLANS [ID ...]` prints a table.

PLANS is a folder with the plan of each workload in a folder of its name; those that are missing are compiled first
(`tools.bench_workloads` has their clusters and batches). A plan and all baselines train the same global batches on the same devices, in
one simulator with one cost model (docs/baselines.md). Columns: the plan's step, its ratio to the bounds for its allocation and for any,
and each baseline's step over the plan's: below 1 the plan loses, in bold.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from secc.baselines.compare import Comparison
from secc.baselines.schemes import SCHEMES
from secc.runtime.plan import load
from secc.schedule.steady import steady_bound
from secc.schedule.work import Work
from secc.simulate.batches import global_batches
from secc.simulate.machine import simulate
from secc.simulate.measures import mean, measure
from secc.simulate.steady import steady
from tools.bench_workloads import COMPILE, WORKLOADS, print_rows

COLUMNS = ("workload", "plan, s", "over schedule bound", "over plan bound", *SCHEMES, "sections")
BATCHES = 2  # that come round and round, as sections that run ahead need


def compiled(name: str, plans: Path) -> Path:
    """The directory of a workload's plan, compiled if it is not there."""
    directory = plans / name
    if not (directory / "plan.json").exists():
        cluster, batch = WORKLOADS[name]
        model = Path(__file__).parent / "workloads" / f"{name}.py"
        options = ["compile", str(model), "-o", str(directory), "--cluster", cluster, "--global-batch", str(batch)]
        subprocess.run([sys.executable, "-c", COMPILE, *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return directory


def row(name: str, plans: Path) -> list[str]:
    """The cells of a workload."""
    directory = compiled(name, plans)
    plan = load(directory)
    batches = list(global_batches(directory, plan, steps=BATCHES))
    measures = [measure(simulate(plan, samples, programs)) for samples, programs in steady(plan, batches)]
    measured = mean(measures, steady_bound([Work(plan, samples) for samples in batches]))
    step = measured.step_time_s
    bounds = [f"{step / bound:.3f}" if bound else "-" for bound in (measured.schedule_bound_s, measured.plan_bound_s)]
    comparison = Comparison(directory)
    ratios = [_ratio(comparison.best(scheme, batches).step_time_s, step) for scheme in SCHEMES]
    sections = "; ".join(f"{s.name} {s.mesh.dp}/{s.mesh.pp}/{s.mesh.tp}, {s.micro_batch}" for s in plan.whole_sections)
    return [name, f"{step:.3f}", *bounds, *ratios, sections]


def _ratio(time: float | None, step: float) -> str:
    if time is None:
        return "-"
    return f"**{time / step:.2f}**" if time < step else f"{time / step:.2f}"


def main() -> None:
    print_rows(COLUMNS, row)


if __name__ == "__main__":
    main()
