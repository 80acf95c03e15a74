"""What ranks do beside computing, measured in steps that they train for real (`secc.cluster.Overheads`).

The model is compiled for processes of this machine, sections apart where they can be, and trained for some
steps with a trace. What a rank's program takes beside its forwards, backwards and messages is overhead of its
jobs. Planning, the optimizer and the norm have events of their own. What all ranks do together (metadata,
totals) lasts as long as on the rank that comes to it last, which waits for nobody. Figures are medians over
the steps behind the first ones, at the processor's speed at which blocks were timed (`secc.profile.speed_gauge`).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from secc.bounds.traffic import Traffic
from secc.cluster import Overheads
from secc.driver.compile import Compiled, Options, compile_model
from secc.errors import UserError
from secc.profile.measured_training import train
from secc.runtime.plan.schema import Plan

STEPS, WARM = 20, 4
JOBS, MESSAGES, TOGETHER = ("F", "B", "W"), ("SEND", "RECV"), ("METADATA", "TOTALS")
UPDATE = ("NORM", "OPTIMIZER")
PHASES = ("METADATA", "PLAN", "PROGRAM", "GRADIENTS", "NORM", "TOTALS", "OPTIMIZER", "GAUGE")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class _Step:
    """One step of one rank, in ns: all of it, the sums of its events by kind, and how many there were."""

    whole: float
    spent: Mapping[str, float]
    count: Mapping[str, int]


def overheads(model: Path, ranks: int, costs: Path, gauge_ns: int = 0) -> Overheads:
    """Train a model for some steps on `ranks` processes here. Raises UserError where it cannot be compiled or
    trained.

    `gauge_ns` is what the gauge took when blocks were timed: at that speed of the processor overheads are
    given (0: as they are).
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, trace = Path(folder) / "plan", Path(folder) / "trace.json"
        compiled = _compiled(model, ranks, costs)
        compiled.write(plan, lambda _: "")
        trained = train(plan, compiled.plan.world_size, STEPS, Path(folder), ["--trace", str(trace)])
        found = of_trace(json.loads(trace.read_text())["traceEvents"], compiled.plan)
        return at_speed(found, gauge_ns / (trained.gauge_ns(WARM) or gauge_ns or 1) or 1.0)


def at_speed(found: Overheads, slower: float) -> Overheads:
    """The same on a processor that takes so many times as long."""
    return replace(
        found,
        **{
            name: round(slower * getattr(found, name))
            for name in ("job", "message", "tensor", "sample", "step")
        },
    )


def _compiled(model: Path, ranks: int, costs: Path) -> Compiled:
    """The model for processes of this machine; sections apart, so that messages pass, where there are ranks
    enough."""
    options = Options(cluster=f"local:{ranks}", costs=str(costs))
    try:
        return compile_model(model, replace(options, strategy="apart"))
    except UserError:
        return compile_model(model, options)


def of_trace(events: Sequence[Event], plan: Plan) -> Overheads:
    """The overheads in the trace of a run of `plan`. One that the run has no example of is as the plan's
    cluster assumes it."""
    steps = list(zip(*(list(_steps(events, rank))[WARM:] for rank in range(plan.world_size)), strict=True))
    assumed = Traffic(plan).overheads
    sent = [e["dur"] * 1e3 for e in events if e.get("cat") == "SEND"]
    return Overheads(
        job=_median(
            sum(map(_beside, ranks)) / max(1, sum(s.count[k] for s in ranks for k in JOBS)) for ranks in steps
        ),
        message=_median(sent) if sent else assumed.message,
        tensor=_tensor(steps, Traffic(plan)),
        sample=_median(max(s.spent["PLAN"] for s in ranks) / plan.global_batch for ranks in steps),
        step=_median(_of_step(ranks) for ranks in steps),
        label="measured",
    )


def _steps(events: Sequence[Event], rank: int) -> Iterator[_Step]:
    """The steps of a rank, each from the start of its program to that of the next one."""
    own = sorted(
        (e for e in events if e.get("pid") == rank and e.get("ph") == "X" and e["tid"] == 0),
        key=lambda e: e["ts"],
    )
    starts = [e["ts"] for e in own if e["cat"] == "PROGRAM"]
    for start, stop in pairwise(starts):
        spent, count = defaultdict[str, float](float), Counter[str]()
        for e in own:
            if start <= e["ts"] < stop:
                spent[e["cat"]] += e["dur"] * 1e3
                count[e["cat"]] += 1
        yield _Step((stop - start) * 1e3, spent, count)


def _beside(step: _Step) -> float:
    """What a rank's program takes beside its jobs and messages."""
    return step.spent["PROGRAM"] - sum(step.spent[kind] for kind in (*JOBS, *MESSAGES))


def _of_step(ranks: Sequence[_Step]) -> float:
    """What all do together, on the rank that waits least, and what is in no event."""
    rest = min(s.whole - sum(s.spent[phase] for phase in PHASES) for s in ranks)
    return rest + sum(min(s.spent[phase] for s in ranks) for phase in TOGETHER)


def _tensor(steps: Sequence[Sequence[_Step]], traffic: Traffic) -> int:
    """For each parameter, what the norm and the optimizer take beyond memory's part, on the rank where that
    is most."""
    found = [0]
    for rank in range(traffic.plan.world_size):
        if count := len(traffic.updated(rank)):
            spent = _median(sum(ranks[rank].spent[kind] for kind in UPDATE) for ranks in steps)
            found.append(max(0, spent - traffic.updating_ns(rank)) // count)
    return max(found)


def _median(values: Iterable[float]) -> int:
    """The middle value in whole ns, none below 0."""
    return max(0, round(median(values)))
