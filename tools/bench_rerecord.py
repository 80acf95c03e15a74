"""What it costs to record glue anew: the step time with recordings made ahead, in the loader's process, and
made where the rank waits.

python -m tools.bench_rerecord                  two ranks on this machine, tools/models/grid_reader.py
WIDTH=256 python -m tools.bench_rerecord        the same with a wider model, which computes longer
python -m tools.bench_rerecord MODEL.py --ranks 3 --steps 20

Prints medians over the steps but the first two: seconds of a step, recordings made and known (all ranks),
seconds (mean of the ranks) of recordings, of waiting meanwhile, and of waiting for batches, then the ratio of
the two step times.
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
from tools.compare_training import read_metrics, run_plan_ranks

MODEL = Path(__file__).parent / "models" / "grid_reader.py"
LOADING_PROCESSES = {"ahead": "1", "waited for": "0"}  # loading processes of a rank
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
        print(
            f"sections {', '.join(s.name for s in made.plan.sections)}; {len(made.plan.recorded)} cases recorded anew"
        )
        times = {
            way: _measure_run(folder, made.plan.world_size, options.steps, workers, way)
            for way, workers in LOADING_PROCESSES.items()
        }
    print(
        f"recordings made ahead take {times['ahead'] / times['waited for']:.2f} of the step time with recordings waited for"
    )


def _measure_run(folder: Path, ranks: int, steps: int, workers: str, way: str) -> float:
    """Run the plan and print the medians; the median step time."""
    log = folder / f"workers{workers}"
    run_plan_ranks(
        folder / "plan", ranks, ["--steps", str(steps), "--log-dir", str(log), "--workers", workers]
    )
    found = {
        column: median(m[column] for m in read_metrics(log)[_WARM_UP_STEPS:]) for column in MEASURED_COLUMNS
    }
    print(f"recordings {way:10}: " + "  ".join(f"{column} {value:.3f}" for column, value in found.items()))
    return found["step_time_s"]


if __name__ == "__main__":
    main()
