"""Simulates one step of a plan: the figures in its report, `trace.json`, and how busy each section is.

A plan's prediction rests on closed forms; the simulation runs the schedule that the ranks would run, with
samples of the dataset's sizes. Sample numbers count the drawn samples, not indices of the dataset, which is
not read again. Steps with many computations have no drawing and no trace, which would be large files, and
those with very many are left to `secc simulate`, so that compilation stays quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from secc.driver.compile import CompiledPlan
from secc.ir.analysis import sample_sizes as drawn_samples
from secc.ir.analysis.dataflow import evaluate_at_means, size_estimates
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.report.step_figures import StepFigures
from secc.report.text_table import seconds_text
from secc.runtime.monitoring.run_summary import SAMPLE_SECONDS_KEY, predict_sample_seconds
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.training.evaluation_data import evaluation_plan
from secc.runtime.training.first_pass import count_first_passes
from secc.simulate.chrome_trace import make_chrome_trace
from secc.simulate.events import SimulatedStep
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady_state_steps
from secc.simulate.step_figures import make_step_figures
from secc.simulate.step_measures import measure_step

# Computations of all ranks in a step that is simulated here (150,000 take about 6 s), and that is drawn, too.
MAX_SIMULATED_COMPUTATIONS, MAX_DRAWN_COMPUTATIONS = 150_000, 10_000
TRACE_FILE = "trace.json"
TRACE_NOTE = "one simulated step; samples are numbered as drawn from the dataset's sizes, not by the dataset"


@dataclass(frozen=True)
class StepPreview:
    """The plan with the simulated step in its prediction, the figures for the report, and further files of
    the plan directory; without figures and files if nothing was drawn."""

    plan: Plan
    figures: StepFigures | None
    files: dict[str, str]


def preview_step(compiled: CompiledPlan) -> StepPreview:
    """Simulates one step of a compiled plan.

    Nothing is simulated without statistics of samples, or with more than MAX_SIMULATED_COMPUTATIONS; nothing
    is drawn with more than MAX_DRAWN_COMPUTATIONS.
    """
    graph = graph_of(compiled.module)
    plan = add_sample_cost(compiled.plan, graph)
    computations = sum(count_computations(plan, s) for s in plan.sections)
    if computations > MAX_SIMULATED_COMPUTATIONS:
        return StepPreview(plan, None, {})
    step = simulate_drawn_step(plan, graph)
    if step is None:
        return StepPreview(plan, None, {})
    if "widths_price" in plan.checks:
        plan = _price_widths(plan, graph, step)
    if count_first_passes(plan):
        plan = _note_first_pass(plan, graph, step)
    plan = add_simulated_step(plan, step)
    if computations > MAX_DRAWN_COMPUTATIONS:
        return StepPreview(plan, None, {})
    return StepPreview(plan, make_step_figures(step), {TRACE_FILE: format_trace(step)})


def _price_widths(plan: Plan, graph: GraphOp, step: SimulatedStep) -> Plan:
    """Returns the plan with what padding to the global batch's widths takes in front of its price: the same
    plan is simulated with the micro-batches' own widths."""
    own = simulate_drawn_step(dataclasses.replace(plan, widths="own"), graph)
    assert own is not None
    price = (
        f"a step of {seconds_text(step.end / 1e9)} in place of {seconds_text(own.end / 1e9)} with own widths;"
        f" {plan.checks['widths_price']}"
    )
    return dataclasses.replace(plan, checks=plan.checks | {"widths_price": price})


def _note_first_pass(plan: Plan, graph: GraphOp, step: SimulatedStep) -> Plan:
    """Returns the plan with a note on what the forward before each step takes, which figures leave out."""
    first = simulate_drawn_step(evaluation_plan(plan), graph)
    assert first is not None
    passes = count_first_passes(plan)
    forwards = "a forward" if passes == 1 else f"{passes} forwards, one behind the other,"
    note = (
        f"each step begins with {forwards} of all micro-batches, for values that the loss takes from the"
        f" whole batch: {seconds_text(passes * max(first.program_ends) / 1e9)} in addition to the"
        f" {seconds_text(step.end / 1e9)} of the simulated step, which other figures leave out"
    )
    notes = {"notes": [*plan.checks.get("notes", []), note]}
    return dataclasses.replace(plan, checks=plan.checks | notes)


def simulate_drawn_step(plan: Plan, graph: GraphOp) -> SimulatedStep | None:
    """Simulates a step with samples of the sizes that the graph lists; None where it lists none. Of the
    batches that plans were compared on it is the one with the step that is closest to their mean."""
    batches = drawn_samples.draw_search_batches(graph, plan.global_batch)
    if not batches:
        return None
    batch = batches[plan.solver.get(drawn_samples.SHOWN_BATCH, 0)]
    samples, schedule = next(steady_state_steps(plan, [fill_value_dependent_sizes(graph, batch)]))
    return simulate(plan, samples, schedule)


def add_simulated_step(plan: Plan, step: SimulatedStep) -> Plan:
    """Returns the plan with the measures of a simulated step in its prediction, under the names that
    `simulate --json` uses."""
    entries = dataclasses.asdict(measure_step(step))
    if not entries["beyond_memory"]:
        del entries["beyond_memory"]
    predicted = {"sections": entries.pop("sections"), "simulated": entries}
    return dataclasses.replace(plan, prediction=plan.prediction | predicted)


def add_sample_cost(plan: Plan, graph: GraphOp) -> Plan:
    """Adds the mean modelled cost of the dataset's samples to the prediction, so that a run can tell that its
    samples differ from them."""
    batches = drawn_samples.draw_batches(graph, drawn_samples.SPREAD_SAMPLES, 1)
    sample_cost = (
        {SAMPLE_SECONDS_KEY: predict_sample_seconds(plan, fill_value_dependent_sizes(graph, batches[0]))}
        if batches
        else {}
    )
    return dataclasses.replace(plan, prediction=plan.prediction | sample_cost)


def fill_value_dependent_sizes(graph: GraphOp, samples: Sequence[SampleMeta]) -> list[SampleMeta]:
    """Returns the samples with estimates for sizes that depend on values of the inputs, which are not
    drawn."""
    estimates = size_estimates(graph)
    return [
        dataclasses.replace(
            s, sizes={**s.sizes, **{n: round(evaluate_at_means(e, s.sizes)) for n, e in estimates.items()}}
        )
        for s in samples
    ]


def count_computations(plan: Plan, section: Section) -> int:
    """Returns an upper bound on the computations of a section's ranks in a step."""
    passes = 1 if section.mode == "forward" else 2
    return passes * section.mesh.replica_size * -(-plan.global_batch // max(1, section.micro_batch))


def format_trace(step: SimulatedStep) -> str:
    """Returns the step as the text of a Chrome trace."""
    return (
        json.dumps(make_chrome_trace([step]) | {"otherData": {"about": TRACE_NOTE}}, separators=(",", ":"))
        + "\n"
    )
