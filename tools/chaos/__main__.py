"""Breaks runs at chosen moments and checks that they end up where an undisturbed run does.

    python -m tools.chaos --cases 500 --seed 3 --jobs 2 --json docs/benchmarks/chaos.json

The cases are {SIGKILL, SIGSTOP, SIGTERM, full disk, truncated checkpoint, dropped connections} x {rank,
loader, recorder, launcher, writer, whole node} x the moments of `tools.chaos.moments`, without those that
cannot be (`cases.is_possible`), in an order drawn from the seed. The run restarts by itself
(`--max-restarts`), some of them with fewer ranks (`--on-loss replan`), notices hangs (`--hang-timeout`), and
is started again with the same command if its launcher ends, as Slurm or a user would do.

A case passes if the final weights are bit-equal to those of the undisturbed run under the same plan (after a
re-plan within `REPLAN_RTOL`), not more than the steps since the checkpoint before are repeated, no process is
left, no traceback was printed, and every error was printed with its remedy or followed by a restart. With
`--json`, cases that the table has are not run again, unless they failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from secc.runtime.host.parent_death import die_with_parent
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tools.chaos.cases import PLANS, draw_cases, steps_of_case
from tools.chaos.forked_processes import fork_launcher, import_runtime
from tools.chaos.moments import CASE_VARIABLE, FIRED_FILE, Case

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
SAVE_EVERY = 5
REPLAN_RTOL, REPLAN_ATOL = 1e-4, 1e-6
LEFT_S = 30.0  # until no process of a run is left
CASE_LIMIT_S = 900.0  # also on a machine that does much else
MAX_STARTS = 6
HANG_S = 8
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """How a case went. `problem` is "" if it passed. Seconds from the fault: until a process ended, and until
    a new step was trained (None: not before the end). `repeated`: steps that were trained again. `cpu_s`: the
    processor's time that the case took."""

    case: Case
    problem: str
    starts: int
    end_s: float | None
    back_s: float | None
    repeated: int
    cpu_s: float


