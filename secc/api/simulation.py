"""Simulates steps of a plan directory, and compares them with baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from secc.bounds.steady_state import mean_step_bound
from secc.bounds.traffic import Traffic
from secc.bounds.work import BatchWork
from secc.errors import UserError
from secc.report.text_table import TextTable
from secc.runtime.plan.schema import Plan
from secc.runtime.schedule.memory_bound import EXCESS_REMEDY, describe_excess
from secc.runtime.schedule.scheduler import SCHEDULE_ORDERS
from secc.simulate.events import SimulatedStep
from secc.simulate.global_batches import load_global_batches
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady_state_steps
from secc.simulate.step_measures import StepMeasures, find_busiest_rank, mean_measures, measure_step

if TYPE_CHECKING:
    from secc.baselines.compare import BaselineResult

_DRAW, _COMPARE, _READ_IR = "draw samples", "compare with the bounds", "read the plan's IR"


@dataclass(frozen=True)
class SimulatedPlan:
    """Simulated steps, their mean measures, those of the first step, and the baselines' best layouts.

    warnings: which samples a run refuses because no rank has the memory for them, and which ranks hold more
    than their tensors may take.
    """

    steps: Sequence[SimulatedStep]
    measures: StepMeasures
    first_measures: StepMeasures
    baselines: Mapping[str, BaselineResult]
    warnings: Sequence[str]


def simulation_stages(baselines: Sequence[str]) -> tuple[str, ...]:
    """The parts of the work of `simulate_plan` with these baselines, as it shows them."""
    return (_DRAW, _COMPARE, *((_READ_IR, *map(_baseline_stage, baselines)) if baselines else ()))


def _baseline_stage(name: str) -> str:
    return f"baseline {name}"


def simulate_plan(
    directory: Path,
    plan: Plan,
    *,
    steps: int = 1,
    seed: int = 0,
    shuffle: bool = False,
    order: str = "wavefront",
    baselines: Sequence[str] = (),
    show: Callable[[str], None] = lambda step: None,
) -> SimulatedPlan:
    """Simulates `steps` global batches of the plan in `directory` and finds the best layout of each scheme in
    `baselines`. `show` is called with the name of each part of the work. Raises UserError for a plan or order
    that cannot be simulated."""
    if order not in SCHEDULE_ORDERS:
        raise UserError(f"unknown --order {order!r}", remedy=f"use one of {', '.join(SCHEDULE_ORDERS)}")
    show(_DRAW)
    batches = list(load_global_batches(directory, plan, seed, shuffle, steps))
    traffic = Traffic(plan)
    try:
        simulated = [
            simulate(plan, samples, programs, traffic)
            for samples, programs in steady_state_steps(plan, batches, order)
        ]
    except ValueError as error:
        raise UserError(
            f"the plan cannot be simulated: {error}", str(directory), "compile with tp=1 and pp=1"
        ) from None
    warnings = [
        f"secc run refuses batch {number}: {describe_excess(excess, samples)}; {EXCESS_REMEDY}"
        for number, (samples, step) in enumerate(zip(batches, simulated, strict=True), 1)
        for excess in step.schedule.over_memory[:1]
    ]
    show(_COMPARE)
    own = [step.samples[: step.schedule.own_samples] for step in simulated]
    works = [BatchWork(plan, samples, traffic) for samples in own]
    measures = [measure_step(step, work) for step, work in zip(simulated, works, strict=True)]
    warnings += [
        f"batch {number}: {m.beyond_memory}; {EXCESS_REMEDY}"
        for number, m in enumerate(measures, 1)
        if m.beyond_memory
    ]
    measured = mean_measures(measures, mean_step_bound(works))
    found: dict[str, BaselineResult] = {}
    if baselines:
        from secc.baselines.compare import BaselineComparison  # imports what prices plans

        show(_READ_IR)
        comparison = BaselineComparison(directory)
        for name in baselines:
            show(_baseline_stage(name))
            found[name] = comparison.find_best(name, own)
    return SimulatedPlan(simulated, measured, measures[0], found, warnings)


def _one_order_facts(m: StepMeasures) -> list[tuple[str, str]]:
    """The bound on steps with pipelines in one order, where it says more than the schedule bound."""
    if m.one_order_bound_s <= m.schedule_bound_s:
        return []
    over = m.step_time_s / m.one_order_bound_s
    text = "if all stages of a pipeline take its micro-batches in one order: the step takes"
    return [("in one order", f"{m.one_order_bound_s:.6g} s {text} {over:.3f} of it")]


def measured_facts(m: StepMeasures, steps: int, planned_s: float | None) -> list[tuple[str, str]]:
    """The measures as (name, text). planned_s: the step that the plan predicts, for drawn samples."""
    which = "the run's first global batch" if steps == 1 else f"a mean over the run's first {steps} batches"
    drawn = f"; the plan says {planned_s:.4g} s, for samples drawn from the dataset" if planned_s else ""
    over = m.step_time_s / m.schedule_bound_s if m.schedule_bound_s else 1.0
    facts = [
        ("simulated step", f"{m.step_time_s:.4g} s, {which}{drawn}"),
        (
            "schedule bound",
            f"{m.schedule_bound_s:.6g} s: the step takes {over:.3f} of it; bottleneck: {m.bound_reason}",
        ),
        *_one_order_facts(m),
        (
            "plan bound",
            f"{m.plan_bound_s:.6g} s: no numbers of replicas on {m.gpus} ranks make a step in these layouts"
            f" shorter; {m.micro_batch_bound_s:.6g} s in micro-batches of at most as many samples",
        ),
        ("busy", ", ".join(f"{name} {share.busy:.0%} of {share.gpus}" for name, share in m.sections.items())),
        (
            "waits of a rank",
            (
                f"{m.waiting_s:.4g} s for other ranks, {m.exposed_communication_s:.4g} s for "
                "messages and reductions"
            ),
        ),
        ("in flight", f"at most {m.in_flight} micro-batches on a rank"),
    ]
    if m.peak_memory_gib is not None:
        facts.append(("memory", f"{m.peak_memory_gib:.4g} GiB on the fullest rank"))
    if m.mfu is not None:
        facts.append(("mfu", f"{m.mfu:.1%}"))
    return facts


def busiest_rank_facts(step: SimulatedStep) -> list[tuple[str, str]]:
    """What the rank with the longest computation does in a step."""
    b = find_busiest_rank(step)
    if b is None:
        return []
    waits = f"waits {b.waiting_s:.4g} s for other ranks and {b.exposed_s:.4g} s for messages"
    closing = f"{b.closing_s:.4g} s from its last computation to the step's end"
    return [("busiest rank", f"{b.rank} ({b.sections}) computes {b.computing_s:.4g} s, {waits}; {closing}")]


def baseline_table(measures: StepMeasures, results: Mapping[str, BaselineResult]) -> TextTable:
    """The best layout of each baseline next to the plan's step."""
    rows = tuple(
        (
            name,
            f"{result.step_time_s:.6g} s" if result.step_time_s is not None else "-",
            f"{result.step_time_s / measures.step_time_s:.3f}"
            if result.step_time_s is not None and measures.step_time_s
            else "-",
            str(result.gpus or "-"),
            result.layout,
        )
        for name, result in results.items()
    )
    return TextTable("Baselines", ("baseline", "step", "of this plan's", "devices", "best layout"), rows)
