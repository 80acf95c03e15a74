"""Compares plans of the reference workloads with all baselines.

    python -m tools.bench_baselines PLANS [ID[@SHARE] ...]     prints a table; `--json FILE` writes it

PLANS is a folder with the plan of each workload in a folder of its name; missing ones are compiled first
(`tools.bench_workloads` has their clusters and batches). `vlm_7b@0.75` is the workload with images in 75% of
its samples. A plan and all baselines train the same global batches on the same devices, in one simulator with
one cost model (docs/baselines.md). Columns: the plan's step, its ratio to the bounds for its allocation and
for any allocation, and each baseline's step over the plan's; below 1 the plan loses, in bold. `--plot FILE`
(needs matplotlib) draws these ratios. The best layout of each baseline is printed to standard error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from secc.baselines.compare import BaselineComparison
from secc.baselines.schemes import SCHEMES
from secc.bounds.steady_state import mean_step_bound
from secc.bounds.work import BatchWork
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta
from secc.simulate.global_batches import load_global_batches
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady_state_steps
from secc.simulate.step_measures import StepMeasures, mean_measures, measure_step
from tools.bench_workloads import COMPILE_COMMAND, WORKLOADS
from tools.benchmark_table import BenchmarkTable, add_json_option

BASELINE_COLUMNS = (
    "workload",
    "P(image)",
    "plan, s",
    "over schedule bound",
    "over plan bound",
    *SCHEMES,
    "sections",
)
MEASURED_BATCHES = 2  # repeated in turn, so that every step may prefetch for the next
IMAGE_SHARE_VARIABLE = (
    "IMAGE_SHARE"  # where the workloads' datasets look for the share of samples with images
)
USUAL_IMAGE_SHARE = "0.33"
TEXT_ONLY_WORKLOADS = (  # without images
    "kd_32b_8b",
    "kd_32b_1_7b",
    "kd_moe_235b_30b",
    "kd_moe_235b_8b",
    "kd_dsv3",
    "long_32b",
    "kd_long",
)


@dataclass(frozen=True)
class BaselineRow:
    """A workload in one mix: its plan, the plan's measures, and each baseline's step over the plan's, None
    where none fits."""

    name: str
    share: str
    plan: Plan
    measures: StepMeasures
    ratios: Mapping[str, float | None]

    @property
    def table_cells(self) -> list[str]:
        m = self.measures
        bounds = [
            f"{m.step_time_s / bound:.3f}" if bound else "-" for bound in (m.schedule_bound_s, m.plan_bound_s)
        ]
        sections = "; ".join(
            f"{s.name} {s.mesh.dp}/{s.mesh.pp}/{s.mesh.tp}, {s.micro_batch}" for s in self.plan.user_sections
        )
        ratios = ["-" if r is None else f"**{r:.3f}**" if r < 1 else f"{r:.2f}" for r in self.ratios.values()]
        return [
            self.name,
            "" if self.name in TEXT_ONLY_WORKLOADS else self.share,
            f"{m.step_time_s:.3f}",
            *bounds,
            *ratios,
            sections,
        ]


def compile_if_missing(name: str, directory: Path) -> Path:
    """The directory of a workload's plan, compiled if it is not there."""
    if not (directory / "plan.json").exists():
        cluster, batch = WORKLOADS[name]
        model = Path(__file__).parent / "workloads" / f"{name}.py"
        options = [
            "compile",
            str(model),
            "-o",
            str(directory),
            "--cluster",
            cluster,
            "--global-batch",
            str(batch),
        ]
        subprocess.run(
            [sys.executable, "-c", COMPILE_COMMAND, *options],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return directory


def baseline_row(what: str, plans: Path) -> BaselineRow:
    """A workload's row, named as on the command line."""
    name, _, share = what.partition("@")
    with _image_share(share or USUAL_IMAGE_SHARE):
        directory = compile_if_missing(name, plans / what)
        plan = load_plan(directory)
        batches = list(load_global_batches(directory, plan, steps=MEASURED_BATCHES))
    measures = [
        measure_step(simulate(plan, samples, programs))
        for samples, programs in steady_state_steps(plan, batches)
    ]
    measured = mean_measures(measures, mean_step_bound([BatchWork(plan, samples) for samples in batches]))
    comparison = BaselineComparison(directory)
    ratios = {scheme: _step_ratio(comparison, scheme, batches, measured.step_time_s) for scheme in SCHEMES}
    return BaselineRow(name, share or USUAL_IMAGE_SHARE, plan, measured, ratios)


@contextmanager
def _image_share(share: str) -> Iterator[None]:
    os.environ[IMAGE_SHARE_VARIABLE] = share
    try:
        yield
    finally:
        del os.environ[IMAGE_SHARE_VARIABLE]


def _step_ratio(
    comparison: BaselineComparison, scheme: str, batches: Sequence[Sequence[SampleMeta]], step: float
) -> float | None:
    found = comparison.find_best(scheme, batches)
    print(f"{scheme}: {found.layout}", file=sys.stderr, flush=True)
    return None if found.step_time_s is None else found.step_time_s / step


def plot_ratios(rows: Sequence[BaselineRow], path: Path) -> None:
    """Each baseline's step over the plan's, a column of marks for each row; the line is the plan."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(3 + 0.5 * len(rows), 4.5), layout="constrained")
    for scheme, marker in zip(SCHEMES, "osD^vPX", strict=True):
        some = [(i, ratio) for i, r in enumerate(rows) if (ratio := r.ratios[scheme]) is not None]
        axes.plot(*zip(*some, strict=True), marker, label=scheme, markersize=5)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(
        range(len(rows)),
        [" ".join([r.name, *([] if r.name in TEXT_ONLY_WORKLOADS else [r.share])]) for r in rows],
        rotation=60,
        ha="right",
    )
    axes.set_ylabel("step over the plan's")
    axes.set_ylim(bottom=0.9)
    figure.legend(loc="outside right upper")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", type=Path)
    parser.add_argument("workloads", nargs="*", metavar="ID[@SHARE]", default=list(WORKLOADS))
    parser.add_argument("--plot", type=Path, help="draw the ratios", metavar="FILE")
    add_json_option(parser)
    options = parser.parse_args()
    about = (
        f"Step of published schemes over the plan's, mean of {MEASURED_BATCHES} batches, modelled costs; "
        "below 1 the plan loses, null: no layout fits. Sections are dp/pp/tp, micro-batch."
    )
    table, rows = BenchmarkTable(BASELINE_COLUMNS, about, options.json), list[BaselineRow]()
    for name in options.workloads:
        rows.append(baseline_row(name, options.plans))
        table.add_row(*rows[-1].table_cells)
    if options.plot:
        plot_ratios(rows, options.plot)


if __name__ == "__main__":
    main()