class Run:
    """A run of a plan in a folder of its own, started as often as needed; `case` breaks it. `fewer`: the
    directory of the plan for the ranks that are left."""

    def __init__(self, plan: Path, fewer: Path, folder: Path, steps: int, case: Case | None = None) -> None:
        self.plan, self.folder, self.steps, self._case, self._fewer = plan, folder, steps, case, fewer
        self.saved, self.logs = folder / "saved", folder / "logs"
        self.messages = folder / "messages"
        self.starts, self.launcher = 0, 0
        self._codes: dict[int, int] = {}
        folder.mkdir()

    def start(self) -> None:
        """Starts the launcher."""
        self.starts += 1
        case = self._case
        options = {
            "--steps": self.steps,
            "--save": self.saved,
            "--save-every": SAVE_EVERY,
            "--keep": 3,
            "--resume": "auto",
            "--max-restarts": 2,
            "--hang-timeout": HANG_S,
            "--recorders": 1,
            "--log-dir": self.logs,
            "--on-loss": case.on_loss if case is not None else "wait",
            "--rejoin-after": 2,
        }
        arguments = [str(part) for option in options.items() for part in option] + ["--no-first-check"]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
        if case is not None:
            environment["PYTHONPATH"] += f"{os.pathsep}{FOLDER / 'site'}"
            environment[CASE_VARIABLE] = json.dumps(asdict(case) | {"folder": str(self.folder)})

        def executes(rank_environment: Mapping[str, str]) -> bool:
            restarted = rank_environment.get("SECC_ATTEMPT", "0") != "0"
            return case is not None and (case.spawn == "exec" or (case.moment == "restart" and restarted))

        self.launcher = fork_launcher(
            self.plan, arguments, environment, self.messages, executes, lambda plan, ranks: self._fewer
        )

    def exit_code(self) -> int | None:
        """Returns the launcher's exit code; None while it runs. Also waits for orphans, so that they do not
        stay as zombies."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return self._codes.get(self.launcher)

    def processes(self) -> set[int]:
        """Returns the processes of the run that are not its launcher: those that this process, or one that
        it started, has started, or whose parent has ended."""
        parents = dict[int, int]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal():
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        parents[int(entry.name)] = int(parent)
        found, new = set[int](), {os.getpid()}
        while new:
            new = {pid for pid, parent in parents.items() if parent in new}
            found |= new
        return found - {self.launcher}

    def kill(self) -> None:
        """Ends all processes of the run."""
        while processes := self.processes() | ({self.launcher} - self._codes.keys()):
            for pid in processes:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
            self.exit_code()

    def trained_steps(self) -> list[int]:
        """Returns the numbers of the steps in the order in which they were trained."""
        path = self.logs / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps: list[int] = []
        for line in lines:
            with suppress(ValueError):
                steps.append(json.loads(line)["step"])
        return steps

    def fired_at(self) -> float | None:
        """Returns when the fault happened (monotonic seconds); None if it has not."""
        with suppress(OSError, ValueError):
            return float((self.folder / FIRED_FILE).read_text())
        return None


def run_case(run: Run, case: Case, expected: Mapping[str, torch.Tensor]) -> Outcome:
    """Runs a case to its end."""
    began, cpu_before = time.monotonic(), _children_cpu_s()
    run.start()
    before = set[int]()
    ended_at: float | None = None
    back_at: float | None = None
    steps_before: int | None = None
    try:
        while True:
            code, fired = run.exit_code(), run.fired_at()
            if fired is None:
                before = run.processes()
            elif ended_at is None and (code is not None or before - run.processes()):
                ended_at = time.monotonic()
            if fired is not None:
                steps_before = steps_before if steps_before is not None else len(run.trained_steps())
                if ended_at is not None and back_at is None and len(run.trained_steps()) > steps_before:
                    back_at = time.monotonic()
            problem: str | None = None
            if code == 0 and max(run.trained_steps(), default=0) >= run.steps:
                replans = case.on_loss == "replan"
                problem = (
                    "the fault did not happen" if fired is None else _find_problem(run, expected, replans)
                )
            elif code is not None and run.starts == MAX_STARTS:
                problem = "the run did not end"
            elif code is not None:
                _wait_until_gone(run)
                run.start()
            if problem is None and time.monotonic() - began > CASE_LIMIT_S:
                problem = "the run takes too long"
            if problem is not None:
                steps = run.trained_steps()
                repeated = len(steps) - len(set(steps))
                end_s, back_s = (at and round(at - (fired or at), 2) for at in (ended_at, back_at))
                run.kill()
                cpu_s = round(_children_cpu_s() - cpu_before, 1)
                return Outcome(case, problem, run.starts, end_s, back_s, repeated, cpu_s)
            time.sleep(_POLL_S)
    finally:
        run.kill()


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _find_problem(run: Run, expected: Mapping[str, torch.Tensor], replans: bool) -> str:
    """Returns what is wrong at the end of a case; "" if nothing is."""
    if not _wait_until_gone(run):
        return f"processes are left: {sorted(run.processes())}"
    weights = load_full_state_dict(run.saved)
    same = _are_close if replans else torch.equal
    different = [name for name, tensor in expected.items() if not same(weights[name], tensor)]
    if different:
        return f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    # A checkpoint in the background may be lost with the rank, and a truncated one makes a third.
    returns = [a - b + 1 for a, b in pairwise(run.trained_steps()) if b <= a]
    if any(steps > 3 * SAVE_EVERY for steps in returns):
        return f"{max(returns)} steps were repeated"
    text = run.messages.read_text(errors="replace")
    if "Traceback (most recent call last)" in text:
        return "a traceback was printed"
    return _find_lonely_error(text)


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=REPLAN_RTOL, atol=REPLAN_ATOL)


def _find_lonely_error(text: str) -> str:
    """Returns the first error without a remedy or a restart after it; "" if there is none."""
    for part in re.split(r"^(?=error: )", text, flags=re.MULTILINE)[1:]:
        if "what to do: " not in part and not re.search(r"^restart \d+ of ", part, re.MULTILINE):
            return f"an error without a remedy: {part.splitlines()[0]}"
    return ""


def _wait_until_gone(run: Run) -> bool:
    deadline = time.monotonic() + LEFT_S
    while run.processes() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not run.processes()


def main(arguments: Sequence[str]) -> int:
    """Runs cases and prints a line for each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out the cases before N")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their line")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep all that the runs write there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run N cases at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after M minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, after what it has")
    o = parser.parse_args(arguments)
    table = CaseTable(o.json)
    cases = [c for c in draw_cases(o.cases, o.seed)[o.first :] if o.only in _describe_case(c)]
    cases = [c for c in cases if not table.has_passed(o.seed, c.number)]
    import_runtime()
    with nullcontext(o.folder) if o.folder else tempfile.TemporaryDirectory(prefix="secc-chaos-") as name:
        failed, ran = _run_cases(cases, Path(name), o, table)
    sys.stdout.write(f"{ran - failed} of {ran} cases passed\n")
    return int(failed > 0)


