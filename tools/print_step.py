"""Prints one step of a plan: its samples, the micro-batches of each section, and the program of each rank.

    python -m tools.print_step PLAN [--step K] [--order dataset]

`docs/concepts.md` explains how to read it. Nothing is trained; samples are loaded as in a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path

from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule, print_instruction
from secc.runtime.schedule.scheduler import SCHEDULE_ORDERS, schedule_batch
from secc.simulate.global_batches import load_global_batches

WIDTH = 110  # columns within which programs are printed side by side


def sample_lines(samples: Sequence[SampleMeta]) -> list[str]:
    """One line per sample: position in the batch, index in the dataset, input pattern, sizes."""
    lines: list[str] = []
    for position, sample in enumerate(samples):
        sizes = ", ".join(f"{name}={size}" for name, size in sample.sizes.items())
        pattern = ", ".join(sorted(sample.pattern))
        lines.append(f"sample {position}: dataset index {sample.id}, pattern {{{pattern}}}, {sizes}")
    return lines


def micro_batch_lines(plan: Plan, schedule: Schedule) -> list[str]:
    """The micro-batches of each section with their replica and samples."""
    lines: list[str] = []
    for section in plan.sections:
        lines.append(f"section {section.name}")
        for micro in schedule.micro_batches[section.name]:
            samples = " ".join(map(str, micro.samples))
            lines.append(f"  micro {micro.index} replica {micro.replica} samples {samples}")
    return lines


def program_lines(schedule: Schedule) -> list[str]:
    """The programs of all ranks: side by side if they fit into `WIDTH` columns, else one by one."""
    columns = [
        [f"rank {rank}", *(f"  {print_instruction(i)}" for i in program)]
        for rank, program in enumerate(schedule.programs)
    ]
    widths = [max(map(len, column)) for column in columns]
    if sum(widths) + 3 * (len(widths) - 1) > WIDTH:
        return [line for column in columns for line in column]
    rows = zip_longest(*columns, fillvalue="")
    return ["   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


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
    schedule = schedule_batch(plan, samples, order=options.order)
    print(
        "\n".join([*sample_lines(samples), "", *micro_batch_lines(plan, schedule), *program_lines(schedule)])
    )


if __name__ == "__main__":
    main()
