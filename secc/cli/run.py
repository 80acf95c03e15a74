"""`secc run PLAN/`: trains a plan with all its ranks on this machine, by torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON
from secc.cli.console import print_json
from secc.cli.explain import PLAN

# Every other option is run.py's own, so that `secc run`, launch.sh and Slurm take the same ones; run.py refuses unknown ones.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
EPILOG = "Further options are those of the plan's run.py: `--steps 100 --clip 1.0 --save DIR --save-every 50 --resume DIR --trace FILE …`."


def command(
    context: typer.Context,
    plan: PLAN,
    log_dir: Annotated[Path | None, typer.Option(help="where metrics.jsonl is appended to (default: PLAN/logs)")] = None,
    json: JSON = False,
) -> None:
    """Train a plan here. --json prints the last step's metrics."""
    from secc.runtime.launch import run_plan

    logs = log_dir or plan / "logs"
    code = run_plan(plan, [*context.args, "--log-dir", str(logs.resolve())])
    if code == 0 and json:
        print_json(_last_metrics(logs / "metrics.jsonl"))
    raise typer.Exit(code)


def _last_metrics(path: Path) -> object:
    import json

    return json.loads(path.read_text().splitlines()[-1])
