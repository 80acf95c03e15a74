"""`secc run PLAN/`: trains a plan with all its ranks on this machine."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import print_json
from secc.cli.explain import PLAN_ARGUMENT

# All other options are passed to run.py, so that `secc run`, launch.sh and Slurm accept the same ones. run.py
# parses them and rejects unknown ones; `rank_options` lists them in --help.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
_PASSED_KEY = "secc.passed"  # of the click context: arguments for run.py


def rank_options(
    only: Container[str] | None = None, but: Container[str] = ("log_dir", "emulate")
) -> list[Parameter]:
    """Return the options of run.py as parameters of a command, for --help. only: names to list; but: names
    that the command has itself."""
    import argparse

    from secc.runtime.training.options import make_parser

    parameters: list[Parameter] = []
    for action in make_parser()._actions:  # pyright: ignore[reportPrivateUsage]
        shown = action.help not in (None, argparse.SUPPRESS) and action.dest != "help"
        if not shown or action.dest in but or (only is not None and action.dest not in only):
            continue
        choices = "|".join(map(str, action.choices)) if action.choices else "N"
        metavar = action.metavar if isinstance(action.metavar, str) else choices
        kind: Any = list[str] | None if isinstance(action.default, list) else str | None
        option = typer.Option(*action.option_strings, help=action.help, metavar=metavar)
        default = None
        if isinstance(action, argparse.BooleanOptionalAction):  # --x and --no-x
            kind, option = bool | None, typer.Option("/".join(action.option_strings), help=action.help)
        elif action.nargs == 0:
            kind, option, default = bool, typer.Option(*action.option_strings, help=action.help), False
        annotation = Annotated[kind, option]
        long = next(text for text in action.option_strings if text.startswith("--"))
        name = long.removeprefix("--").replace("-", "_")  # not `dest`, which --no-first-check has another of
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return parameters


def add_options(command: Callable[..., None], options: Sequence[Parameter]) -> Callable[..., None]:
    """Return the command with further options; their values are kept as texts for run.py."""

    def extended(**values: Any) -> None:
        passed: list[str] = values["context"].meta.setdefault(_PASSED_KEY, [])
        for option in options:
            value, words = values.pop(option.name), option.name.replace("_", "-")
            for one in value if isinstance(value, list) else [value]:
                if one is None or one is option.default:
                    continue
                if isinstance(one, bool):
                    passed.append(f"--{words}" if one else f"--no-{words}")
                else:
                    passed += [f"--{words}", one]
        command(**values)

    own = signature(command, eval_str=True)
    extended.__signature__ = own.replace(parameters=[*own.parameters.values(), *options])  # pyright: ignore[reportFunctionMemberAccess]
    extended.__annotations__ = {name: p.annotation for name, p in extended.__signature__.parameters.items()}  # pyright: ignore[reportFunctionMemberAccess]
    extended.__doc__ = command.__doc__
    return extended


def passed_arguments(context: typer.Context) -> list[str]:
    """The arguments of the command line that are for run.py."""
    return [*context.meta.get(_PASSED_KEY, []), *context.args]


def command(
    context: typer.Context,
    plan: PLAN_ARGUMENT,
    log_dir: Annotated[
        str | None, typer.Option(help="directory of metrics.jsonl (default: PLAN/logs)", metavar="DIR")
    ] = None,
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate", help="sleep for the plan's modelled times instead of computing, in real processes"
        ),
    ] = False,
    scale: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="with --emulate: multiply all times, to lift small ones above this machine's overhead",
        ),
    ] = 1.0,
    json: JSON_OPTION = False,
) -> None:
    """Train a plan on this machine, with all its ranks. --json prints the metrics of the last step."""
    from secc.runtime.training.options import parse_path
    from secc.runtime.training.supervisor import run_plan

    logs = (plan / "logs" if log_dir is None else parse_path(log_dir, "--log-dir")).absolute()
    if emulate:
        raise typer.Exit(_run_emulated(plan, logs, passed_arguments(context), scale, json))
    code = run_plan(plan, [*passed_arguments(context), "--log-dir", str(logs)], _replan_for_ranks)
    if code == 0 and json:
        print_json(_last_metrics(logs / "metrics.jsonl"))
    raise typer.Exit(code)


def _replan_for_ranks(directory: Path, ranks: int) -> Path:
    from secc.driver.replan_for_ranks import replan_for_ranks  # the compiler, which most runs do not need

    return replan_for_ranks(directory, ranks)


def _last_metrics(path: Path) -> object:
    import json

    lines = map(json.loads, reversed(path.read_text(encoding="utf-8").splitlines()))
    return next(line for line in lines if "eval" not in line)


def _run_emulated(directory: Path, logs: Path, arguments: list[str], scale: float, json: bool) -> int:
    """Run the control plane alone, and print each step next to the simulated one. Returns the exit code."""
    from itertools import islice

    from secc.cli.console import out
    from secc.errors import UserError
    from secc.runtime.plan.plan_file import load_plan
    from secc.runtime.training.emulation import EMULATION_FILE, table_to_json
    from secc.runtime.training.options import parse_options
    from secc.runtime.training.supervisor import run_plan
    from secc.simulate.emulation_table import compare_emulated_steps, make_emulation_table
    from secc.simulate.global_batches import load_global_batches

    options, plan, times = parse_options(arguments), load_plan(directory), logs / "emulation.json"
    if options.epochs is not None:
        raise UserError("--emulate does not support --epochs", remedy="use --steps instead")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / EMULATION_FILE).unlink(missing_ok=True)
        times.write_text(table_to_json(make_emulation_table(plan, scale)))
    except OSError as error:
        raise UserError(
            f"cannot write to the directory: {error.strerror}", str(logs), "give another --log-dir"
        ) from None
    code = run_plan(directory, [*arguments, "--log-dir", str(logs), "--emulate", str(times)])
    if code:
        return code
    count = len((logs / EMULATION_FILE).read_text(encoding="utf-8").splitlines())
    batches = list(
        islice(load_global_batches(directory, plan, options.seed or 0, options.shuffle, count), count)
    )
    steps = list(compare_emulated_steps(plan, logs, batches, options.order))
    if json:
        print_json([{"step": s, "emulated_s": e, "simulated_s": m} for s, e, m in steps])
    for number, emulated, simulated in () if json else steps:
        ratio = f"{emulated / simulated:.3f}"
        out.print(f"step {number}: emulated {emulated:.6g} s, simulated {simulated:.6g} s ({ratio})")
    return 0
