"""Breaks runs at chosen moments and checks that they end up where an undisturbed run does.

    python -m tools.chaos --cases 50 --seed 0 --json docs/benchmarks/chaos.json

The cases are {SIGKILL, SIGSTOP, SIGTERM, full disk, truncated checkpoint, dropped connections} x {rank,
loader, recorder, launcher, writer} x the moments of `tools.chaos.moments`, without those that cannot be
(`is_possible`), in an order drawn from the seed. The run restarts by itself (`--max-restarts`), notices hangs
(`--hang-timeout`), and is started again with the same command if its launcher ends, as Slurm or a user would
do. A case passes if the final weights are bit-equal to those of the undisturbed run under the same plan, not
more than the steps since the checkpoint before are repeated, no process is left, and no traceback was
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from secc.runtime.parameters.checkpoint import load_full_state_dict
from tools.chaos.moments import CASE_VARIABLE, FIRED_FILE, IN_WRITER, MOMENTS, Case

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "DISK_FULL", "TRUNCATE", "DROP")
PROCESSES = ("rank", "loader", "recorder", "launcher", "writer")
# Two ranks with a section each, which exchange messages; two that both hold all sections, which reduce.
PLANS = {"apart": "apart", "together": "colocate"}
SAVE_EVERY = 5
LEFT_S = 30.0  # until no process of a run is left
CASE_LIMIT_S = 300.0
MAX_STARTS = 6
_POLL_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """How a case went. `problem` is "" if it passed. Seconds from the fault: until a process ended, and until
    a new step was trained (None: not before the end). `repeated`: steps that were trained again."""

    case: Case
    problem: str
    starts: int
    end_s: float | None
    back_s: float | None
    repeated: int


class Run:
    """A run of a plan in a folder of its own, started as often as needed; `case` breaks it."""

    def __init__(self, plan: Path, folder: Path, steps: int, case: Case | None = None) -> None:
        self.plan, self.folder, self.steps, self._case = plan, folder, steps, case
        self.saved, self.logs = folder / "saved", folder / "logs"
        self.messages = folder / "messages"
        self.starts = 0
        folder.mkdir()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the launcher."""
        self.starts += 1
        options = {
            "--steps": self.steps,
            "--save": self.saved,
            "--save-every": SAVE_EVERY,
            "--keep": 3,
            "--resume": "auto",
            "--max-restarts": 2,
            "--hang-timeout": 5,
            "--recorders": 1,
            "--log-dir": self.logs,
        }
        arguments = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "secc.runtime.training.supervisor", str(self.plan), *arguments]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}", "SECC_CHAOS": str(self.folder)}
        if self._case is not None:
            environment["PYTHONPATH"] += f"{os.pathsep}{FOLDER / 'site'}"
            environment[CASE_VARIABLE] = json.dumps(asdict(self._case) | {"folder": str(self.folder)})
        with self.messages.open("ab") as messages:
            return subprocess.Popen(
                [*command, "--no-first-check"], env=environment, stdout=messages, stderr=messages
            )

    def processes(self) -> set[int]:
        """Returns the processes of the run that are not its launcher."""
        found = set[int]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                variables = (entry / "environ").read_bytes() if entry.name.isdecimal() else b""
                if f"SECC_CHAOS={self.folder}\0".encode() in variables and b"\0RANK=" in variables:
                    found.add(int(entry.name))
        return found

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


def is_possible(fault: str, process: str, moment: str) -> bool:
    """Tells whether there is such a case. At the start there is no checkpoint that could be truncated; a rank
    shuts its own connections; a stopped launcher changes nothing until someone continues it."""
    return not (
        (fault == "TRUNCATE" and moment == "start")
        or (fault == "DROP" and (process != "rank" or moment in ("start", "restart", *IN_WRITER)))
        or (fault == "SIGSTOP" and process == "launcher")
    )


def draw_cases(count: int, seed: int) -> list[Case]:
    """Draws cases: all possible ones in a random order, and again with other ranks and times."""
    draw, cases = random.Random(seed), list[Case]()
    possible = [c for c in product(FAULTS, PROCESSES, MOMENTS) if is_possible(*c)]
    while len(cases) < count:
        draw.shuffle(possible)
        for fault, process, moment in possible:
            plan = {"message": "apart", "reduce": "together"}.get(moment) or draw.choice(list(PLANS))
            most = {"load": 20, "forward": 40, "message": 20, "reduce": 15, "optimizer": 15}.get(moment, 3)
            rank = 0 if moment in ("rename", "latest") else draw.randrange(2)
            case = Case(
                len(cases), fault, process, moment, plan, rank, draw.randint(1, most), 4 * draw.random()
            )
            cases.append(case)
    return cases[:count]


