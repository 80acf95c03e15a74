"""Measures what re-recording costs: the step time with recordings made in advance, in the loader process, and
made while the rank waits.

    python -m tools.bench_rerecord               two ranks on this machine, tools/models/grid_reader.py
    WIDTH=256 python -m tools.bench_rerecord     the same with a wider model, which computes longer
    python -m tools.bench_rerecord MODEL.py --ranks 3 --steps 20

Prints medians over the steps except the first two: seconds of a step, micro-batches recorded and reused (all
ranks), seconds (mean of the ranks) spent recording, waiting for recordings, and waiting for batches; then the
ratio of the two step times. `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.report.html_page import report_page
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import read_metrics, run_plan_ranks

MODEL = Path(__file__).parent / "models" / "grid_reader.py"
LOADING_PROCESSES = {"in advance": "1", "while waiting": "0"}  # loader processes per rank
MEASURED_COLUMNS = ("step_time_s", "recorded", "kept", "recording_s", "exposed_s", "waiting_s")
_WARM_UP_STEPS = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=16)
    add_json_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = check_exactness(
            compile_model(
                options.model,
                CompileOptions(cluster=f"local:{options.ranks}", global_batch=options.global_batch),
            )
        )
        made.write_plan(folder / "plan", report_page)
        sections = ", ".join(s.name for s in made.plan.sections)
        print(f"sections {sections}; {len(made.plan.recorded)} re-recorded cases\n")
        table = BenchmarkTable(
            ("recordings", *MEASURED_COLUMNS),
            f"{options.model.stem} on {options.ranks} ranks; medians of a step.",
            options.json,
        )
        step_seconds: list[float] = []
        for way, workers in LOADING_PROCESSES.items():
            medians = _measure_run(folder, made.plan.world_size, options.steps, workers)
            table.add_row(way, *(f"{medians[column]:.3f}" for column in MEASURED_COLUMNS))
            step_seconds.append(medians["step_time_s"])
    print(
        f"\nstep time with recordings in advance over while waiting: {step_seconds[0] / step_seconds[1]:.2f}"
    )


def _measure_run(folder: Path, ranks: int, steps: int, workers: str) -> dict[str, float]:
    """Runs the plan and returns the median of each measured column."""
    log = folder / f"workers{workers}"
    run_plan_ranks(
        folder / "plan", ranks, ["--steps", str(steps), "--log-dir", str(log), "--workers", workers]
    )
    metrics = read_metrics(log)[_WARM_UP_STEPS:]
    return {column: median(m[column] for m in metrics) for column in MEASURED_COLUMNS}


if __name__ == "__main__":
    main()
