"""Measures the scheduler: step time over the certified lower bound, over proven optima, and its own cost.

    python -m tools.bench_schedules quality             mixes and loads, mean and worst of ten batches
    python -m tools.bench_schedules pipelines           a language model in stages: samples, stages, in-flight
                                                        budget, and kind of backward
    python -m tools.bench_schedules loads               the same with 32 samples per replica: mixes and loads
    python -m tools.bench_schedules widths              sections on the same ranks with different tp
    python -m tools.bench_schedules small --count 300   against optima that CP-SAT proves (minutes)
    python -m tools.bench_schedules in-flight           the same, one pipeline, small in-flight budgets
    python -m tools.bench_schedules cost                CPU milliseconds over four decades of batch sizes

Costs are linear and transfers take no time; `tools/schedule_mixes.py` has the mixes. Prints Markdown; `--json
FILE` writes the table.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from secc.alloc.exact.optimal_schedule import solve_schedule
from secc.bounds.bounds import one_order_bound_of_work, schedule_bound, schedule_bound_of_work
from secc.bounds.work import BatchWork
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, compute_kinds
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.runtime.validation.full_check import check_schedule
from tools import schedule_mixes
from tools.benchmark_table import BenchmarkTable, add_json_option

IMAGE_SHARES = (0.10, 0.33, 0.75)  # of the samples
UPSTREAM_LOADS = (0.6, 0.8, 1.0)  # work of an upstream rank over that of a rank of the consumer


def build_case(
    kind: str, images: float, load: float, count: int, encoders: int, replicas: int, seed: int
) -> tuple[Plan, list[SampleMeta]]:
    """Builds a plan of one kind and a batch for it."""
    if kind == "teacher → student":
        samples = schedule_mixes.distillation_batch(count, seed)
        return schedule_mixes.teacher_student_plan(samples, encoders, replicas, load), samples
    samples = schedule_mixes.multimodal_batch(
        count, images, seed, audio=0.2 if kind == "two encoders" else 0.0
    )
    makers: dict[str, Callable[..., Plan]] = {
        "encoder → LM": schedule_mixes.vlm_plan,
        "frozen encoder → LM": partial(schedule_mixes.vlm_plan, mode="forward"),
        "two encoders": schedule_mixes.omni_plan,
        "two consumers": schedule_mixes.shared_encoder_plan,
    }
    return makers[kind](samples, encoders, replicas, load), samples


OVER_BOUND = "Modelled step over its certified lower bound, [mean, worst] of the batches. "
IN_ONE_ORDER = (
    "The third number of a whole backward is the mean over the bound on steps in which all stages take "
    "micro-batches in one order. "
)
IN_STAGES = (
    "A language model in P stages on 8 replicas; columns are the kind of backward (in one piece or split in "
    "two equal parts) and the in-flight budget. "
)


# -- time over the bound


def print_quality(seeds: int, json_file: Path | None) -> None:
    """Prints kinds of plans, mixes, loads and numbers of encoders: mean/worst of both orders over the
    bound."""
    table = BenchmarkTable(
        ("sections", "N", "replicas", "P(image)", "load upstream", "wavefront", "dataset order"),
        OVER_BOUND
        + "`replicas` are those of the upstream section and of the critical one; `load upstream` is the "
        "work of an upstream rank over that of a rank of the critical section.",
        json_file,
    )
    for kind, images, load, count, encoders, replicas in quality_settings():
        found = [
            _ratios_to_bound(*build_case(kind, images, load, count, encoders, replicas, seed))
            for seed in range(seeds)
        ]
        cells = [f"{mean(column):.3f}/{max(column):.3f}" for column in zip(*found, strict=True)]
        share = "" if kind == "teacher → student" else f"{images:.2f}"
        table.add_row(kind, count, f"{encoders}+{replicas}", share, f"{load:.0%}", *cells)


def quality_settings() -> Iterator[tuple[str, float, float, int, int, int]]:
    """(kind, P(image), load, samples, ranks upstream, replicas)."""
    for images in IMAGE_SHARES:
        for load in UPSTREAM_LOADS:
            yield "encoder → LM", images, load, 256, 4, 8
    for encoders in (1, 8):
        yield "encoder → LM", 0.33, 1.0, 256, encoders, 8
    for count, replicas in ((64, 8), (1024, 8), (1024, 32)):
        yield "encoder → LM", 0.33, 0.8, count, replicas // 2, replicas
    yield "encoder → LM", 1.0, 0.8, 256, 4, 8
    for kind in ("frozen encoder → LM", "two encoders", "two consumers"):
        for load in (0.8, 1.0):
            yield kind, 0.33, load, 256, 4, 8
    for load, teachers in ((0.5, 4), (0.8, 4), (0.8, 16), (1.0, 4)):
        yield "teacher → student", 0.0, load, 256, teachers, 8


def _ratios_to_bound(plan: Plan, samples: list[SampleMeta]) -> tuple[float, float]:
    bound = schedule_bound(plan, samples).ns
    wavefront, dataset = (
        schedule_with_makespan(plan, samples, order=order)[1] / bound for order in ("wavefront", "dataset")
    )
    return wavefront, dataset


PLANNED_SAMPLES, PLANNED_STAGES, PLANNED_IN_FLIGHT = (16, 32, 64, 128), (2, 4, 8), (1, 2, 4)


def print_pipelines(seeds: int, counts: Sequence[int], json_file: Path | None) -> None:
    """Prints samples per replica and stages by kind of backward and in-flight budget, at P(image) 0.33 and
    80% load: mean/worst over the bound."""
    kinds = [(split, budget) for split in (False, True) for budget in PLANNED_IN_FLIGHT]
    heads = [f"{'split' if split else 'whole'}, {budget if budget > 1 else ''}P" for split, budget in kinds]
    table = BenchmarkTable(
        ("samples per replica", "stages", *heads), OVER_BOUND + IN_STAGES + IN_ONE_ORDER, json_file
    )
    for count in counts:
        for stages in PLANNED_STAGES:
            cells = [
                _staged_ratio(
                    count, 0.33, 0.8, schedule_mixes.PipelineShape(stages, budget * stages, split), seeds
                )
                for split, budget in kinds
            ]
            table.add_row(count, stages, *cells)


def print_loads(seeds: int, mixed: Sequence[float], json_file: Path | None) -> None:
    """Prints mixes, loads and stages by kind of backward and in-flight budget, with 32 samples per replica:
    mean/worst over the bound."""
    kinds = [(split, budget) for split in (False, True) for budget in PLANNED_IN_FLIGHT]
    heads = [f"{'split' if split else 'whole'}, {budget if budget > 1 else ''}P" for split, budget in kinds]
    table = BenchmarkTable(
        ("P(image)", "load upstream", "stages", *heads),
        OVER_BOUND + IN_STAGES + IN_ONE_ORDER + "32 samples per replica.",
        json_file,
    )
    for images, load, stages in product(mixed, UPSTREAM_LOADS, PLANNED_STAGES):
        cells = [
            _staged_ratio(
                32, images, load, schedule_mixes.PipelineShape(stages, budget * stages, split), seeds
            )
            for split, budget in kinds
        ]
        table.add_row(f"{images:.2f}", f"{load:.0%}", stages, *cells)


TP_SIZES = ((1, 2), (1, 4), (2, 4), (2, 1), (4, 1))


def print_tp_sizes(seeds: int, json_file: Path | None) -> None:
    """Prints tp of an encoder and of a language model on the same 16 ranks, at P(image) 0.33 with 32 samples
    per replica of the language model, by load and images per micro-batch: mean/worst over the bound."""
    kinds = list(product((0.2, 0.6), (1, 4)))
    heads = [f"{load:.0%}, {size} a micro-batch" for load, size in kinds]
    table = BenchmarkTable(
        ("tp of encoder", "tp of language model", *heads),
        OVER_BOUND
        + "Both sections are on the same 16 ranks; columns are the encoder's load and its images per "
        "micro-batch.",
        json_file,
    )
    for encoder, language in TP_SIZES:
        cells: list[str] = []
        for load, size in kinds:
            batches = [
                schedule_mixes.multimodal_batch(32 * 16 // language, 0.33, seed) for seed in range(seeds)
            ]
            plans = [
                schedule_mixes.shared_ranks_plan(samples, 16, (encoder, language), load, size)
                for samples in batches
            ]
            found = [
                schedule_with_makespan(p, b)[1] / schedule_bound(p, b).ns
                for p, b in zip(plans, batches, strict=True)
            ]
            cells.append(f"{mean(found):.3f}/{max(found):.3f}")
        table.add_row(encoder, language, *cells)


def _staged_ratio(
    count: int, images: float, load: float, pipeline: schedule_mixes.PipelineShape, seeds: int
) -> str:
    """Mean/worst time over the bound of a language model in stages on 8 replicas, `count` samples each, with
    4 encoders, and with whole backwards the mean over the bound on steps in one order."""
    found: list[float] = []
    in_one_order: list[float] = []
    for seed in range(seeds):
        samples = schedule_mixes.multimodal_batch(8 * count, images, seed)
        plan = schedule_mixes.vlm_plan(samples, 4, 8, load, pipeline=pipeline)
        work, time = BatchWork(plan, samples), schedule_with_makespan(plan, samples)[1]
        found.append(time / schedule_bound_of_work(work).ns)
        in_one_order.append(time / one_order_bound_of_work(work).ns)
    cells = f"{mean(found):.3f}/{max(found):.3f}"
    return cells if pipeline.split else f"{cells}/{mean(in_one_order):.3f}"


# -- time over the optimum


def small_case(seed: int) -> tuple[Plan, list[SampleMeta]]:
    """A random plan of any kind with 5 to 10 samples; some are pipelines of 2 to 4 stages, with split
    backwards or not."""
    r = random.Random(f"small {seed}")
    kind = r.choice(
        [
            "encoder → LM",
            "frozen encoder → LM",
            "two encoders",
            "two consumers",
            "teacher → student",
            *["pipeline"] * 3,
        ]
    )
    images = r.choice([0.33, 0.5, 0.75])
    load = r.choice([0.5, 0.8, 1.0])
    count = r.randint(5, 10)
    upstream = r.randint(1, 2)
    replicas = r.randint(1, 3)
    if kind != "pipeline":
        return build_case(kind, images, load, count, upstream, replicas, seed)
    samples, stages = schedule_mixes.multimodal_batch(count, images, seed), r.randint(2, 4)
    staged = schedule_mixes.PipelineShape(stages, r.choice([1, 2, 4]) * stages, r.random() < 0.5)
    return schedule_mixes.vlm_plan(samples, upstream, min(2, replicas), load, pipeline=staged), samples


def print_small(count: int, limit: float, json_file: Path | None) -> None:
    """Prints the order against optima that CP-SAT proves within `limit`, and the other batches against the
    best schedule that CP-SAT found and against its bound.

    `proven` has the plans without and with pipelines.
    """
    proven, bounds, open_cases = (list[float](), list[float]()), list[float](), list[tuple[float, float]]()
    for seed in range(count):
        plan, samples = small_case(seed)
        work, order = BatchWork(plan, samples), schedule_with_makespan(plan, samples)[1]
        bound = schedule_bound(plan, samples).ns
        exact = solve_schedule(work, limit, hint_ns=order)
        if exact is not None and exact.is_optimal:
            proven[len(plan.sections) > len(plan.pipelines)].append(order / exact.step_ns)
            bounds.append(exact.step_ns / bound)
        else:  # None: nothing as short as the order was found
            open_cases.append(
                (order / exact.step_ns, order / exact.bound_ns) if exact else (1.0, order / bound)
            )
    table = BenchmarkTable(
        ("ratio", "instances", "median", "90%", "95%", "worst"),
        f"Random batches of 5 to 10 samples; CP-SAT proved {len(bounds)} of {count} optima.",
        json_file,
    )
    rows = {
        "order over optimum": [*proven[0], *proven[1]],
        "... without pipelines": proven[0],
        "... with pipelines": proven[1],
    }
    rows["optimum over bound"] = bounds
    if open_cases:
        best, bound = zip(*open_cases, strict=True)
        rows |= {
            "not proven: order over the best found": list(best),
            "not proven: order over the bound": list(bound),
        }
    for name, values in rows.items():
        table.add_row(name, len(values), *(_quantile_cells(values) if values else [""] * 4))


IN_FLIGHT_SAMPLES, IN_FLIGHT_STAGES = 5, (2, 4)  # more samples are seldom proven


def print_in_flight(count: int, limit: float, depths: Sequence[int], json_file: Path | None) -> None:
    """Prints pipelines with small in-flight budgets, `count` batches each: mean/worst of the optimum over the
    bound and of the order over the optimum.

    One replica with 5 samples and an encoder of its own at 80% load. Optima that CP-SAT does not prove within
    `limit` are left out.
    """
    ratios = ("optimum over bound", "order over optimum", "order over bound")
    table = BenchmarkTable(
        ("stages", "backward", "in-flight", "proven", *ratios),
        "One pipeline replica, 5 samples, against optima that CP-SAT proves; [mean, worst] of the batches.",
        json_file,
    )
    for stages, split, budget in product(depths, (False, True), (1, 2)):
        found = list[tuple[float, float, float]]()
        for seed in range(count):
            batch = schedule_mixes.multimodal_batch(IN_FLIGHT_SAMPLES, 0.33, seed)
            plan = schedule_mixes.vlm_plan(
                batch, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(stages, budget * stages, split)
            )
            order, bound = schedule_with_makespan(plan, batch)[1], schedule_bound(plan, batch).ns
            exact = solve_schedule(BatchWork(plan, batch), limit, hint_ns=order)
            if exact is not None and exact.is_optimal:
                found.append((exact.step_ns / bound, order / exact.step_ns, order / bound))
        cells = [f"{mean(column):.3f}/{max(column):.3f}" for column in zip(*found, strict=True)] or [""] * 3
        name, held = "split" if split else "whole", f"{budget if budget > 1 else ''}P"
        table.add_row(stages, name, held, f"{len(found)} of {count}", *cells)


def _quantile_cells(values: list[float]) -> list[str]:
    values = sorted(values)
    return [f"{values[min(len(values) - 1, int(len(values) * q))]:.3f}" for q in (0.5, 0.9, 0.95, 1.0)]


# -- what scheduling costs


SINGLE_RUN_TASKS = 200_000  # a batch with more tasks is timed once


def print_scheduling_cost(repeats: int, most: int, json_file: Path | None) -> None:
    """Prints CPU milliseconds of one core for the order and for the check before a step, the least of several
    runs."""
    table = BenchmarkTable(
        ("samples", "replicas", "stages", "order, ms", "us per task", "check, ms"),
        "CPU time of one core before each step: the order (micro-batches, order, programs of all ranks) and "
        f"the check. Least of {repeats} runs.",
        json_file,
    )
    for stages in (1, 2, 4, 8):
        pipeline = schedule_mixes.PipelineShape(stages, 2 * stages, stages > 1)
        largest = min(most, 131072 if stages <= 2 else 16384)
        for count, encoders, replicas in (
            (16, 1, 2),
            (128, 4, 8),
            (1024, 16, 64),
            (4096, 32, 128),
            (16384, 64, 256),
            (131072, 512, 2048),
        ):
            if count > largest:
                continue
            samples = schedule_mixes.multimodal_batch(count, 0.33, 0)
            plan = schedule_mixes.vlm_plan(samples, encoders, replicas, 0.8, pipeline=pipeline)
            jobs = sum(
                len(compute_kinds(s)) * sum(is_active(s.when, x.pattern) for x in samples)
                for s in plan.sections
            )
            times = [
                _time_scheduling(plan, samples) for _ in range(1 if jobs > SINGLE_RUN_TASKS else repeats)
            ]
            order, checked = (min(column) * 1e3 for column in zip(*times, strict=True))
            per_task = f"{1e3 * order / jobs:.1f}"
            table.add_row(count, f"{encoders}+{replicas}", stages, f"{order:.1f}", per_task, f"{checked:.1f}")


def _time_scheduling(plan: Plan, samples: list[SampleMeta]) -> tuple[float, float]:
    start = time.process_time()
    programs = schedule_with_makespan(plan, samples)[0]
    middle = time.process_time()
    check_schedule(plan, samples, programs)
    return middle - start, time.process_time() - middle


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=["quality", "pipelines", "loads", "widths", "small", "in-flight", "cost"]
    )
    parser.add_argument("--seeds", type=int, default=10, help="batches for each row of quality")
    parser.add_argument(
        "--samples",
        type=int,
        nargs="+",
        default=PLANNED_SAMPLES,
        help="samples per replica, rows of pipelines",
    )
    parser.add_argument(
        "--images",
        type=float,
        nargs="+",
        default=IMAGE_SHARES,
        help="shares of samples with images, rows of loads",
    )
    parser.add_argument(
        "--stages", type=int, nargs="+", default=IN_FLIGHT_STAGES, help="stages, rows of in-flight"
    )
    parser.add_argument(
        "--count", type=int, default=300, help="instances of small, batches of each row of in-flight"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=5.0,
        help="CP-SAT's deterministic time for each instance, about seconds",
    )
    parser.add_argument("--repeats", type=int, default=7, help="runs of cost")
    parser.add_argument("--most", type=int, default=131072, help="samples of the largest batch of cost")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    match options.what:
        case "quality":
            print_quality(options.seeds, options.json)
        case "pipelines":
            print_pipelines(options.seeds, options.samples, options.json)
        case "loads":
            print_loads(options.seeds, options.images, options.json)
        case "widths":
            print_tp_sizes(options.seeds, options.json)
        case "small":
            print_small(options.count, options.limit, options.json)
        case "in-flight":
            print_in_flight(options.count, options.limit, options.stages, options.json)
        case _:
            print_scheduling_cost(options.repeats, options.most, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
