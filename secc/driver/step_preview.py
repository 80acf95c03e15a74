"""One step of a fresh plan, simulated: the picture in its report, `trace.json`, and how busy it keeps each
section.

A plan's prediction rests on closed forms; this is what its ranks would do, with samples that have the sizes
of the dataset's. Samples' numbers are those of the drawn batch: the dataset itself is not read again. Steps
of very many computations are left to `secc simulate`, so that compilation stays quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secc.driver.compile import Compiled
from secc.ir.analysis import sample_sizes as drawn_samples
from secc.ir.analysis.dataflow import abouts, evaluate
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.runtime.monitoring.run_summary import MIX, sample_seconds
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta
from secc.simulate.chrome_trace import chrome
from secc.simulate.drawing import figure
from secc.simulate.events import Simulated
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady
from secc.simulate.step_measures import Measures, measure

MOST = 10_000  # computations of all ranks in a step that is simulated here
TRACE = "trace.json"
ABOUT = "one simulated step; samples are numbered as drawn from the dataset's sizes, not by the dataset"


@dataclass(frozen=True)
class Preview:
    """The plan with what its simulated step says, the drawing for its page, and files to put beside it; empty
    where none was simulated."""

    plan: Plan
    drawing: str
    files: dict[str, str]


def preview(compiled: Compiled) -> Preview:
    """Simulate a step of a compiled plan. Without statistics of samples, or with too many computations, only
    the plan comes back."""
    graph = graph_of(compiled.module)
    plan = with_mix(compiled.plan, graph)
    batches = drawn_samples.drawn(graph, plan.global_batch, 1)
    if not batches or sum(computations(plan, s) for s in plan.sections) > MOST:
        return Preview(plan, "", {})
    samples, schedule = next(steady(plan, [complete(graph, batches[0])]))
    step = simulate(plan, samples, schedule)
    measures = measure(step)
    known = dataclasses.replace(plan, prediction=plan.prediction | _prediction(measures))
    return Preview(known, figure(step, measures), {TRACE: trace_text(step)})


def with_mix(plan: Plan, graph: GraphOp) -> Plan:
    """The plan with what the dataset's samples cost it in the mean, from which a run tells that its samples
    are others."""
    batches = drawn_samples.drawn(graph, drawn_samples.MOST, 1)
    mix = {MIX: sample_seconds(plan, complete(graph, batches[0]))} if batches else {}
    return dataclasses.replace(plan, prediction=plan.prediction | mix)


def complete(graph: GraphOp, samples: Sequence[SampleMeta]) -> list[SampleMeta]:
    """The samples with the sizes that inputs' values decide, which nobody has drawn: about what they were in
    the captures."""
    known = abouts(graph)
    return [
        dataclasses.replace(
            s, sizes={**s.sizes, **{n: round(evaluate(e, s.sizes)) for n, e in known.items()}}
        )
        for s in samples
    ]


def computations(plan: Plan, section: Section) -> int:
    """How many computations the ranks of a section have in a step at most: of micro-batches of as few samples
    as the plan has."""
    passes = 1 if section.mode == "forward" else 2
    return passes * section.mesh.tp * -(-plan.global_batch // max(1, section.micro_batch))


def trace_text(step: Simulated) -> str:
    """The step as a Chrome trace that says what its samples are."""
    return json.dumps(chrome([step]) | {"otherData": {"about": ABOUT}}, separators=(",", ":")) + "\n"


def _prediction(measures: Measures) -> dict[str, Any]:
    """What `simulate --json` says of a step, under the same names."""
    found = dataclasses.asdict(measures)
    return {"sections": found.pop("sections"), "simulated": found}