def _run_cases(
    cases: Sequence[Case], folder: Path, options: argparse.Namespace, table: CaseTable
) -> tuple[int, int]:
    """Runs cases in `options.jobs` processes, each of which adopts the orphans of its own runs. Returns how
    many failed, and how many ran."""
    workshop = _Workshop(folder)
    context, deadline = get_context("fork"), time.monotonic() + 60 * options.minutes
    needed = sorted({(c.plan, steps_of_case(c)) for c in cases})
    preparation = context.Process(target=workshop.prepare, args=(needed,))
    with _ending([preparation]):
        preparation.join()
    if preparation.exitcode:
        raise SystemExit("the undisturbed runs failed")
    todo, done = _CaseQueue(cases, context.Value("i", 0)), context.SimpleQueue()
    jobs = [context.Process(target=_work, args=(workshop, todo, done, deadline)) for _ in range(options.jobs)]
    failed, ran, working = 0, 0, len(jobs)
    with _ending(jobs):
        while working:
            outcome = done.get()
            if outcome is None:
                working -= 1
                continue
            failed, ran = failed + bool(outcome.problem), ran + 1
            table.add(outcome, options.seed)
            sys.stdout.write(_describe_outcome(outcome) + "\n")
            if outcome.problem:
                sys.stdout.write(workshop.messages(outcome.case))
            sys.stdout.flush()
            if not options.folder and not outcome.problem:
                shutil.rmtree(workshop.folder_of(outcome.case), ignore_errors=True)
        for job in jobs:
            job.join()
    return failed, ran


