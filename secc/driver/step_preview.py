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

from secc.driver.compile import CompiledPlan
from secc.ir.analysis import sample_sizes as drawn_samples
from secc.ir.analysis.dataflow import evaluate_at_means, size_estimates
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.runtime.monitoring.run_summary import SAMPLE_SECONDS_KEY, predict_sample_seconds
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta
from secc.simulate.chrome_trace import make_chrome_trace
from secc.simulate.drawing import render_html_figure
from secc.simulate.events import SimulatedStep
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady_state_steps
from secc.simulate.step_measures import StepMeasures, measure_step

MAX_SIMULATED_COMPUTATIONS = 10_000  # computations of all ranks in a step that is simulated here
TRACE_FILE = "trace.json"
TRACE_NOTE = "one simulated step; samples are numbered as drawn from the dataset's sizes, not by the dataset"


@dataclass(frozen=True)
class StepPreview:
    """The plan with what its simulated step says, the drawing for its page, and files to put beside it; empty
    where none was simulated."""

    plan: Plan
    drawing: str
    files: dict[str, str]


def preview_step(compiled: CompiledPlan) -> StepPreview:
    """Simulate a step of a compiled plan. Without statistics of samples, or with too many computations, only
    the plan comes back."""
    graph = graph_of(compiled.module)
    plan = add_sample_cost(compiled.plan, graph)
    batches = drawn_samples.draw_batches(graph, plan.global_batch, 1)
    if not batches or sum(count_computations(plan, s) for s in plan.sections) > MAX_SIMULATED_COMPUTATIONS:
        return StepPreview(plan, "", {})
    samples, schedule = next(steady_state_steps(plan, [fill_value_dependent_sizes(graph, batches[0])]))
    step = simulate(plan, samples, schedule)
    measures = measure_step(step)
    known = dataclasses.replace(plan, prediction=plan.prediction | _prediction_entries(measures))
    return StepPreview(known, render_html_figure(step, measures), {TRACE_FILE: format_trace(step)})


def add_sample_cost(plan: Plan, graph: GraphOp) -> Plan:
    """The plan with what the dataset's samples cost it in the mean, from which a run tells that its samples
    are others."""
    batches = drawn_samples.draw_batches(graph, drawn_samples.MAX_LISTED_SAMPLES, 1)
    mix = (
        {SAMPLE_SECONDS_KEY: predict_sample_seconds(plan, fill_value_dependent_sizes(graph, batches[0]))}
        if batches
        else {}
    )
    return dataclasses.replace(plan, prediction=plan.prediction | mix)


def fill_value_dependent_sizes(graph: GraphOp, samples: Sequence[SampleMeta]) -> list[SampleMeta]:
    """The samples with the sizes that inputs' values decide, which nobody has drawn: about what they were in
    the captures."""
    known = size_estimates(graph)
    return [
        dataclasses.replace(
            s, sizes={**s.sizes, **{n: round(evaluate_at_means(e, s.sizes)) for n, e in known.items()}}
        )
        for s in samples
    ]


def count_computations(plan: Plan, section: Section) -> int:
    """How many computations the ranks of a section have in a step at most: of micro-batches of as few samples
    as the plan has."""
    passes = 1 if section.mode == "forward" else 2
    return passes * section.mesh.tp * -(-plan.global_batch // max(1, section.micro_batch))


def format_trace(step: SimulatedStep) -> str:
    """The step as a Chrome trace that says what its samples are."""
    return (
        json.dumps(make_chrome_trace([step]) | {"otherData": {"about": TRACE_NOTE}}, separators=(",", ":"))
        + "\n"
    )


def _prediction_entries(measures: StepMeasures) -> dict[str, Any]:
    """What `simulate --json` says of a step, under the same names."""
    found = dataclasses.asdict(measures)
    return {"sections": found.pop("sections"), "simulated": found}
