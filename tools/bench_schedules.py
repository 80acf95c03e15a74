"""Measures the wavefront order: time over the certified bound, time over the proven optimum of small batches,
and what ordering costs.

python -m tools.bench_schedules quality            mixes and loads, mean and worst of ten seeds, as a table
python -m tools.bench_schedules pipelines          the same of language models in stages, by samples, stages,
room and kind of backward python -m tools.bench_schedules loads              the same of 32 samples a replica,
by mixes, loads, stages and room python -m tools.bench_schedules widths             the same of encoders and
language models on the same ranks, in replicas of other widths python -m tools.bench_schedules small --count
300  against optima proven by CP-SAT (minutes) python -m tools.bench_schedules rooms --count 20    the same of
pipelines alone, by stages and room python -m tools.bench_schedules cost               milliseconds of one
core over four decades of batch sizes

Costs are linear and transfers take no time; `tools/schedule_mixes.py` has the mixes. Prints Markdown.
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
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from secc.alloc.exact.optimal_schedule import solve_schedule
from secc.bounds.bounds import schedule_bound
from secc.bounds.work import BatchWork
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, compute_kinds, is_active
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.runtime.validation.full_check import check_schedule
from tools import schedule_mixes

BatchCase = Callable[[int], tuple[Plan, list[SampleMeta]]]  # of a seed
IMAGE_SHARES, UPSTREAM_LOADS = (
    (0.10, 0.33, 0.75),
    (0.6, 0.8, 1.0),
)  # shares of samples with images; work of a rank upstream over one of the consumer


def build_case(
    kind: str, images: float, load: float, count: int, encoders: int, replicas: int, seed: int
) -> tuple[Plan, list[SampleMeta]]:
    """A plan of one kind and a batch for it."""
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


# -- time over the bound
# ----------------------------------------------------------------------------------------------------------


def print_quality(seeds: int) -> None:
    """Rows of kinds, mixes, loads and numbers of encoders: mean/worst of both orders over the bound."""
    print(
        "| sections | N | replicas | P(image) | load upstream | wavefront | dataset order |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for kind, images, load, count, encoders, replicas in quality_settings():
        found = [
            _ratios_to_bound(*build_case(kind, images, load, count, encoders, replicas, seed))
            for seed in range(seeds)
        ]
        cells = [f"{mean(column):.3f}/{max(column):.3f}" for column in zip(*found, strict=True)]
        share = "" if kind == "teacher → student" else f"{images:.2f}"
        print(
            f"| {kind} | {count} | {encoders}+{replicas} | {share} | {load:.0%} | {' | '.join(cells)} |",
            flush=True,
        )


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


def print_pipelines(seeds: int, counts: Sequence[int]) -> None:
    """Rows of samples a replica and stages, columns of backwards and room, at P(image) 0.33 and 80% load:
    mean/worst over the bound."""
    kinds = [(split, room) for split in (False, True) for room in PLANNED_IN_FLIGHT]
    heads = [f"{'split' if split else 'whole'}, {room if room > 1 else ''}P" for split, room in kinds]
    print(f"| samples a replica | stages | {' | '.join(heads)} |\n| --- | --- |{' --- |' * len(kinds)}")
    for count in counts:
        for stages in PLANNED_STAGES:
            cells = [
                _staged_ratio(
                    count, 0.33, 0.8, schedule_mixes.PipelineShape(stages, room * stages, split), seeds
                )
                for split, room in kinds
            ]
            print(f"| {count} | {stages} | {' | '.join(cells)} |", flush=True)


def print_loads(seeds: int, mixed: Sequence[float]) -> None:
    """Rows of mixes, loads and stages, columns of backwards and room, with 32 samples a replica: mean/worst
    over the bound."""
    kinds = [(split, room) for split in (False, True) for room in PLANNED_IN_FLIGHT]
    heads = [f"{'split' if split else 'whole'}, {room if room > 1 else ''}P" for split, room in kinds]
    print(
        f"| P(image) | load upstream | stages | {' | '.join(heads)} |\n| --- | --- | --- |{' --- |' * len(kinds)}"
    )
    for images, load, stages in product(mixed, UPSTREAM_LOADS, PLANNED_STAGES):
        cells = [
            _staged_ratio(32, images, load, schedule_mixes.PipelineShape(stages, room * stages, split), seeds)
            for split, room in kinds
        ]
        print(f"| {images:.2f} | {load:.0%} | {stages} | {' | '.join(cells)} |", flush=True)


TP_SIZES = ((1, 2), (1, 4), (2, 4), (2, 1), (4, 1))


def print_tp_sizes(seeds: int) -> None:
    """Rows of the ranks in an encoder's and a language model's replicas, all on 16 ranks, at P(image) 0.33
    with 32 samples for each replica of the language model; columns of loads and of images in a micro-batch:
    mean/worst over the bound."""
    kinds = list(product((0.2, 0.6), (1, 4)))
    heads = [f"{load:.0%}, {size} a micro-batch" for load, size in kinds]
    print(
        f"| tp of encoder | tp of language model | {' | '.join(heads)} |\n| --- | --- |{' --- |' * len(kinds)}"
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
        print(f"| {encoder} | {language} | {' | '.join(cells)} |", flush=True)


def _staged_ratio(
    count: int, images: float, load: float, pipeline: schedule_mixes.PipelineShape, seeds: int
) -> str:
    """Mean/worst time over the bound of a language model in stages on 8 replicas, `count` samples each, with
    4 encoders."""
    found: list[float] = []
    for seed in range(seeds):
        samples = schedule_mixes.multimodal_batch(8 * count, images, seed)
        plan = schedule_mixes.vlm_plan(samples, 4, 8, load, pipeline=pipeline)
        found.append(schedule_with_makespan(plan, samples)[1] / schedule_bound(plan, samples).ns)
    return f"{mean(found):.3f}/{max(found):.3f}"


# -- time over the optimum
# --------------------------------------------------------------------------------------------------------


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
    images, load, count, upstream, replicas = (
        r.choice([0.33, 0.5, 0.75]), r.choice([0.5, 0.8, 1.0]), r.randint(5, 10), r.randint(1, 2), r.randint(1, 3),
    )  # fmt: skip
    if kind != "pipeline":
        return build_case(kind, images, load, count, upstream, replicas, seed)
    samples, stages = schedule_mixes.multimodal_batch(count, images, seed), r.randint(2, 4)
    staged = schedule_mixes.PipelineShape(stages, r.choice([1, 2, 4]) * stages, r.random() < 0.5)
    return schedule_mixes.vlm_plan(samples, upstream, min(2, replicas), load, pipeline=staged), samples


def print_small(count: int, limit: float) -> None:
    """The order against optima that CP-SAT proves within `limit`; the others are counted against its best and
    its bound.

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
    print(
        f"{len(bounds)} of {count} optima proven.\n\n| | instances | median | 90% | 95% | worst |\n| --- | --- | --- | --- | --- | --- |"
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
        print(f"| {name} | {len(values)} | {_quantile_cells(values) if values else ' | | | '} |")


IN_FLIGHT_SAMPLES, IN_FLIGHT_STAGES = 5, (2, 4)  # more samples are seldom proven


def print_in_flight(count: int, limit: float, depths: Sequence[int]) -> None:
    """Pipelines with little room, so many batches each: what the optimum is over the bound and the order over
    the optimum, mean/worst.

    One replica with 5 samples and an encoder of its own at 80% load. Optima that CP-SAT does not prove within
    `limit` are left out.
    """
    print(
        "| stages | backward | room | proven | optimum over bound | order over optimum | order over bound |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for stages, split, room in product(depths, (False, True), (1, 2)):
        found = list[tuple[float, float, float]]()
        for seed in range(count):
            batch = schedule_mixes.multimodal_batch(IN_FLIGHT_SAMPLES, 0.33, seed)
            plan = schedule_mixes.vlm_plan(
                batch, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(stages, room * stages, split)
            )
            order, bound = schedule_with_makespan(plan, batch)[1], schedule_bound(plan, batch).ns
            exact = solve_schedule(BatchWork(plan, batch), limit, hint_ns=order)
            if exact is not None and exact.is_optimal:
                found.append((exact.step_ns / bound, order / exact.step_ns, order / bound))
        cells = [f"{mean(column):.3f}/{max(column):.3f}" for column in zip(*found, strict=True)] or [""] * 3
        name, held = "split" if split else "whole", f"{room if room > 1 else ''}P"
        print(f"| {stages} | {name} | {held} | {len(found)} of {count} | {' | '.join(cells)} |", flush=True)


def _quantile_cells(values: list[float]) -> str:
    values = sorted(values)
    return " | ".join(
        f"{values[min(len(values) - 1, int(len(values) * q))]:.3f}" for q in (0.5, 0.9, 0.95, 1.0)
    )


# -- what ordering costs
# ----------------------------------------------------------------------------------------------------------


SINGLE_RUN_TASKS = 200_000  # from so many on one run is enough


def print_scheduling_cost(repeats: int, most: int) -> None:
    """Milliseconds of one core for the order and for the check before the step, the least of some runs; fewer
    runs of large ones."""
    print(
        "| samples | replicas | stages | order, ms | us a job | check, ms |\n| --- | --- | --- | --- | --- | --- |"
    )
    for stages in (1, 2, 4, 8):
        pipeline, largest = (
            schedule_mixes.PipelineShape(stages, 2 * stages, stages > 1),
            min(most, 131072 if stages <= 2 else 16384),
        )
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
            print(
                f"| {count} | {encoders}+{replicas} | {stages} | {order:.1f} | {1e3 * order / jobs:.1f} | {checked:.1f} |",
                flush=True,
            )


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
    parser.add_argument("what", choices=["quality", "pipelines", "loads", "widths", "small", "rooms", "cost"])
    parser.add_argument("--seeds", type=int, default=10, help="batches for each row of quality")
    parser.add_argument(
        "--samples", type=int, nargs="+", default=PLANNED_SAMPLES, help="samples a replica, rows of pipelines"
    )
    parser.add_argument(
        "--images",
        type=float,
        nargs="+",
        default=IMAGE_SHARES,
        help="shares of samples with images, rows of loads",
    )
    parser.add_argument(
        "--stages", type=int, nargs="+", default=IN_FLIGHT_STAGES, help="stages, rows of rooms"
    )
    parser.add_argument(
        "--count", type=int, default=300, help="instances of small, batches of each row of rooms"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=5.0,
        help="CP-SAT's deterministic time for each instance, about seconds",
    )
    parser.add_argument("--repeats", type=int, default=7, help="runs of cost")
    parser.add_argument("--most", type=int, default=131072, help="samples of the largest batch of cost")
    options = parser.parse_args(arguments)
    match options.what:
        case "quality":
            print_quality(options.seeds)
        case "pipelines":
            print_pipelines(options.seeds, options.samples)
        case "loads":
            print_loads(options.seeds, options.images)
        case "widths":
            print_tp_sizes(options.seeds)
        case "small":
            print_small(options.count, options.limit)
        case "rooms":
            print_in_flight(options.count, options.limit, options.stages)
        case _:
            print_scheduling_cost(options.repeats, options.most)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
