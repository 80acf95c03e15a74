"""`secc eval PLAN/ --resume DIR`: evaluates the weights of a checkpoint on `eval_dataset()`."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, print_table
from secc.cli.explain import PLAN_ARGUMENT
from secc.cli.run import CONTEXT as CONTEXT
from secc.cli.run import passed_arguments
from secc.cli.run import rank_options as options_of_run

_LISTED = ("seed", "init", "trace", "comm", "order", "skip_bad_samples", "workers", "recorders", "report_to")


def rank_options() -> list[Parameter]:
    """Options of run.py that matter to an evaluation, for --help."""
    return options_of_run(only=_LISTED)


def command(
    context: typer.Context,
    plan: PLAN_ARGUMENT,
    resume: Annotated[
        Path | None,
        typer.Option(help="a checkpoint, or a folder of them (default: initial weights)", metavar="DIR"),
    ] = None,
    eval_batch: Annotated[
        int | None,
        typer.Option(help="samples that are evaluated together (default: the global batch)", min=1),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="evaluate the averaged weights of a run with --ema")
    ] = False,
    log_dir: Annotated[
        str | None, typer.Option(help="directory of metrics.jsonl (default: PLAN/logs)", metavar="DIR")
    ] = None,
    json: JSON_OPTION = False,
) -> None:
    """Evaluate a checkpoint, or the initial weights, on the eval_dataset() of the model file: the loss over
    the whole set, further scalars, and metrics()."""
    from secc.report.text_table import TextTable
    from secc.runtime.training.options import parse_path
    from secc.runtime.training.supervisor import run_plan

    logs = (plan / "logs" if log_dir is None else parse_path(log_dir, "--log-dir")).absolute()
    metrics = logs / "metrics.jsonl"
    try:
        before = len(metrics.read_text(encoding="utf-8").splitlines())
    except OSError:  # there is none, or the run says why it cannot write there
        before = 0
    arguments = ["--log-dir", str(logs), "--eval-only", "ema" if ema else "trained"]
    arguments += ["--resume", str(resume)] if resume is not None else []
    arguments += ["--eval-batch", str(eval_batch)] if eval_batch is not None else []
    code = run_plan(plan, [*passed_arguments(context), *arguments])
    if code == 0 and resume is not None:
        code = _generate_samples(plan, logs, resume, ema)
    if code:
        raise typer.Exit(code)
    results = [_parse_line(line) for line in metrics.read_text(encoding="utf-8").splitlines()[before:]]
    if json:
        print_json(results)
        return
    for result in results:
        about = f"after step {result['step']}, {result['samples']} samples in {result['step_time_s']:.3g} s"
        rows = tuple(
            (name, f"{float('nan') if value is None else value:.6g}")
            for name, value in result["values"].items()
        )
        print_table(TextTable(f"Evaluation: {result['eval']}", ("metric", "value"), rows, about))
    out.print(f"written to {metrics}", soft_wrap=True)


def _generate_samples(directory: Path, logs: Path, checkpoint: Path, averaged: bool) -> int:
    """Runs the model file's generate_samples(), if it has one, in a process that ends with its exit code."""
    import subprocess
    import sys

    from secc.runtime.plan.plan_file import load_plan
    from secc.runtime.training.generation import FUNCTION

    if FUNCTION not in (directory / load_plan(directory).model.path).read_text(encoding="utf-8"):
        return 0
    command = [sys.executable, "-m", "secc.runtime.training.generation", str(directory), str(logs)]
    command += ["--checkpoint", str(checkpoint)] + ["--averaged"] * averaged
    return subprocess.run(command, check=False).returncode


def _parse_line(line: str) -> dict[str, Any]:
    import json

    data = json.loads(line)
    fixed = ("step", "eval", "grad_norm", "samples", "tokens", "step_time_s", "run", "not_finite")
    values = {name: value for name, value in data.items() if name not in fixed}
    return {name: data[name] for name in fixed[:6] if name != "grad_norm"} | {"values": values}
