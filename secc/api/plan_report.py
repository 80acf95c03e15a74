"""Writes the report of a plan again, with what compilation leaves out: a step of any size, published schemes,
and a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from secc.api.run_drift import drift_sentences, drift_table
from secc.baselines.compare import BaselineComparison
from secc.codegen.plan_writer import replace_file, replace_plan_file
from secc.driver.replan_from_run import measure_drift
from secc.driver.step_preview import add_simulated_step, simulate_drawn_step
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text
from secc.report.html_page import ReportExtras, report_page
from secc.report.run_figures import RunFigures, make_run_figures
from secc.report.run_log import RunLog, read_run_log
from secc.report.text_table import TextTable, seconds_text
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from secc.simulate.events import SimulatedStep
from secc.simulate.step_figures import make_step_figures

REPORT_FILE = "report.html"


def write_report(
    directory: Path,
    log_dir: Path | None = None,
    output: Path | None = None,
    baselines: Sequence[str] = (),
    show: Callable[[str], None] = lambda step: None,
) -> Path:
    """Writes the report of the plan in `directory` and returns its path: `output`, else `report.html` in the
    log directory, else in the plan's.

    log_dir: of a run that the report compares with the plan. baselines: names of published schemes. show: is
    called with the name of each part of the work. The user's model file is not run. Raises UserError for
    files that cannot be read or written.
    """
    plan = load_plan(directory)
    path = output or (log_dir or directory) / REPORT_FILE
    if path.is_dir():
        raise UserError(
            "the output is a folder", str(path), f"name a file for -o, such as {path / REPORT_FILE}"
        )
    log = None if log_dir is None else read_run_log(plan, log_dir)
    show("simulate a step")
    step = _simulate_step(directory, plan)
    found: dict[str, tuple[float | None, str]] = {}
    if baselines and step is None:
        raise UserError(
            "the plan keeps no sizes of samples, which baselines are compared on",
            str(directory),
            "compile again from a dataset, or leave --baselines out",
        )
    if baselines and step is not None:
        show("read the plan's IR")
        comparison, own = BaselineComparison(directory), step.samples[: step.schedule.own_samples]
        for name in baselines:
            show(f"baseline {name}")
            best = comparison.find_best(name, [own])
            found[name] = best.step_time_s, best.layout
    run = None
    if log_dir is not None and log is not None:
        show("plan again for the measured times")
        run = _run_figures(directory, plan, log_dir, log)
    figures = make_step_figures(step) if step is not None else None
    shown = add_simulated_step(plan, step) if step is not None else plan
    page = report_page(shown, ReportExtras(figures, run, found, _step_note(plan, shown)))
    if path.resolve() == (directory / REPORT_FILE).resolve():
        replace_plan_file(directory, REPORT_FILE, page)
        return path
    try:
        replace_file(path, page)
    except OSError as error:
        remedy = "name a file that you may write with -o"
        raise UserError(f"cannot write the report: {error.strerror}", str(path), remedy) from None
    return path


def _step_note(plan: Plan, shown: Plan) -> str:
    """Says where the step's figure differs from that in plan.json, which compilation did not simulate."""
    before, now = plan.predicted_step_s, shown.predicted_step_s
    if plan.prediction.get("simulated") or not before or now is None or before == now:
        return ""
    return (
        "The step was simulated for this report. Compilation did not simulate it: plan.json and secc explain"
        f" have {seconds_text(before)}, from the search for the plan."
    )


def _simulate_step(directory: Path, plan: Plan) -> SimulatedStep | None:
    """Simulates a step with the sizes of samples that the last dump of the plan's IR lists."""
    dumps = sorted((directory / "ir").glob("*.mlir"))
    if not dumps:
        return None
    return simulate_drawn_step(plan, graph_of(module_text.read_module(dumps[-1])))


def _run_figures(directory: Path, plan: Plan, log_dir: Path, log: RunLog) -> RunFigures:
    try:
        drift = measure_drift(directory, log_dir)
    except UserError as error:  # of a run that is too short, say
        table = TextTable("Drift", (), ())
        return make_run_figures(plan, log, table, [f"Drift is not known: {error.message}."])
    return make_run_figures(plan, log, drift_table(drift), drift_sentences(drift, directory))
