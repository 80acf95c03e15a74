"""Measures cross-step prefetch: the mean step over its certified bound, with a frozen upstream section that
waits for each step and with one that computes forwards of the next step.

    python -m tools.bench_prefetch             mean/worst of ten seeds as a table
    python -m tools.bench_prefetch --lead 1    with another number of prefetched micro-batches

Each seed is a round of three global batches that are repeated (`secc/simulate/steady_state.py`); a step is
simulated with everything that is prefetched in it, against the bound on the mean step
(`secc/bounds/steady_state.py`). Memory for results is what `secc compile` gives
(`secc/alloc/refine/prefetch_memory.py`). Costs are linear and transfers take no time;
`tools/schedule_mixes.py` has the mixes. Prints Markdown; `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from secc.alloc.refine.prefetch_memory import PREFETCHED_PER_CONSUMER
from secc.bounds.steady_state import mean_step_bound
from secc.bounds.work import BatchWork
from secc.runtime.plan.schema import Plan
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady_state_steps
from tools import schedule_mixes
from tools.benchmark_table import BenchmarkTable, add_json_option

BATCHES_PER_SEED = 3
RESULT_WIDTH = 2048  # entries of a token's results, in 16 bits


@dataclass(frozen=True)
class PrefetchSetting:
    """One row: `kind` is "teacher → student" or "frozen encoder → LM"; `stages` are those of the critical
    section's replicas."""

    kind: str
    count: int
    upstream: int
    replicas: int
    load: float
    stages: int = 1

    def build_plan(self, seed: int) -> tuple[Plan, list[schedule_mixes.SampleList]]:
        """Builds a plan without memory for prefetched results, and the global batches."""
        if self.kind == "teacher → student":
            batches = [
                schedule_mixes.distillation_batch(self.count, BATCHES_PER_SEED * seed + k)
                for k in range(BATCHES_PER_SEED)
            ]
        else:
            batches = [
                schedule_mixes.multimodal_batch(self.count, 0.33, BATCHES_PER_SEED * seed + k)
                for k in range(BATCHES_PER_SEED)
            ]
        samples = [s for batch in batches for s in batch]
        pipeline = schedule_mixes.PipelineShape(self.stages, 2 * self.stages, split=self.stages > 1)
        if self.kind == "teacher → student":
            plan = schedule_mixes.teacher_student_plan(
                samples, self.upstream, self.replicas, self.load, pipeline
            )
            symbol = "T"
        else:
            plan = schedule_mixes.vlm_plan(
                samples, self.upstream, self.replicas, self.load, "forward", pipeline
            )
            symbol = "I"
        edges = (
            replace(e, dims=(symbol, str(RESULT_WIDTH)), rows=symbol, dtype="bfloat16") if not e.grad else e
            for e in plan.edges
        )
        return replace(plan, edges=tuple(edges)), batches

    def memory_gib(self, batches: list[schedule_mixes.SampleList], lead: int) -> float:
        """GiB on a rank for the results that the critical section's replicas want first."""
        symbol = "T" if self.kind == "teacher → student" else "I"
        sizes = [s.sizes[symbol] for batch in batches for s in batch if s.sizes[symbol]]
        return (
            (lead + self.stages)
            * max(1, -(-self.replicas // self.upstream))
            * mean(sizes)
            * RESULT_WIDTH
            * 2
            / 2**30
        )


def list_settings() -> Iterator[PrefetchSetting]:
    """The rows of the table."""
    for load in (0.8, 1.0, 1.2):
        yield PrefetchSetting("teacher → student", 256, 4, 8, load)
    for teachers in (1, 8, 16):
        yield PrefetchSetting("teacher → student", 256, teachers, 8, 1.0)
    yield PrefetchSetting("teacher → student", 64, 4, 8, 1.0)
    for stages in (2, 4):
        yield PrefetchSetting("teacher → student", 128, 8, 4, 1.0, stages)
    for load, stages in ((0.8, 1), (1.0, 1), (1.0, 2), (1.0, 4)):
        yield PrefetchSetting("frozen encoder → LM", 256, 4, 8, load, stages)


def ratio_to_bound(plan: Plan, batches: list[schedule_mixes.SampleList]) -> float:
    """The mean step of a plan over the bound that holds for any amount of prefetching."""
    time = sum(
        simulate(plan, samples, programs).end for samples, programs in steady_state_steps(plan, batches)
    )
    return (
        time
        / len(batches)
        / mean_step_bound([BatchWork(replace(plan, run_ahead_gib=1.0), samples) for samples in batches]).ns
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="rounds of batches for each row")
    parser.add_argument(
        "--lead",
        type=int,
        default=PREFETCHED_PER_CONSUMER,
        help="prefetched micro-batches per replica, in addition to one per stage",
    )
    add_json_option(parser)
    options = parser.parse_args(arguments)
    shape = ("sections", "N", "ranks upstream", "replicas", "stages", "load upstream", "memory, GiB")
    table = BenchmarkTable(
        (*shape, "without prefetch", "with prefetch"),
        f"Modelled mean step over the certified bound on the mean step, [mean, worst] of {options.seeds} "
        f"rounds of {BATCHES_PER_SEED} batches.",
        options.json,
    )
    for row in list_settings():
        ratios, memory = list[tuple[float, float]](), list[float]()
        for seed in range(options.seeds):
            plan, batches = row.build_plan(seed)
            memory.append(row.memory_gib(batches, options.lead))
            ratios.append(
                (
                    ratio_to_bound(plan, batches),
                    ratio_to_bound(replace(plan, run_ahead_gib=memory[-1]), batches),
                )
            )
        cells = [f"{mean(column):.3f}/{max(column):.3f}" for column in zip(*ratios, strict=True)]
        sizes = (row.count, row.upstream, row.replicas, row.stages, f"{row.load:.0%}", f"{mean(memory):.2f}")
        table.add_row(row.kind, *sizes, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
