"""`secc simulate PLAN/`: simulates steps of a plan against certified bounds; output as a drawing, JSON or
trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import err, out, print_json, print_table, show_progress, styled
from secc.cli.explain import PLAN_ARGUMENT
from secc.runtime.host.gc_control import pause_gc, slow_gc

if TYPE_CHECKING:
    from secc.baselines.compare import BaselineResult
    from secc.simulate.events import SimulatedStep
    from secc.simulate.step_measures import StepMeasures


@slow_gc()
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
    with pause_gc(exempt=True):  # objects created by imports are never garbage
        from secc.api.simulation import baseline_table, simulate_plan, simulation_stages
        from secc.driver.plan_origin import check_model_is_trusted
        from secc.runtime.plan.plan_file import load_plan

    loaded = load_plan(plan)
    _check_draw(draw)
    if not trust_model:
        check_model_is_trusted(plan)
    names = _parse_baselines(baselines)
    with show_progress(json, simulation_stages(names)) as show:
        found = simulate_plan(
            plan, loaded, steps=steps, seed=seed, shuffle=shuffle, order=order, baselines=names, show=show
        )
        _write_outputs(found.steps, found.first_measures, trace, draw)
    for warning in found.warnings:
        err.print(f"warning: {warning}")
    if json:
        print_json(simulation_json(found.measures, found.baselines) | {"warnings": list(found.warnings)})
        return
    _print_step(found.steps[0], found.measures, steps, loaded.predicted_step_s)
    if found.baselines:
        out.print()
        print_table(baseline_table(found.measures, found.baselines))


def simulation_json(measures: StepMeasures, baselines: Mapping[str, BaselineResult]) -> dict[str, Any]:
    """The measures of the simulation and of the baselines for JSON output; other tools rely on its keys."""
    return dataclasses.asdict(measures) | {
        "baselines": {name: dataclasses.asdict(result) for name, result in baselines.items()}
    }


def _parse_baselines(text: str) -> list[str]:
    from secc.baselines.compare import parse_baseline_names

    return parse_baseline_names(text) if text else []


def _check_draw(draw: Path | None) -> None:
    from secc.errors import UserError

    if draw is not None and draw.suffix not in {".svg", ".html"}:
        raise UserError(
            f"expected an .svg or .html file for --draw, got {draw.name!r}", str(draw), "change its suffix"
        )


def _write_outputs(
    simulated: Sequence[SimulatedStep], first: StepMeasures, trace: Path | None, draw: Path | None
) -> None:
    import json

    from secc.errors import UserError
    from secc.simulate.chrome_trace import make_chrome_trace
    from secc.simulate.drawing import render_html_page, render_svg

    try:
        if trace is not None:
            trace.write_text(json.dumps(make_chrome_trace(list(simulated))))
        if draw is not None:
            draw.write_text(
                render_svg(simulated[0]) if draw.suffix == ".svg" else render_html_page(simulated[0], first),
                encoding="utf-8",
            )
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}", str(error.filename), "name a file in a folder that exists"
        ) from None


def _print_step(step: SimulatedStep, measures: StepMeasures, steps: int, planned_s: float | None) -> None:
    from rich.text import Text

    from secc.api.simulation import busiest_rank_facts, measured_facts
    from secc.report.table_renderers import make_facts_grid
    from secc.simulate.drawing import render_terminal

    for line in render_terminal(step, out.width):
        out.print(Text.assemble(*(styled(*part) for part in line)), no_wrap=True, crop=True)
    out.print()
    out.print(make_facts_grid([*measured_facts(measures, steps, planned_s), *busiest_rank_facts(step)]))
