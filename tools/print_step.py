"""Prints one step of a plan: its samples, the micro-batches of each section, and the program of each rank.

    python -m tools.print_step PLAN [--step K] [--order dataset]

`docs/concepts.md` explains how to read it. Nothing is trained; samples are loaded as in a run.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from secc.runtime.plan.schema import load_plan
from secc.runtime.plan.step_program import print_schedule
from secc.runtime.schedule.scheduler import SCHEDULE_ORDERS, schedule_batch
from secc.simulate.global_batches import load_global_batches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="a plan directory")
    parser.add_argument("--step", type=int, default=0, help="which global batch (default: the first)")
    parser.add_argument(
        "--order",
        choices=SCHEDULE_ORDERS,
        default="wavefront",
        help="dataset: samples in the dataset's order",
    )
    options = parser.parse_args()

    plan = load_plan(options.plan)
    batches = load_global_batches(options.plan, plan, steps=options.step + 1)
    samples = next(islice(batches, options.step, None))
    for position, sample in enumerate(samples):
        sizes = ", ".join(f"{name}={size}" for name, size in sample.sizes.items())
        pattern = ", ".join(sorted(sample.pattern))
        print(f"sample {position}: dataset index {sample.id}, pattern {{{pattern}}}, {sizes}")
    print(print_schedule(schedule_batch(plan, samples, order=options.order)), end="")


if __name__ == "__main__":
    main()
