"""Measures the wavefront order: time over the certified bound, time over the proven optimum of small batches, and what ordering costs.

python -m tools.bench_schedules quality            mixes and loads, mean and worst of ten seeds, as a table
python -m tools.bench_schedules small --count 300  against optima proven by CP-SAT (minutes)
python -m tools.bench_schedules cost               seconds of one core over four decades of batch sizes

Costs are linear and transfers take no time; `tools/mixes.py` has the mixes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from secc.alloc.exact_schedule import solve
from secc.runtime.check import check
from secc.runtime.plan import Plan
from secc.runtime.program import SampleMeta
from secc.runtime.wavefront import timed_schedule
from secc.schedule.bounds import schedule_bound
from secc.schedule.work import Work
from tools import mixes

Case = Callable[[int], tuple[Plan, list[SampleMeta]]]  # of a seed


def case(kind: str, images: float, load: float, count: int, encoders: int, replicas: int, seed: int) -> tuple[Plan, list[SampleMeta]]:
    """A plan of one kind and a batch for it."""
    if kind == "teacher → student":
        samples = mixes.distillation(count, seed)
        return mixes.teacher_student(samples, encoders, replicas, load), samples
    samples = mixes.multimodal(count, images, seed, audio=0.2 if kind == "two encoders" else 0.0)
    makers: dict[str, Callable[..., Plan]] = {
        "encoder → LM": mixes.vlm,
        "frozen encoder → LM": partial(mixes.vlm, mode="forward"),
        "two encoders": mixes.omni,
        "two consumers": mixes.shared_encoder,
    }
    return makers[kind](samples, encoders, replicas, load), samples


# -- time over the bound ----------------------------------------------------------------------------------------------------------


def quality(seeds: int) -> None:
    """Rows of kinds, mixes, loads and numbers of encoders: mean/worst of both orders over the bound."""
    print("| sections | N | replicas | P(image) | load upstream | wavefront | dataset order |\n| --- | --- | --- | --- | --- | --- | --- |")
    for kind, images, load, count, encoders, replicas in settings():
        found = [_ratios(*case(kind, images, load, count, encoders, replicas, seed)) for seed in range(seeds)]
        cells = [f"{mean(column):.3f}/{max(column):.3f}" for column in zip(*found, strict=True)]
        share = "" if kind == "teacher → student" else f"{images:.2f}"
        print(f"| {kind} | {count} | {encoders}+{replicas} | {share} | {load:.0%} | {' | '.join(cells)} |", flush=True)


def settings() -> Iterator[tuple[str, float, float, int, int, int]]:
    """(kind, P(image), load, samples, ranks upstream, replicas)."""
    for images in (0.10, 0.33, 0.75):
        for load in (0.6, 0.8, 1.0):
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


def _ratios(plan: Plan, samples: list[SampleMeta]) -> tuple[float, float]:
    bound = schedule_bound(plan, samples).ns
    wavefront, dataset = (timed_schedule(plan, samples, order=order)[1] / bound for order in ("wavefront", "dataset"))
    return wavefront, dataset


# -- time over the optimum --------------------------------------------------------------------------------------------------------


def small_case(seed: int) -> tuple[Plan, list[SampleMeta]]:
    """A random plan of any kind with 5 to 10 samples."""
    r = random.Random(f"small {seed}")
    kind = r.choice(["encoder → LM", "frozen encoder → LM", "two encoders", "two consumers", "teacher → student"])
    return case(kind, r.choice([0.33, 0.5, 0.75]), r.choice([0.5, 0.8, 1.0]), r.randint(5, 10), r.randint(1, 2), r.randint(1, 3), seed)


def small(count: int, limit: float) -> None:
    """The order against optima that CP-SAT proves within `limit`; the others are counted against its best and its bound."""
    proven, bounds, open_cases = list[float](), list[float](), list[tuple[float, float]]()
    for seed in range(count):
        plan, samples = small_case(seed)
        work, order = Work(plan, samples), timed_schedule(plan, samples)[1]
        bound = schedule_bound(plan, samples).ns
        exact = solve(work, limit, hint_ns=order)
        if exact is not None and exact.optimal:
            proven.append(order / exact.ns)
            bounds.append(exact.ns / bound)
        else:  # None: nothing as short as the order was found
            open_cases.append((order / exact.ns, order / exact.bound_ns) if exact else (1.0, order / bound))
    print(f"{len(proven)} of {count} optima proven.\n\n| | median | 90% | 95% | worst |\n| --- | --- | --- | --- | --- |")
    print(f"| order over optimum | {_spread(proven)} |\n| optimum over bound | {_spread(bounds)} |")
    if open_cases:
        best, bound = zip(*open_cases, strict=True)
        print(f"| not proven: order over the best found | {_spread(list(best))} |")
        print(f"| not proven: order over the bound | {_spread(list(bound))} |")


def _spread(values: list[float]) -> str:
    values = sorted(values)
    return " | ".join(f"{values[min(len(values) - 1, int(len(values) * q))]:.3f}" for q in (0.5, 0.9, 0.95, 1.0))


# -- what ordering costs ----------------------------------------------------------------------------------------------------------


def cost(repeats: int) -> None:
    """Milliseconds of one core for the order and for the check before the step, the least of some runs."""
    print("| samples | replicas | order, ms | check, ms |\n| --- | --- | --- | --- |")
    for count, encoders, replicas in ((16, 1, 2), (128, 4, 8), (1024, 16, 64), (4096, 32, 128), (16384, 64, 256)):
        plan, samples = case("encoder → LM", 0.33, 0.8, count, encoders, replicas, 0)
        times = [_timed(plan, samples) for _ in range(repeats)]
        order, checked = (min(column) * 1e3 for column in zip(*times, strict=True))
        print(f"| {count} | {encoders}+{replicas} | {order:.1f} | {checked:.1f} |", flush=True)


def _timed(plan: Plan, samples: list[SampleMeta]) -> tuple[float, float]:
    start = time.process_time()
    programs = timed_schedule(plan, samples)[0]
    middle = time.process_time()
    check(plan, samples, programs)
    return middle - start, time.process_time() - middle


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "small", "cost"])
    parser.add_argument("--seeds", type=int, default=10, help="batches for each row of quality")
    parser.add_argument("--count", type=int, default=300, help="instances of small")
    parser.add_argument("--limit", type=float, default=5.0, help="CP-SAT's deterministic time for each instance, about seconds")
    parser.add_argument("--repeats", type=int, default=7, help="runs of cost")
    options = parser.parse_args(arguments)
    match options.what:
        case "quality":
            quality(options.seeds)
        case "small":
            small(options.count, options.limit)
        case _:
            cost(options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
