"""Trains random models under random plans and compares with plain PyTorch.

    python -m tests.e2e.random_runs 0 100 --plans 3 -o failures

tries the seeds 0 to 99 and keeps the model files of failures; with `--experts` models have mixtures of
experts, and plans mostly an ep. A model with dropout is compared with its
plan for one rank, which is compared with the eager model when it is compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from tests.e2e.harness import replan
from tests.e2e.random_models import EXPERTS, write_random_model
from tests.e2e.random_plans import (
    RunOutcome,
    WantedPlan,
    draw_random_plan,
    list_features,
    plan_without_refused_pins,
)
from tools.compare_training import (
    TrainingResult,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

STEPS = 2


def try_model(seed: int, folder: Path, plans: int = 1, experts: bool = False) -> list[RunOutcome]:
    """Runs the model of a seed under each of its plans; `folder` keeps the files."""
    (folder / f"seed{seed}.py").write_text(write_random_model(seed, experts))
    model = write_recording_model(f"seed{seed}", folder, folder)
    try:
        first = check_exactness(compile_model(model, CompileOptions(cluster="local:1")), required=True)
    except UserError as error:
        return [RunOutcome(WantedPlan(1, 0, ()), (), f"compile: {error}")] * plans
    wanted = [
        draw_random_plan(
            random.Random(f"plan {seed} {n}"), first.plan.user_sections, experts=EXPERTS if experts else 0
        )
        for n in range(plans)
    ]
    return [_try_one_plan(first, model, plan, folder / str(n)) for n, plan in enumerate(wanted)]


def _try_one_plan(first: CompiledPlan, model: Path, wanted: WantedPlan, folder: Path) -> RunOutcome:
    folder.mkdir()
    granted, planned = plan_without_refused_pins(wanted, lambda options: replan(first, options))
    has = list_features(planned)
    planned.write_plan(folder / "plan", report_page)
    try:
        reference = _run_reference(first, model, granted, folder)
        found = train_distributed(
            folder / "plan", planned.plan.world_size, STEPS, folder / "run", *granted.run_options
        )
    except AssertionError as error:
        return RunOutcome(granted, has, f"run of {granted}: {error}")
    return RunOutcome(granted, has, next((f"{granted}: {d}" for d in find_differences(found, reference)), ""))


def _run_reference(first: CompiledPlan, model: Path, wanted: WantedPlan, folder: Path) -> TrainingResult:
    if not first.plan.draws:
        return train_in_one_process(model, wanted.global_batch, STEPS, folder / "plain")
    alone = replan(first, dataclasses.replace(wanted, ranks=1, pins=()).options)
    alone.write_plan(folder / "plan_of_one", report_page)
    return train_distributed(folder / "plan_of_one", 1, STEPS, folder / "run_of_one")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--plans", type=int, default=1, help="so many plans for each model")
    parser.add_argument("--experts", action="store_true", help="models with mixtures of experts")
    parser.add_argument("-o", "--output", type=Path, help="keep the model files of failures here")
    arguments = parser.parse_args()
    done, failures, had = 0, 0, Counter[str]()
    for seed in range(arguments.first, arguments.last):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            try:
                outcomes = try_model(seed, Path(name), arguments.plans, arguments.experts)
            except Exception as unexpected:
                outcomes = [
                    RunOutcome(WantedPlan(1, 0, ()), (), f"defect: {type(unexpected).__name__}: {unexpected}")
                ]
            if any(o.error for o in outcomes) and arguments.output:
                arguments.output.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(name) / f"seed{seed}.py", arguments.output)
        done, failures = done + len(outcomes), failures + sum(bool(o.error) for o in outcomes)
        had.update(feature for o in outcomes for feature in o.plan_features)
        print(
            f"seed {seed}: {', '.join(o.error or ' '.join(('exact', *o.plan_features)) for o in outcomes)} "
            f"({time.perf_counter() - start:.1f} s)",
            flush=True,
        )
    print(
        f"{done - failures} of {done} runs exact; plans with "
        f"{', '.join(f'{name}: {n}' for name, n in sorted(had.items()))}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