@contextmanager
def _ending(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Starts processes, and ends those that are left when the block ends, as after a Ctrl-C."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


class _CaseQueue:
    """Cases for several processes; `taken` is the number of those that have been taken."""

    def __init__(self, cases: Sequence[Case], taken: Any) -> None:
        self._cases, self._taken = cases, taken

    def take(self) -> Case | None:
        """Returns the next case; None if there is none."""
        with self._taken.get_lock():
            number = self._taken.value
            self._taken.value += 1
        return self._cases[number] if number < len(self._cases) else None


def _work(workshop: _Workshop, todo: _CaseQueue, done: Any, deadline: float) -> None:
    """Runs cases until there is none, or the time is over."""
    _adopt_orphans()
    while time.monotonic() < deadline and (case := todo.take()) is not None:
        done.put(workshop.run(case))
    done.put(None)


def _adopt_orphans() -> None:
    """Makes this process the parent of processes that those it has started leave behind. It ends together
    with the process that has started it, and so do its launchers."""
    die_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Workshop:
    """Plans in a folder, the weights of their undisturbed runs, and the folders of cases."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self, plans_and_steps: Sequence[tuple[str, int]]) -> None:
        """Compiles the plans and trains them undisturbed."""
        _adopt_orphans()
        for name, steps in plans_and_steps:
            plan = self._plan(name)
            if not plan.exists():
                _compile_plan(plan, PLANS[name])
            folder = self._folder / f"{name}_{steps}"
            if folder.exists():  # of an earlier call with this --folder
                continue
            run = Run(plan, self._fewer(name), folder, steps)
            run.start()
            while (code := run.exit_code()) is None:
                time.sleep(_POLL_S)
            if code:
                sys.stderr.write(run.messages.read_text())
                raise SystemExit(1)

    def run(self, case: Case) -> Outcome:
        """Runs a case."""
        steps = steps_of_case(case)
        shutil.rmtree(self.folder_of(case), ignore_errors=True)
        expected = load_full_state_dict(self._folder / f"{case.plan}_{steps}" / "saved")
        run = Run(self._plan(case.plan), self._fewer(case.plan), self.folder_of(case), steps, case)
        return run_case(run, case, expected)

    def folder_of(self, case: Case) -> Path:
        """Returns the folder of a case's run."""
        return self._folder / f"case_{case.number}"

    def messages(self, case: Case) -> str:
        """Returns what the run of a case has printed."""
        return (self.folder_of(case) / "messages").read_text(errors="replace")

    def _plan(self, name: str) -> Path:
        return self._folder / f"plan_{name}"

    def _fewer(self, name: str) -> Path:
        return self._folder / f"plan_{name}-on-1-ranks"


def _describe_case(c: Case) -> str:
    on_loss = f" {c.on_loss}" if c.on_loss != "wait" else ""
    return f"{c.number:4} {c.fault:9} {c.process:8} {c.moment:9} {c.plan:8} rank {c.rank} {c.spawn}{on_loss}"


def _describe_outcome(o: Outcome) -> str:
    times = f"ended {o.end_s} s, back {o.back_s} s, {o.repeated} steps repeated, {o.starts} starts"
    times += f", {o.cpu_s} s of CPU"
    return f"{_describe_case(o.case)} {o.problem or 'ok'}: {times}"


COLUMNS: tuple[str, ...] = (
    "seed", "number", "fault", "process", "moment", "plan", "rank", "count", "spawn", "on_loss", "problem",
    "starts", "end_s", "back_s", "repeated", "cpu_s",
)  # fmt: skip


class CaseTable:
    """The outcomes of cases by seed and number, in a file if one is given."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._rows = dict[tuple[int, int], dict[str, Any]]()
        if file is not None and file.exists():
            for values in json.loads(file.read_text())["rows"]:
                row = dict(zip(COLUMNS, values, strict=True))
                self._rows[row["seed"], row["number"]] = row

    def has_passed(self, seed: int, number: int) -> bool:
        """Tells whether the case was run and passed."""
        row = self._rows.get((seed, number))
        return row is not None and not row["problem"]

    def add(self, outcome: Outcome, seed: int) -> None:
        """Adds the outcome of a case, in place of an earlier one."""
        values = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
        values |= asdict(outcome.case) | {"seed": seed}
        self._rows[seed, outcome.case.number] = {column: values[column] for column in COLUMNS}
        if self._file is not None:
            scratch = self._file.with_suffix(".tmp")
            scratch.write_text(_make_table(self._rows.values()))
            os.replace(scratch, self._file)


def _make_table(rows: Iterable[Mapping[str, Any]]) -> str:
    found = list(rows)
    passed = Counter(row["fault"] for row in found if not row["problem"])
    head = {
        "command": "python -m tools.chaos --cases N --seed S",
        "about": "Runs of two CPU ranks that were broken once; a problem of '' means that the final weights"
        " are bit-equal to those of an undisturbed run, or within rtol 1e-4 with on_loss 'replan'. Seconds"
        " are wall time from the fault, on a machine that did other work, too: until a process ended, and"
        " until a new step was trained. With spawn 'fork' ranks come from a process that has imported torch.",
        "cases": len(found),
        "kinds": len({(row["fault"], row["process"], row["moment"]) for row in found}),
        "passed": sum(passed.values()),
        "passed by fault": passed,
        "columns": COLUMNS,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    table = ",\n".join(f"  {json.dumps([row[column] for column in COLUMNS])}" for row in found)
    return "\n".join(["{", *lines, ' "rows": [', table, " ]", "}", ""])


def _compile_plan(output: Path, strategy: str) -> None:
    """Compiles a plan for two ranks, and one for the rank that is left, as `--on-loss replan` does."""
    options = ["-o", str(output), "--cluster", "local:2", "--global-batch", "4", "--strategy", strategy]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "secc",
        "compile",
        str(ROOT / "tools" / "models" / "repeats.py"),
        *options,
    ]
    again = "import sys, pathlib; from secc.driver.replan_for_ranks import replan_for_ranks\n"
    again += "replan_for_ranks(pathlib.Path(sys.argv[1]), 1)"
    for arguments in (command, [sys.executable, "-c", again, str(output)]):
        subprocess.run(arguments, env=environment, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
