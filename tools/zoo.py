"""Compiles, checks and trains small random models of many public architectures, and compares with plain
PyTorch.

    python -m tools.zoo                          every architecture, checked and run on three ranks
    python -m tools.zoo llava whisper            some of them
    python -m tools.zoo --family audio --no-run  one family, compiled and checked only
    python -m tools.zoo --fuse                   with fused operators
    python -m tools.zoo --layers --no-run        captured by layers, too, where that differs
    python -m tools.zoo --sharding zero1         every trained section on all ranks, with a sharded optimizer

For each architecture: whether its glue is generic, re-recorded or hidden in a block, its sections, and
`exact` or the first line of the error, and the processor time of its compilation and its check. Failures are
then listed by cause. Every model is a model file as a user would write it. `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from secc.codegen.plan_builder import build_plan
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.pass_driver import Planner
from secc.errors import UserError
from secc.frontend.capture.block_selection import ModuleTree
from secc.frontend.capture.capture import capture_model
from secc.report.html_page import report_page
from secc.runtime.plan.schema import Plan
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import (
    TrainingResult,
    compute_exact_gradients,
    find_differences,
    save_nudged_weights,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tools.rounding import judge_by_float64
from tools.zoo_models import Entry, entries

RANKS, GLOBAL_BATCH, STEPS = 3, 12, 3
EXACT, SKIPPED = "exact", "-"
CAUSES = (  # (what the first line of the error says, the cause that the table names)
    (
        r"only \d+ of the captures took this path|no expression over|depends on values|is not explained",
        "not generic: glue depends on input values",
    ),
    (r"fits no rule|follow no rule|neither", "input without a rule of rows or widths"),
    (r"Python reads a value", "reads a value that a block computed"),
    (r"not separable", "loss not separable by sample"),
    (r"draws random numbers", "random numbers in forward"),
    (r"shapes of block", "shapes of a block cannot be found"),
    (r"does not compute what plain PyTorch", "plan not exact"),
    (r"^run: ", "run differs from the check"),
    (r"forward raises", "forward raises under capture"),
    (r"^\w+(Error|Exception|Unexplained)\b", "defect: not a UserError"),
)


@dataclass
class Row:
    """One line of the table. `check`, `layers` and `run` are "exact", "-" if not tried, or the first line of
    the error. `layers` is the check of a capture by layers; an error there makes stages take it back. Seconds
    are of the processor, child processes included."""

    name: str
    family: str
    glue: str = SKIPPED
    sections: dict[str, str] = field(default_factory=dict)  # names and modes
    check: str = SKIPPED
    layers: str = SKIPPED
    run: str = SKIPPED
    notes: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    check_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def error(self) -> str:
        """The first error, "" if there is none."""
        return next((e for e in (self.check, self.run) if e not in (EXACT, SKIPPED)), "")

    @property
    def cause(self) -> str:
        """The bucket of the error."""
        return (
            next((cause for sign, cause in CAUSES if re.search(sign, self.error)), "other")
            if self.error
            else ""
        )


def look(
    entry: Entry,
    ranks: int = RANKS,
    run: bool = True,
    fuse: bool | None = None,
    layers: bool = False,
    sharding: str | None = None,
) -> Row:
    """Compiles, checks and, unless told otherwise, runs one architecture. layers: captures it by layers, too,
    if that differs, and checks that plan. sharding: of the optimizers, with each section on all ranks."""
    row, start = Row(entry.name, entry.family), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"{entry.name}.py").write_text(entry.source())
        model = write_recording_model(entry.name, folder, folder)
        try:
            begin = _cpu_seconds()
            options = CompileOptions(cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, fuse=fuse)
            compiled = compile_model(model, options)
            if sharding is not None:
                compiled = compile_model(model, _with_sharding(options, compiled.plan, sharding, ranks))
            row.compile_seconds = round(_cpu_seconds() - begin, 1)
            row.glue, row.sections = glue(compiled), {s.name: s.mode for s in compiled.plan.sections}
            row.fused = (
                tuple(
                    dict.fromkeys(
                        f.rule if not f.why else f"{f.rule}: {f.why}" for f in compiled.plan.fusions
                    )
                )
                if fuse
                else ()
            )
            row.notes = tuple(compiled.plan.checks.get("notes", ()))
            begin = _cpu_seconds()
            compiled = check_exactness(compiled, required=True)
            row.check, row.check_seconds = EXACT, round(_cpu_seconds() - begin, 1)
        except Exception as error:
            row.check = _first_line(error)
        if row.check == EXACT and layers:
            row.layers = _check_layers(compiled)
        if row.check == EXACT and run:
            try:
                row.run = run_on_ranks(compiled, model, folder)
            except Exception as error:
                row.run = _first_line(error)
    row.wall_seconds = round(time.perf_counter() - start, 1)
    return row


def _with_sharding(options: CompileOptions, plan: Plan, sharding: str, ranks: int) -> CompileOptions:
    """The options with the sections of a plan on all ranks and sharded optimizers for those that train."""
    trained = [s.user_section_name for s in plan.sections if s.mode == "train"]
    pins = (f"{name}.{choice}" for name in trained for choice in (f"sharding={sharding}", f"dp={ranks}"))
    return replace(options, strategy="colocate", set=tuple(dict.fromkeys(pins)))


def _check_layers(compiled: CompiledPlan) -> str:
    """The check of a plan from a capture by layers; "-" if that is no other capture."""
    try:
        opened = recapture_by_layers(compiled)
        if opened is compiled:
            return SKIPPED
        check_exactness(opened, required=True)
    except Exception as error:
        return _first_line(error)
    return EXACT


def _first_line(error: Exception) -> str:
    if not isinstance(error, UserError):
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return (f"{error.where}: " if error.where else "") + error.message.splitlines()[0]


def _cpu_seconds() -> float:
    """Processor time of this process and the child processes that have ended."""
    return sum(os.times()[:4])


def recapture_by_layers(compiled: CompiledPlan) -> CompiledPlan:
    """Plans a model again with every stack of layers opened, as sections in stages are captured.

    Returns `compiled` for a model without closed stacks. Raises UserError if a stack cannot be opened.
    """
    source = compiled.captured_model
    tree = ModuleTree(source.meta)
    opened = [path for path in source.capture.blocks if tree.stack_depth(path)]
    if not opened:
        return compiled
    capture = capture_model(
        source.user, source.meta, source.survey, source.inputs, opened, before=source.capture
    )
    source = replace(source, capture=capture)
    planned = Planner(source, (), lambda _: nullcontext(), lambda _: None).plan_model()
    if planned.taken_back:
        raise UserError(f"taken back: {planned.taken_back[0].reason}", planned.taken_back[0].where)
    return replace(
        compiled,
        plan=build_plan(planned.module, compiled.plan.model, {}),
        module=planned.module,
        dumps=planned.dumps,
        constants=planned.capture.constants,
        captured_model=source,
    )


def glue(compiled: CompiledPlan) -> str:
    """How the glue is known: `generic` code for all sizes, recorded again for each micro-batch, or hidden
    in a block made larger for it."""
    if not all(case.spare for case in compiled.plan.recorded):
        return "recorded again"
    hidden = [
        note.partition(": ")[0]
        for note in compiled.plan.checks.get("notes", ())
        if ": one block, because " in note
    ]
    return f"in block {hidden[-1]}" if hidden else "generic"


def run_on_ranks(compiled: CompiledPlan, model: Path, folder: Path) -> str:
    """`exact`, also where only gradients differ that are rounding, or the first thing in which the run
    differs."""
    try:
        found, reference = train_on_ranks(compiled, model, folder)
    except AssertionError as error:
        return f"run: {error}".splitlines()[0]
    run = compare_run(found, reference)
    if run == EXACT or compiled.plan.draws:
        return run
    return EXACT if judge_by_float64(found, reference, compute_exact_gradients(model, GLOBAL_BATCH)) else run


def train_on_ranks(
    compiled: CompiledPlan, model: Path, folder: Path
) -> tuple[TrainingResult, TrainingResult]:
    """What the plan trains, and its reference. A plan may leave ranks without work, which do not start.
    Raises AssertionError if a rank fails."""
    compiled.write_plan(folder / "plan", report_page)
    reference = train_reference(compiled, model, folder)
    found = train_distributed(folder / "plan", compiled.plan.world_size, STEPS, folder / "run")
    return found, reference


def compare_run(found: TrainingResult, reference: TrainingResult) -> str:
    """`exact`, or the first thing in which the run differs."""
    return next((f"run: {d}" for d in find_differences(found, reference)), EXACT)


def train_reference(compiled: CompiledPlan, model: Path, folder: Path, nudge: int = 0) -> TrainingResult:
    """Plain PyTorch; for a model that draws random numbers the plan for one rank, which was compared with the
    eager model. `nudge`: see `train_model`."""
    if not compiled.plan.draws:
        return train_in_one_process(model, GLOBAL_BATCH, STEPS, folder / f"plain_{nudge}", nudge=nudge)
    plan, weights = folder / "plan_of_one", folder / f"weights_{nudge}"
    if not plan.exists():
        placed = CompileOptions()  # of what is chosen about ranks, not about what is computed
        options = replace(
            compiled.options,
            cluster="local:1",
            **{name: getattr(placed, name) for name in ("set", "sections", "strategy", "taken_back")},
        )
        alone = check_exactness(compile_model(model, options), required=True)
        alone.write_plan(plan, report_page)
    if nudge:
        save_nudged_weights(model, weights, nudge)
    given_weights = ("--init", str(weights)) if nudge else ()
    return train_distributed(plan, 1, STEPS, folder / f"run_of_one_{nudge}", *given_weights)


def print_table(rows: Iterable[Row], json_file: Path | None) -> None:
    """Prints the rows as they come as a Markdown table, and writes them to `json_file`, if any."""
    table = BenchmarkTable(
        (
            *("architecture", "family", "glue", "sections", "check", "by layers", "run"),
            *("compile CPU s", "check CPU s"),
        ),
        "Small random models of public architectures: compiled for three ranks, checked for every input "
        f"pattern, trained {STEPS} steps. torch {torch.__version__}, float32 on CPU. By layers: the check of "
        "a capture in which each stack of layers is opened. Processor time includes child processes.",
        json_file,
    )
    for r in rows:
        table.add_row(
            r.name,
            r.family,
            r.glue,
            _sections(r),
            *map(_cell, (r.check, r.layers, r.run)),
            f"{r.compile_seconds:.1f}",
            f"{r.check_seconds:.1f}",
        )


def summarize(rows: Sequence[Row]) -> str:
    """How many rows are without an error, the failures by cause, and which fusion rules matched."""
    exact = sum(not r.error for r in rows)
    lines = ["", f"{exact} of {len(rows)} without an error."]
    lines.append(
        f"Processor time: {sum(r.compile_seconds for r in rows):.0f} s to compile, "
        f"{sum(r.check_seconds for r in rows):.0f} s to check."
    )
    if opened := [r for r in rows if r.layers != SKIPPED]:
        others = [r.name for r in opened if r.layers != EXACT]
        lines.append(
            f"By layers: {len(opened) - len(others)} of {len(opened)} exact"
            + (f"; not exact: {', '.join(others)}." if others else ".")
        )
    causes: dict[str, list[str]] = defaultdict(list)
    for r in rows:
        if r.error:
            causes[r.cause].append(r.name)
    lines += [
        f"- {cause}: {', '.join(names)}" for cause, names in sorted(causes.items(), key=lambda c: -len(c[1]))
    ]
    fused: dict[str, list[str]] = defaultdict(list)
    for r in rows:
        for rule in r.fused:
            fused[rule].append(r.name)
    lines += ["", "Fusion rules, and why they did not match:"] if fused else []
    lines += [f"- {rule}: {', '.join(names)}" for rule, names in sorted(fused.items())]
    return "\n".join(lines)


def _sections(row: Row) -> str:
    """The sections' names, with the mode of those that are not trained."""
    return (
        ", ".join(name if mode == "train" else f"{name} ({mode})" for name, mode in row.sections.items())
        or SKIPPED
    )


