"""Trains random models under random plans and compares with plain PyTorch.

python -m tests.e2e.random_runs 0 100 --plans 3 -o failures      seeds 0 … 99; the model files of those that
fail are kept

A model with dropout is compared with its plan for one rank, which is compared with the eager model when it is
made.
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

from secc.driver.compile import Compiled, Options, compile_model
from secc.driver.exactness_check import checked
from secc.errors import UserError
from secc.report.html_page import page
from tests.e2e.harness import replanned
from tests.e2e.random_models import random_model
from tests.e2e.random_plans import Outcome, Wanted, features, grant, random_plan
from tools.compare_training import Trained, differences, distributed, plain, recording_model

STEPS = 2


def trial(seed: int, folder: Path, plans: int = 1) -> list[Outcome]:
    """The runs of the model of a seed under each of its plans. `folder` keeps the files."""
    (folder / f"seed{seed}.py").write_text(random_model(seed))
    model = recording_model(f"seed{seed}", folder, folder)
    try:
        first = checked(compile_model(model, Options(cluster="local:1")), required=True)
    except UserError as error:
        return [Outcome(Wanted(1, 0, ()), (), f"compile: {error}")] * plans
    wanted = [random_plan(random.Random(f"plan {seed} {n}"), first.plan.whole_sections) for n in range(plans)]
    return [_run(first, model, plan, folder / str(n)) for n, plan in enumerate(wanted)]


def _run(first: Compiled, model: Path, wanted: Wanted, folder: Path) -> Outcome:
    folder.mkdir()
    granted, planned = grant(wanted, lambda options: replanned(first, options))
    has = features(planned)
    planned.write(folder / "plan", page)
    try:
        reference = _reference(first, model, granted, folder)
        found = distributed(folder / "plan", planned.plan.world_size, STEPS, folder / "run", *granted.run)
    except AssertionError as error:
        return Outcome(granted, has, f"run of {granted}: {error}")
    return Outcome(granted, has, next((f"{granted}: {d}" for d in differences(found, reference)), ""))


def _reference(first: Compiled, model: Path, wanted: Wanted, folder: Path) -> Trained:
    if not first.plan.draws:
        return plain(model, wanted.global_batch, STEPS, folder / "plain")
    alone = replanned(first, dataclasses.replace(wanted, ranks=1, pins=()).options)
    alone.write(folder / "plan_of_one", page)
    return distributed(folder / "plan_of_one", 1, STEPS, folder / "run_of_one")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--plans", type=int, default=1, help="so many plans for each model")
    parser.add_argument("-o", "--output", type=Path, help="keep the model files of failures here")
    arguments = parser.parse_args()
    done, failures, had = 0, 0, Counter[str]()
    for seed in range(arguments.first, arguments.last):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            try:
                outcomes = trial(seed, Path(name), arguments.plans)
            except Exception as unexpected:
                outcomes = [
                    Outcome(Wanted(1, 0, ()), (), f"defect: {type(unexpected).__name__}: {unexpected}")
                ]
            if any(o.error for o in outcomes) and arguments.output:
                arguments.output.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(name) / f"seed{seed}.py", arguments.output)
        done, failures = done + len(outcomes), failures + sum(bool(o.error) for o in outcomes)
        had.update(feature for o in outcomes for feature in o.has)
        print(
            f"seed {seed}: {', '.join(o.error or ' '.join(('exact', *o.has)) for o in outcomes)} ({time.perf_counter() - start:.1f} s)",
            flush=True,
        )
    print(
        f"{done - failures} of {done} runs exact; plans with {', '.join(f'{name}: {n}' for name, n in sorted(had.items()))}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
