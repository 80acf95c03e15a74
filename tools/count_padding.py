"""Measures what padding costs under the scheduler's micro-batches, and what packing could gain at most.

    python -m tools.count_padding       prints a table; `--json FILE` writes it

A decoder like Qwen3-8B trains on replicas of one H100 (2 FLOPs for each parameter and token, attention of all
earlier tokens, at 60% of 989 TFLOP/s, 4 ms for issuing each direction of a micro-batch; the backward takes
twice the forward). Its micro-batches are those of the scheduler: runs of samples of similar length, cut by
dynamic programming, that fit the memory of a number of tokens. *Padded* rows of a micro-batch are as long as
its longest; *packed* ones lie side by side without padding, attend to themselves, and are cut and assigned by
the same scheduler with the same memory. Both are simulated for the same batches.

Lengths are assumptions: the lognormal ones of the reference workloads (`tools/workloads/parts/mix.py`) and of
instructions (mean 300), the tail of `tools/workloads/parts/long_texts.py`, and a mix of 90% of instructions
with 10% of that tail.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from secc.runtime.plan.schema import Cost, Mesh, Section, Symbol
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.scheduler import schedule_with_makespan
from tools import schedule_mixes
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.workloads.parts import mix

FLOPS_PER_NS = 593_400  # 60% of 989 TFLOP/s
TOKEN_NS = 2 * 8_000_000_000 // FLOPS_PER_NS
PAIRS_PER_NS = FLOPS_PER_NS // (4 * 36 * 4096)  # attending (query, key) pairs of 36 layers of width 4096
ISSUE_NS = 4_000_000
MOST_SAMPLES, BATCHES = 32, 3
MEMORY_TOKENS = (8192, 32768, 262_144)
SAMPLES_PER_REPLICA = (8, 32)
REPLICAS = 8
SYMBOLS = (
    Symbol("B", "rows", "ids", 0),
    Symbol("S", "width", "ids", 1),
    Symbol("T", "rows", "ids", 1),  # the sum of lengths
    Symbol("Q", "rows", "ids", 1),  # the sum of their squares
)


def _tail(r: random.Random) -> int:
    drawn, ratio = r.random(), 4096 / 262_144
    return round(4096 / (1 - drawn * (1 - ratio)))


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "instructions, mean 300": lambda r: mix.lognormal(r, 300, 8, 4096),
    "texts, mean 1,500": lambda r: mix.lognormal(r, 1500, 1, 8192),
    "texts of distillation, mean 3,000": lambda r: mix.lognormal(r, 3000, 1, 8192),
    "tail from 4k to 256k": _tail,
    "instructions with 10% of the tail": lambda r: (
        _tail(r) if r.random() < 0.1 else mix.lognormal(r, 300, 8, 4096)
    ),
}


def _section(tokens: str, pairs: str, memory: int) -> Section:
    """The decoder; expressions are those of the tokens and attending pairs of a micro-batch."""
    forward = f"{ISSUE_NS} + {TOKEN_NS}*({tokens}) + ({pairs})//{PAIRS_PER_NS}"
    cost = Cost(forward, f"2*({forward})", saved=tokens)
    ranks = Mesh(tuple(range(REPLICAS)), REPLICAS)
    return Section("lm", "", "train", (), (), (), ranks, MOST_SAMPLES, cost=cost, room_bytes=memory)


def simulate_lengths(lengths: list[int], memory: int) -> tuple[float, float]:
    """(padding over tokens, padded over packed step) of one global batch."""
    samples = [
        SampleMeta(i, frozenset(), {"B": 1, "S": n, "T": n, "Q": n * n}) for i, n in enumerate(lengths)
    ]
    steps = list[int]()
    padding = 0.0
    for tokens, pairs in (("B*S", "B*S*S//2"), ("T", "Q//2")):
        plan = replace(schedule_mixes.build_plan([_section(tokens, pairs, memory)], []), symbols=SYMBOLS)
        schedule, makespan = schedule_with_makespan(plan, samples)
        steps.append(makespan)
        if tokens != "T":
            sets = [[lengths[p] for p in m.samples] for m in schedule.micro_batches["lm"]]
            padding = sum(max(s) * len(s) for s in sets) / sum(lengths) - 1
    return padding, steps[0] / steps[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    columns = ("lengths", "samples a replica", "tokens that fit", "padding", "padded over packed step")
    about = (
        "Padding under the scheduler's micro-batches over all tokens, and steps in the simulator; means of 3."
    )
    table = BenchmarkTable(columns, about, parser.parse_args().json)
    for name, draw in LENGTHS.items():
        for count in SAMPLES_PER_REPLICA:
            for memory in MEMORY_TOKENS:
                found = list[tuple[float, float]]()
                for seed in range(BATCHES):
                    r = random.Random(f"{name} {count} {seed}")
                    found.append(simulate_lengths([draw(r) for _ in range(count * REPLICAS)], memory))
                padding, ratio = (mean(values) for values in zip(*found, strict=True))
                table.add_row(name, count, memory, f"{padding:.1%}", f"{ratio:.3f}")


if __name__ == "__main__":
    main()