def _cell(text: str) -> str:
    """An error as one cell: without the folders of its place, and no column breaks."""
    return re.sub(r"\S*/site-packages/", "", text).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--family", help="only architectures of this family")
    parser.add_argument("--ranks", type=int, default=RANKS, help="gloo ranks of a run")
    parser.add_argument("--no-run", action="store_true", help="compile and check only")
    parser.add_argument(
        "--fuse", action="store_true", default=None, help="with fused operators, and which rules matched"
    )
    parser.add_argument("--layers", action="store_true", help="capture by layers, too")
    parser.add_argument("--sharding", help="of optimizers, such as zero1, with each section on all ranks")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    add_json_option(parser)
    options = parser.parse_args()
    known = {e.name: e for e in entries() if options.family in (None, e.family)}
    if unknown := [n for n in options.names if n not in known]:
        parser.error(f"no architecture {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[n] for n in options.names or known]
    if options.list:
        print("\n".join(f"{e.family:16} {e.name}" for e in chosen))
        return 0
    rows = list[Row]()

    def look_at_each() -> Iterator[Row]:
        for entry in chosen:
            row = look(
                entry, options.ranks, not options.no_run, options.fuse, options.layers, options.sharding
            )
            rows.append(row)
            print(
                f"{row.wall_seconds:6.1f} s  {row.name:24} {row.error or EXACT}", file=sys.stderr, flush=True
            )
            yield row

    print_table(look_at_each(), options.json)
    print(summarize(rows))
    return 1 if any(r.error for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