def run_case(run: Run, case: Case, expected: Mapping[str, torch.Tensor]) -> Outcome:
    """Runs a case to its end."""
    began, process = time.monotonic(), run.start()
    before = set[int]()
    ended_at: float | None = None
    back_at: float | None = None
    steps_before: int | None = None
    try:
        while True:
            code, fired = process.poll(), run.fired_at()
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
                problem = "the fault did not happen" if fired is None else _find_problem(run, expected)
            elif code is not None and run.starts == MAX_STARTS:
                problem = "the run did not end"
            elif code is not None:
                _wait_until_gone(run)
                process = run.start()
            if problem is None and time.monotonic() - began > CASE_LIMIT_S:
                problem = "the run takes too long"
            if problem is not None:
                steps = run.trained_steps()
                repeated = len(steps) - len(set(steps))
                end_s, back_s = (at and round(at - (fired or at), 2) for at in (ended_at, back_at))
                return Outcome(case, problem, run.starts, end_s, back_s, repeated)
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()


def _find_problem(run: Run, expected: Mapping[str, torch.Tensor]) -> str:
    """Returns what is wrong at the end of a case; "" if nothing is."""
    if not _wait_until_gone(run):
        return f"processes are left: {sorted(run.processes())}"
    weights = load_full_state_dict(run.saved)
    different = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    if different:
        return f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    # A checkpoint in the background may be lost with the rank, and a truncated one makes a third.
    returns = [a - b + 1 for a, b in pairwise(run.trained_steps()) if b <= a]
    if any(steps > 3 * SAVE_EVERY for steps in returns):
        return f"{max(returns)} steps were repeated"
    text = run.messages.read_text(errors="replace")
    return "a traceback was printed" if "Traceback (most recent call last)" in text else ""


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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, after what it has")
    o = parser.parse_args(arguments)
    outcomes = list[dict[str, Any]]()
    if o.json and o.json.exists():
        rows: list[list[Any]] = json.loads(o.json.read_text())["rows"]
        outcomes = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    failed = 0
    with nullcontext(o.folder) if o.folder else tempfile.TemporaryDirectory(prefix="secc-chaos-") as name:
        folder = Path(name)
        plans = {plan: _compile_plan(folder / f"plan_{plan}", strategy) for plan, strategy in PLANS.items()}
        expected = {plan: _train_undisturbed(path, folder / plan, o.steps) for plan, path in plans.items()}
        cases = [c for c in draw_cases(o.cases, o.seed)[o.first :] if o.only in _describe_case(c)]
        for case in cases:
            run = Run(plans[case.plan], folder / f"case_{case.number}", o.steps, case)
            outcome = run_case(run, case, expected[case.plan])
            failed += bool(outcome.problem)
            outcomes.append(_make_row(outcome, o.seed))
            sys.stdout.write(_describe_outcome(outcome) + "\n")
            sys.stdout.flush()
            if outcome.problem:
                sys.stderr.write(run.messages.read_text(errors="replace"))
            if o.json:
                o.json.write_text(_make_table(outcomes))
    sys.stdout.write(f"{len(cases) - failed} of {len(cases)} cases passed\n")
    return int(failed > 0)


def _describe_case(c: Case) -> str:
    return f"{c.number:4} {c.fault:9} {c.process:8} {c.moment:9} {c.plan:8} rank {c.rank}"


def _describe_outcome(o: Outcome) -> str:
    times = f"ended {o.end_s} s, back {o.back_s} s, {o.repeated} steps repeated, {o.starts} starts"
    return f"{_describe_case(o.case)} {o.problem or 'ok'}: {times}"


COLUMNS: tuple[str, ...] = (
    "seed", "number", "fault", "process", "moment", "plan", "rank", "count", "problem", "starts", "end_s",
    "back_s", "repeated",
)  # fmt: skip


def _make_row(outcome: Outcome, seed: int) -> dict[str, Any]:
    fields = asdict(outcome) | asdict(outcome.case) | {"seed": seed}
    return {column: fields[column] for column in COLUMNS}


def _make_table(rows: Iterable[Mapping[str, Any]]) -> str:
    found = list(rows)
    passed = Counter(row["fault"] for row in found if not row["problem"])
    head = {
        "command": "python -m tools.chaos --cases N --seed S",
        "about": "Runs of two CPU ranks that were broken once; a problem of '' means that the final weights"
        " are bit-equal to those of an undisturbed run. Seconds are wall time from the fault, on a machine"
        " that did other work, too: until a process ended, and until a new step was trained.",
        "cases": len(found),
        "passed": sum(passed.values()),
        "passed by fault": passed,
        "columns": COLUMNS,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    table = ",\n".join(f"  {json.dumps([row[column] for column in COLUMNS])}" for row in found)
    return "\n".join(["{", *lines, ' "rows": [', table, " ]", "}", ""])


def _train_undisturbed(plan: Path, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    run = Run(plan, folder, steps)
    if run.start().wait():
        raise SystemExit(run.messages.read_text())
    return load_full_state_dict(run.saved)


def _compile_plan(output: Path, strategy: str) -> Path:
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
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
