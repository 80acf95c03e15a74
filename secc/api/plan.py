"""Compiling, checking, and what can be done with a plan directory."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secc.api.model import Model, load
from secc.api.results import Comparison, ExactnessCheck, Explanation, RunResult, Simulation
from secc.driver.compile_options import CompileOptions, as_texts
from secc.errors import TooManyRanks, UserError
from secc.report.plan_brief import plan_brief
from secc.report.text_table import TextTable
from secc.runtime.data.epoch_order import repeated_samples_text
from secc.runtime.host.gc_control import pause_gc
from secc.runtime.model.user_file import is_model_file_module
from secc.runtime.plan import schema
from secc.runtime.plan.plan_file import load_plan

if TYPE_CHECKING:
    from secc.driver.compile import CompiledPlan
    from secc.driver.step_preview import StepPreview

Progress = Callable[[str], None]
Choices = Mapping[str, object] | Sequence[str]
DEFAULT_PLAN = "plan"
_CHECK_RANKS = 2  # of `secc check`, where nothing else is asked for
LEAST_PACKING_GAIN = 0.02  # of a predicted step, for --pack auto
# Of a run's metrics, what its table leaves out.
_NOT_SHOWN = ("run", "recorded", "kept", "recording_s", "exposed_s", "waiting_s")


class Plan:
    """A plan directory that `compile` or `secc compile` has written."""

    def __init__(self, path: str | Path, warnings: tuple[str, ...] = ()) -> None:
        self.path = Path(path)
        self.contents: schema.Plan = load_plan(self.path)
        self._warnings = warnings

    def __str__(self) -> str:
        return "\n".join(plan_brief(self.contents, self.path, self._warnings))

    def __repr__(self) -> str:
        return f"secc.Plan({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def explain(self) -> Explanation:
        """Returns what the plan decides, and why."""
        from secc.report.plan_tables import plan_summary, plan_tables
        from secc.report.plan_warnings import warnings_table

        warnings = warnings_table(self.contents)
        tables = (*((warnings,) if warnings.rows else ()), *plan_tables(self.contents))
        return Explanation(tuple(plan_summary(self.contents)), tables, self.contents)

    def simulate(
        self,
        *,
        steps: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        order: str = "wavefront",
        baselines: str | Sequence[str] = (),
        trust_model: bool = False,
    ) -> Simulation:
        """Simulates `steps` global batches; figures are means over them. `baselines`: "all" or names of
        published schemes to compare with. `trust_model`: run the model file of a plan that somebody else
        compiled."""
        from secc.api.simulation import baseline_table, busiest_rank_facts, measured_facts, simulate_plan
        from secc.baselines.compare import parse_baseline_names
        from secc.driver.plan_origin import check_model_is_trusted

        if not trust_model:
            check_model_is_trusted(self.path)
        text = baselines if isinstance(baselines, str) else ",".join(baselines)
        names = parse_baseline_names(text) if text else []
        found = simulate_plan(
            self.path, self.contents, steps=steps, seed=seed, shuffle=shuffle, order=order, baselines=names
        )
        facts = [
            *measured_facts(found.measures, steps, self.contents.predicted_step_s),
            *busiest_rank_facts(found.steps[0]),
        ]
        shares = found.measures.sections.items()
        rows = tuple((name, str(share.gpus), f"{share.busy:.3f}") for name, share in shares)
        tables = [TextTable("Sections", ("section", "ranks", "busy"), rows)]
        if found.baselines:
            tables.append(baseline_table(found.measures, found.baselines))
        return Simulation(tuple(facts), tuple(tables), found.measures, found.baselines)

    def report(
        self,
        log_dir: str | Path | None = None,
        *,
        out: str | Path | None = None,
        baselines: str | Sequence[str] = (),
    ) -> Path:
        """Writes the report again, as a page, and returns its path. `log_dir`: of a run to compare with the
        plan; `out`: the file, by default report.html in `log_dir` or the plan; `baselines`: "all" or names of
        published schemes."""
        from secc.api.plan_report import write_report
        from secc.baselines.compare import parse_baseline_names

        text = baselines if isinstance(baselines, str) else ",".join(baselines)
        names = parse_baseline_names(text) if text else []
        logs, output = (Path(p) if p is not None else None for p in (log_dir, out))
        return write_report(self.path, logs, output, names)

    def what_if(self, *changes: str, set: Choices = (), **options: object) -> Comparison:
        """Compares the plan with another choice, without the model: `what_if("student.tp=2")`,
        `what_if(set={"student.tp": 2}, cluster="4x8xH100")`. The plan directory stays as it is."""
        from secc.driver.what_if import replan_with_changes
        from secc.report.plan_differences import plan_differences

        wanted = [*changes, *choice_texts(set), *(f"{name}={value}" for name, value in options.items())]
        before, after = replan_with_changes(self.path, wanted)
        tables = tuple(plan_differences(before, after))
        facts = () if tables else (("what if", "the plans are equal"),)
        return Comparison(facts, tables, before, after)

    def run(self, *, log_dir: str | Path | None = None, **options: object) -> RunResult:
        """Trains the plan with all its ranks on this machine, as `secc run` does, and shows its output.

        `options` are those of `secc run`: `steps=100, save="out", eval_every=10, shuffle=True`. Raises
        UserError for bad input, and RuntimeError if a rank fails.
        """
        return self._launch("run", Path(log_dir) if log_dir is not None else self.path / "logs", options)

    def evaluate(self, *, log_dir: str | Path | None = None, **options: object) -> RunResult:
        """Evaluates a checkpoint (`resume=DIR`), or the initial weights, on `eval_dataset()`, as `secc eval`
        does."""
        return self._launch("eval", Path(log_dir) if log_dir is not None else self.path / "logs", options)

    def _launch(self, command: str, logs: Path, options: Mapping[str, object]) -> RunResult:
        file = logs / "metrics.jsonl"
        before = len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
        arguments = [command, str(self.path), "--log-dir", str(logs), *option_arguments(options)]
        # A process of its own: torchrun's agent installs signal handlers and needs the main thread. Its
        # output is passed on line by line, because a notebook shows what Python writes only.
        with subprocess.Popen(
            [sys.executable, "-m", "secc", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            output: list[str] = []
            try:
                for line in process.stdout:
                    output.append(line)
                    sys.stderr.write(line)
            except BaseException:
                process.terminate()
                raise
        if process.returncode == 2:
            raise UserError(_last_error("".join(output)))
        if process.returncode:
            raise RuntimeError(f"secc {command} ended with exit code {process.returncode}; see its output")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[before:]]
        return make_run_result(logs, lines)


def _last_error(output: str) -> str:
    """Returns the last error message of a command, with the indented lines that say what to do."""
    found = re.findall(r"^(?:error|secc): (.*\n(?: .*\n)*)", output, re.MULTILINE)
    return (found[-1] if found else output[-1000:]).strip()


def make_run_result(log_dir: Path, lines: Sequence[dict[str, Any]]) -> RunResult:
    """Returns the result of a run from its lines of metrics.jsonl."""
    metrics = tuple(line for line in lines if "eval" not in line)
    evaluations = tuple(line for line in lines if "eval" in line)
    tables = [_metrics_table("Steps", metrics)] if metrics else []
    tables += [_metrics_table("Evaluations", evaluations)] if evaluations else []
    facts = [("logs", str(log_dir)), *([("steps", str(len(metrics)))] if metrics else [])]
    return RunResult(tuple(facts), tuple(tables), log_dir, metrics, evaluations)


def _metrics_table(title: str, lines: Sequence[Mapping[str, Any]]) -> TextTable:
    first = ("step", "eval", "loss")
    found = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    columns = tuple(dict.fromkeys(c for c in (*first, *found) if c in found and c not in _NOT_SHOWN))
    rows = tuple(tuple(_cell(line.get(c)) for c in columns) for line in lines)
    return TextTable(title, columns, rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def compile(
    model: Model | str | Path,
    *,
    cluster: str = "local",
    global_batch: int = 32,
    out: str | Path = DEFAULT_PLAN,
    set: Choices = (),
    check: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Plan:
    """Compiles a model into the plan directory `out`, and returns the plan.

    `set`: pinned choices, `{"student.tp": 2}` or `["student.tp=2"]`. `check`: compare the plan with plain
    PyTorch, if the model fits on this machine. Further `options` are those of `secc compile`, with `_` for
    `-`; one that may be repeated takes a list. Raises UserError.
    """
    _refuse_in_model_file()
    given = {"cluster": cluster, "global_batch": global_batch, "set": choice_texts(set), **options}
    made = CompileOptions.from_user(given)
    compiled = compile_to_directory(_as_model(model).path, made, Path(out), check, progress)
    samples = compiled.user.sample_count
    few = (repeated_samples_text(samples, global_batch),) if samples and samples < global_batch else ()
    return Plan(out, few)


def compile_to_directory(
    path: Path, options: CompileOptions, output: Path, check: bool = True, progress: Progress | None = None
) -> CompiledPlan:
    """Compiles a model file, compares it with plain PyTorch, simulates a step, and writes the plan directory.
    Returns the plan with what both have shown. `progress` is called with the name of each step."""
    from secc.codegen.plan_writer import reserve_output
    from secc.report.html_page import ReportExtras, report_page

    with reserve_output(output):
        compiled, preview = _compile_and_preview(path, options, check, progress)
        if options.pack == "auto":
            compiled, preview = _pack_if_shorter(compiled, preview, path, options, check)
        extras = ReportExtras(preview.figures)
        compiled.write_plan(output, lambda plan: report_page(plan, extras), preview.files)
    return compiled


def _compile_and_preview(
    path: Path, options: CompileOptions, check: bool, progress: Progress | None
) -> tuple[CompiledPlan, StepPreview]:
    """Compiles a model file, compares it with plain PyTorch, and simulates a step."""
    with pause_gc(exempt=True):  # objects created by imports are never garbage
        from secc.driver.compile import compile_model
        from secc.driver.edge_fills import find_padding, with_fills
        from secc.driver.exactness_check import check_exactness
        from secc.driver.step_preview import preview_step

    show = progress or (lambda step: None)
    compiled = compile_model(path, options, progress)
    if check:
        show("compare with the eager model")
        compiled = check_exactness(compiled)
    else:
        compiled = with_fills(compiled, find_padding(compiled))
    show("simulate a step")
    preview = preview_step(compiled)
    return dataclasses.replace(compiled, plan=preview.plan), preview


def _pack_if_shorter(
    padded: CompiledPlan, preview: StepPreview, path: Path, options: CompileOptions, check: bool
) -> tuple[CompiledPlan, StepPreview]:
    """Returns the plan that packs samples if it is possible and its predicted step is shorter by
    LEAST_PACKING_GAIN, else the padded one; a note says which and why."""
    try:
        packed, packed_preview = _compile_and_preview(path, replace(options, pack="always"), check, None)
    except UserError as refusal:
        return _add_note(padded, f"--pack auto: {refusal.message}"), preview
    seconds = padded.plan.predicted_step_s, packed.plan.predicted_step_s
    if None in seconds:
        return _add_note(padded, "--pack auto: samples are padded, since no step was predicted"), preview
    own, side_by_side = (float(s or 0) for s in seconds)
    note = (
        f"--pack auto: a step takes {own * 1e3:.4g} ms with padded and {side_by_side * 1e3:.4g} ms with"
        " packed samples"
    )
    if side_by_side < (1 - LEAST_PACKING_GAIN) * own:
        return _add_note(packed, note), packed_preview
    return _add_note(padded, note), preview


def _add_note(compiled: CompiledPlan, note: str) -> CompiledPlan:
    checks = compiled.plan.checks
    notes = {"notes": [*checks.get("notes", []), note]}
    return dataclasses.replace(compiled, plan=replace(compiled.plan, checks=checks | notes))


def check(
    model: Model | str | Path,
    *,
    ranks: int | None = None,
    small: bool | None = None,
    stats_samples: int = 64,
    accept: Sequence[str] = (),
    balance_loss: str = "",
    global_sums: bool = False,
    gather: Sequence[str] = (),
    whole_batch: Sequence[str] = (),
    progress: Progress | None = None,
) -> ExactnessCheck:
    """Compiles a model for `ranks` CPU processes (default: 2, or 1 if the model has work for no more) and
    compares the plan with plain PyTorch on small batches. `small`: check `small_model()`; None: if `model()`
    is too large to be built here. Raises UserError if the plan is not exact."""
    with pause_gc(exempt=True):  # objects created by imports are never garbage
        from secc.driver.compile import compile_model
        from secc.driver.exactness_check import check_exactness
        from secc.report.plan_tables import plan_tables

    _refuse_in_model_file()
    options = CompileOptions(
        cluster=f"1x{ranks or _CHECK_RANKS}xcpu",
        global_batch=8 * (ranks or _CHECK_RANKS),
        stats_samples=stats_samples,
        small=small,
        accept=as_texts(accept),
        balance_loss=balance_loss,
        global_sums=global_sums,
        gather=as_texts(gather),
        whole_batch=as_texts(whole_batch),
        compared_only=True,
    )
    try:
        compiled = compile_model(_as_model(model).path, options, progress)
    except TooManyRanks as error:
        if ranks is not None:
            raise
        fewer = dataclasses.replace(options, cluster=f"1x{error.usable}xcpu")
        compiled = compile_model(_as_model(model).path, fewer, progress)
    if progress is not None:
        progress("compare with the eager model")
    plan = check_exactness(compiled, required=True).plan
    tables = [t for t in plan_tables(plan) if t.title in {"Sections", "Loss", "Checks", "Notes"}]
    exception = ", except for the accepted approximations" if plan.checks.get("accepted") else ""
    verdict = f"loss and every gradient are those of plain PyTorch{exception}"
    facts = (("exact", verdict),)
    checked = "small_model()" if compiled.user.is_small else "model()"
    if compiled.user.is_small and small is None:
        facts = (("checked", f"{checked}, since model() is too large to be built here"), *facts)
    return ExactnessCheck(facts, tuple(tables), plan, checked)


def choice_texts(choices: Choices) -> tuple[str, ...]:
    """Returns choices as texts `NAME.KEY=VALUE`."""
    if isinstance(choices, Mapping):
        return tuple(f"{name}={value}" for name, value in choices.items())
    return tuple(choices)


def option_arguments(options: Mapping[str, object]) -> list[str]:
    """Returns Python options as arguments of the command line: `save_every=5` becomes `--save-every 5`, True
    a flag, False `--no-…` where there is one; a list repeats its option."""
    from secc.runtime.training.options import make_parser

    arguments: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        negation = f"--no-{option.removeprefix('--')}"
        if value is False and negation in make_parser()._option_string_actions:  # pyright: ignore[reportPrivateUsage]
            arguments.append(negation)
        if value is None or value is False:
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            arguments += [option] if one is True else [option, str(one)]
    return arguments


def _as_model(model: Model | str | Path) -> Model:
    return model if isinstance(model, Model) else load(model)


def _refuse_in_model_file() -> None:
    """Raises UserError if a model file compiles when it is imported: every rank would compile again."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    if is_model_file_module(str(frame.f_globals.get("__name__", ""))):
        raise UserError(
            "a model file calls secc when it is imported",
            f"{frame.f_code.co_filename}:{frame.f_lineno}",
            'put the call under `if __name__ == "__main__":`',
        )
