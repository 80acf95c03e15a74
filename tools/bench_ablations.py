"""What each part of the allocation is worth: `python -m tools.bench_ablations PLANS [ID ...]` prints a table.

PLANS is a folder with the plan of each workload in a folder of its name, as `tools.bench_baselines` leaves it. From the IR that a plan
keeps its allocation is made again in other ways, and each choice is put into the order that ranks run, on the same samples
(`secc.alloc.trial`). A figure is that step over the plan's.

solver alone: the best by closed forms, nothing tried. means only: tried on mean samples. uniform: every section on all ranks with one
micro-batch. greedy: sections apart on ranks in proportion to their work, each run in the fastest way that fits. random: the median of 20
plans that fit. without sink-boundaries: sections send what their modules return.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from secc import whatif
from secc.alloc import ahead
from secc.alloc.candidates import Workload, workload
from secc.alloc.contest import contest
from secc.alloc.evaluate import evaluate
from secc.alloc.model import solve
from secc.alloc.pins import Pins
from secc.alloc.problem import problem
from secc.alloc.trial import Trial
from secc.alloc.types import Assignment, Problem
from secc.cluster import parse
from secc.ir import samples, text
from secc.ir.dialect import GraphOp, graph_of
from secc.passes.allocate import MARGIN
from tools.bench_workloads import print_rows

COLUMNS = ("workload", "plan, s", "solver alone", "means only", "uniform", "greedy", "random", "without sink-boundaries")
SINK = "sink-boundaries"
RANDOM_PLANS, MOST_DRAWS = 20, 20_000


@dataclass(frozen=True)
class Setting:
    """A workload's problem before `allocate`, and its trial."""

    work: Workload
    asked: Problem
    trial: Trial

    def step(self, a: Assignment | None) -> float | None:
        """Seconds of a step, None for no plan or one that does not fit."""
        tried = self.trial.run(a, handed(self.asked, a)) if a is not None else None
        return tried.time_ns / 1e9 if tried is not None and tried.fits else None

    def chosen(self, trial: Trial) -> Assignment | None:
        """What `allocate` chooses by a trial."""
        found = solve(self.asked, margin=MARGIN)
        return contest(trial, self.asked, found.assignment, lambda a: handed(self.asked, a), MARGIN).assignment if found else None


def setting(graph: GraphOp, allocate: Any) -> Setting:
    cluster = parse(allocate.cluster)
    work = workload(graph, cluster, allocate.global_batch)
    asked = ahead.priced(problem(work, cluster.ranks, "auto", Pins()), work, None)
    return Setting(work, asked, Trial(work, asked, None))


def handed(asked: Problem, a: Assignment) -> Mapping[str, Sequence[int]]:
    """The ranks of the groups, one after the other."""
    found: dict[str, Sequence[int]] = {}
    for g in dict.fromkeys(a.group.values()):
        start = sum(map(len, found.values()))
        found[g] = range(start, start + asked.sections[g][a.choice[g]].ranks)
    return found


def greedy(asked: Problem) -> Assignment | None:
    """Sections apart on ranks in proportion to their work on one; None where those do not fit, or are no whole nodes."""
    alone = {s: min(c.time_ns * c.ranks for c in cs) for s, cs in asked.sections.items()}
    choice: dict[str, int] = {}
    left = asked.ranks
    for s in sorted(alone, key=lambda s: alone[s]):
        share = max(1, round(asked.ranks * alone[s] / sum(alone.values()))) if len(choice) < len(alone) - 1 else left
        fitting = [(i, c) for i, c in enumerate(asked.sections[s]) if c.ranks <= share and max(c.memory, c.memory_ahead) <= asked.capacity]
        if not fitting:
            return None
        choice[s], chosen = min(fitting, key=lambda x: (-x[1].ranks, x[1].time_ns))
        left -= chosen.ranks
    found = Assignment({s: choice[s] for s in asked.sections}, {s: s for s in asked.sections})
    return found if _legal(asked, found) else None


def _legal(asked: Problem, a: Assignment) -> bool:
    """Whether an assignment fits the memory and the nodes."""
    try:
        evaluate(asked, a)
    except ValueError:
        return False
    return True


def drawn(asked: Problem) -> list[Assignment]:
    """Random plans that fit."""
    rng, found, names = random.Random(0), list[Assignment](), list(asked.sections)
    for _ in range(MOST_DRAWS):
        choice = {s: rng.randrange(len(cs)) for s, cs in asked.sections.items()}
        group: dict[str, str] = {}
        for i, s in enumerate(names):
            same = [g for g in names[:i] if group[g] == g and asked.sections[g][choice[g]].ranks == asked.sections[s][choice[s]].ranks]
            group[s] = rng.choice([s, *same])
        if _legal(asked, a := Assignment(choice, group)):
            found.append(a)
        if len(found) == RANDOM_PLANS:
            break
    return found


def unsunk(directory: Path, graph: GraphOp) -> GraphOp | None:
    """The graph before `sink-boundaries`, with the samples of `graph`; None where the plan does not keep it."""
    dumps = sorted((directory / "ir").glob("*.mlir"))
    at = next((i for i, path in enumerate(dumps) if path.stem.partition("-")[2] == SINK), 0)
    if not at:
        return None
    before = graph_of(text.parse(dumps[at - 1].read_text()))
    before.attributes[samples.ATTRIBUTE] = graph.attributes[samples.ATTRIBUTE]
    return before


def row(name: str, plans: Path) -> list[str]:
    """The cells of a workload."""
    (allocate, *_), path = whatif.before_allocate(plans / name)
    graph = graph_of(text.parse(path.read_text(), str(path)))
    own = setting(graph, allocate)
    plan = own.step(own.chosen(own.trial))
    solved = {strategy: solve(replace(own.asked, strategy=strategy), margin=MARGIN) for strategy in ("auto", "uniform")}
    alone, uniform = (own.step(found.assignment) if found else None for found in solved.values())
    kept = graph.attributes.pop(samples.ATTRIBUTE)
    means = own.step(own.chosen(Trial(own.work, own.asked, None)))
    graph.attributes[samples.ATTRIBUTE] = kept
    times = [step for a in drawn(own.asked) if (step := own.step(a)) is not None]
    other = setting(before, allocate) if (before := unsunk(plans / name, graph)) is not None else None
    without = other.step(other.chosen(other.trial)) if other is not None else None
    found = (alone, means, uniform, own.step(greedy(own.asked)), statistics.median(times) if times else None, without)
    return [name, f"{plan:.3f}" if plan else "-", *(f"{t / plan:.2f}" if t and plan else "-" for t in found)]


def main() -> None:
    print_rows(COLUMNS, row)


if __name__ == "__main__":
    main()
