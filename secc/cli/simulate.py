"""`secc simulate PLAN/`: simulates steps of a plan against certified bounds; output as a drawing, JSON or
trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, show_progress, styled
from secc.cli.explain import PLAN_ARGUMENT

if TYPE_CHECKING:
    from secc.baselines.compare import BaselineResult
    from secc.runtime.plan.schema import Plan
    from secc.runtime.plan.step_program import SampleMeta
    from secc.simulate.events import SimulatedStep
    from secc.simulate.step_measures import StepMeasures


def command(
    plan: PLAN_ARGUMENT,
    steps: Annotated[
        int, typer.Option(min=1, help="number of global batches to simulate; figures are means over them")
    ] = 1,
    seed: Annotated[
        int, typer.Option(help="seed of the data order and of random samples, as in secc run")
    ] = 0,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="permute the dataset in every epoch, as in secc run")
    ] = False,
    order: Annotated[
        str, typer.Option(help="wavefront, or dataset for samples in the order of the dataset")
    ] = "wavefront",
    trace: Annotated[
        Path | None, typer.Option(help="write a Chrome trace of the steps", metavar="FILE")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="write a drawing of the first step: .svg or .html", metavar="FILE")
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="compare with published schemes: all, or a list such as uniform,mimo")
    ] = "",
    trust_model: Annotated[
        bool,
        typer.Option("--trust-model", help="run the model file of a plan that another user compiled"),
    ] = False,
    json: JSON_OPTION = False,
) -> None:
    """Simulate steps of a plan: their time, its ratio to lower bounds, and where ranks wait."""
    from secc.bounds.steady_state import mean_step_bound
    from secc.bounds.work import BatchWork
    from secc.driver.plan_origin import check_model_is_trusted
    from secc.runtime.plan.plan_file import load_plan
    from secc.simulate.step_measures import mean_measures, measure_step

    loaded = load_plan(plan)
    _check_options(draw, order)
    if not trust_model:
        check_model_is_trusted(plan)
    baseline_names = _parse_baselines(baselines)
    with show_progress(quiet=json) as show:
        show("draw samples")
        simulated = _simulate_steps(plan, loaded, steps, seed, shuffle, order)
        show("compare with the bounds")
        measures = [measure_step(step) for step in simulated]
        batches = [step.samples[: step.schedule.own_samples] for step in simulated]
        bound = mean_step_bound([BatchWork(loaded, samples) for samples in batches])
        measured = mean_measures(measures, bound)
        _write_outputs(simulated, measures[0], trace, draw)
        baseline_results = _compare_baselines(plan, batches, baseline_names, show)
    if json:
        print_json(simulation_json(measured, baseline_results))
    else:
        _print_step(simulated[0], measured, steps)
        _print_baselines(measured, baseline_results)


def simulation_json(measures: StepMeasures, baselines: Mapping[str, BaselineResult]) -> dict[str, Any]:
    """The measures of the simulation and of the baselines for JSON output; other tools rely on its keys."""
    return dataclasses.asdict(measures) | {
        "baselines": {name: dataclasses.asdict(result) for name, result in baselines.items()}
    }


def _parse_baselines(text: str) -> list[str]:
    from secc.baselines.compare import parse_baseline_names

    return parse_baseline_names(text) if text else []


def _compare_baselines(
    directory: Path, batches: list[tuple[SampleMeta, ...]], names: list[str], show: Callable[[str], None]
) -> dict[str, BaselineResult]:
    from secc.baselines.compare import BaselineComparison

    if not names:
        return {}
    show("read the plan's IR")
    comparison = BaselineComparison(directory)
    results: dict[str, BaselineResult] = {}
    for name in names:
        show(f"baseline {name}")
        results[name] = comparison.find_best(name, batches)
    return results


def _check_options(draw: Path | None, order: str) -> None:
    from secc.errors import UserError
    from secc.runtime.schedule.scheduler import SCHEDULE_ORDERS

    if draw is not None and draw.suffix not in {".svg", ".html"}:
        raise UserError(
            f"expected an .svg or .html file for --draw, got {draw.name!r}", str(draw), "change its suffix"
        )
    if order not in SCHEDULE_ORDERS:
        raise UserError(f"unknown --order {order!r}", remedy=f"use one of {', '.join(SCHEDULE_ORDERS)}")


def _simulate_steps(
    directory: Path, plan: Plan, steps: int, seed: int, shuffle: bool, order: str
) -> list[SimulatedStep]:
    from secc.errors import UserError
    from secc.simulate.global_batches import load_global_batches
    from secc.simulate.simulator import simulate
    from secc.simulate.steady_state import steady_state_steps

    batches = list(load_global_batches(directory, plan, seed, shuffle, steps))
    try:
        return [
            simulate(plan, samples, programs)
            for samples, programs in steady_state_steps(plan, batches, order)
        ]
    except ValueError as error:
        raise UserError(
            f"the plan cannot be simulated: {error}", str(directory), "compile with tp=1 and pp=1"
        ) from None


def _write_outputs(
    simulated: list[SimulatedStep], first: StepMeasures, trace: Path | None, draw: Path | None
) -> None:
    import json

    from secc.errors import UserError
    from secc.simulate.chrome_trace import make_chrome_trace
    from secc.simulate.drawing import render_html_page, render_svg

    try:
        if trace is not None:
            trace.write_text(json.dumps(make_chrome_trace(simulated)))
        if draw is not None:
            draw.write_text(
                render_svg(simulated[0]) if draw.suffix == ".svg" else render_html_page(simulated[0], first)
            )
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}", str(error.filename), "name a file in a folder that exists"
        ) from None


def _print_step(step: SimulatedStep, measures: StepMeasures, steps: int) -> None:
    from rich.text import Text

    from secc.simulate.drawing import render_terminal

    for line in render_terminal(step, out.width):
        out.print(Text.assemble(*(styled(*part) for part in line)), no_wrap=True, crop=True)
    out.print()
    for name, value in [*measured_facts(measures, steps), *_busiest_rank_facts(step)]:
        out.print(f"{name:>22}  {value}")


def measured_facts(m: StepMeasures, steps: int) -> list[tuple[str, str]]:
    """The measures as (name, text) for the terminal."""
    over = m.step_time_s / m.schedule_bound_s if m.schedule_bound_s else 1.0
    facts = [
        ("step", f"{m.step_time_s:.6g} s" + (f" (mean of {steps})" if steps > 1 else "")),
        (
            "schedule bound",
            f"{m.schedule_bound_s:.6g} s: the step takes {over:.3f} of it; bottleneck: {m.bound_reason}",
        ),
        ("plan bound", f"{m.plan_bound_s:.6g} s: all work spread evenly over {m.gpus} ranks"),
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


def _busiest_rank_facts(step: SimulatedStep) -> list[tuple[str, str]]:
    """What the rank with the longest computation does in the drawn step."""
    from secc.simulate.step_measures import find_busiest_rank

    b = find_busiest_rank(step)
    if b is None:
        return []
    waits = f"waits {b.waiting_s:.4g} s for other ranks and {b.exposed_s:.4g} s for messages"
    closing = f"{b.closing_s:.4g} s from its last computation to the step's end"
    return [("busiest rank", f"{b.rank} ({b.sections}) computes {b.computing_s:.4g} s, {waits}; {closing}")]


def _print_baselines(measures: StepMeasures, results: Mapping[str, BaselineResult]) -> None:
    from rich.table import Table

    if not results:
        return
    table = Table("baseline", "step", "of this plan's", "devices", "best layout", box=None, padding=(0, 2))
    for name, result in results.items():
        time = f"{result.step_time_s:.6g} s" if result.step_time_s is not None else "-"
        ratio = (
            f"{result.step_time_s / measures.step_time_s:.3f}"
            if result.step_time_s is not None and measures.step_time_s
            else "-"
        )
        table.add_row(name, time, ratio, str(result.gpus or "-"), result.layout)
    out.print()
    out.print(table)
