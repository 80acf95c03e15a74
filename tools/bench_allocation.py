"""Times the allocation of plans: processor seconds of pricing candidates and of the first solution, of the
searches with the problems that follow (samples dealt, tensors in host memory, pieces of layers), and of the
bound on every plan.

    python -m tools.bench_allocation PLAN [PLAN ...]      prints a table; `--json FILE` writes it
        --cluster 384x8xH100 --global-batch 1536          allocate for another cluster, or other batches

Starts from the graph that a plan's `ir/` holds before its allocation: no model is loaded or captured. All
work runs in this process. The digest of the candidates shows whether a change of the code leaves them equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.passes.allocate import Allocate
from tools.benchmark_table import BenchmarkTable, add_json_option

ResultT = TypeVar("ResultT")
ALLOCATION_COLUMNS = (
    "plan",
    "cluster, global batch",
    "candidates",
    "digest",
    "pricing and solver, CPU s",
    "searches, CPU s",
    "bound, CPU s",
    "step, s",
    "plans tried",
)


def timed(run: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Runs a function; returns its result and the processor seconds that it took."""
    start = time.process_time()
    return run(), time.process_time() - start


def allocation_row(plan: Path, cluster: str, global_batch: int) -> list[str]:
    """The cells of one plan, with its own cluster and global batch unless others are given."""
    (text,) = plan.glob("ir/*-sink-boundaries.mlir")
    graph = graph_of(parse_module(text.read_text()))
    contents = json.loads((plan / "plan.json").read_text())
    cluster = cluster or contents["cluster"]["name"]
    global_batch = global_batch or contents["global_batch"]
    allocate = Allocate(cluster=cluster, global_batch=global_batch)
    solved, priced_s = timed(lambda: allocate.solve_closed_form(graph))
    (_, won, _), searched_s = timed(lambda: allocate.choose_plan(solved))
    _, bounded_s = timed(lambda: allocate.least_step_s(solved))
    sections = solved.problem.sections
    return [
        plan.name,
        f"{cluster}, {global_batch}",
        ", ".join(f"{name} {len(candidates)}" for name, candidates in sections.items()),
        hashlib.sha256(repr(solved.problem).encode()).hexdigest()[:12],
        f"{priced_s:.1f}",
        f"{searched_s:.1f}",
        f"{bounded_s:.1f}",
        f"{won.evaluation.time_ns / 1e9:.3f}",
        str(won.evaluated_plans),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    parser.add_argument("--cluster", default="")
    parser.add_argument("--global-batch", type=int, default=0)
    add_json_option(parser)
    options = parser.parse_args()
    os.sched_setaffinity(0, {0})  # with one core nothing is forked, so this process has all of the work
    about = (
        "Allocation from a plan's graph: processor seconds of pricing and the first solution, of the "
        "searches, and of the bound on every plan."
    )
    table = BenchmarkTable(ALLOCATION_COLUMNS, about, options.json)
    for plan in options.plans:
        table.add_row(*allocation_row(plan, options.cluster, options.global_batch))


if __name__ == "__main__":
    main()
