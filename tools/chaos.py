"""Breaks runs at random moments and checks that they end up where an undisturbed run does.

A case is drawn from {SIGKILL, SIGSTOP, SIGTERM, truncated checkpoint} x {rank, loader, launcher} x {start,
step, save, restart}. The run restarts by itself (`--max-restarts`), notices hangs (`--hang-timeout`), and is
started again with the same command if its launcher ends, as Slurm or a user would do. A case passes if the
final weights are bit-equal to those of the undisturbed run, no process is left, and no traceback was printed.

    python -m tools.chaos --cases 50 --seed 0 --json docs/benchmarks/chaos.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from secc.runtime.parameters.checkpoint import load_full_state_dict

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "TRUNCATE")
PROCESSES = ("rank", "loader", "launcher")
MOMENTS = ("start", "step", "save", "restart")
SAVE_EVERY = 10
LEFT_S = 30.0  # until no process of a run is left
CASE_LIMIT_S = 300.0
MAX_STARTS = 6


@dataclass(frozen=True)
class Case:
    """What is broken, where and when. `TRUNCATE` cuts a file of the newest checkpoint, then kills."""

    number: int
    fault: str
    process: str
    moment: str


@dataclass(frozen=True)
class Outcome:
    """How a case went. `problem` is "" if it passed. Seconds from the fault: until a process ended, and until
    a new step was trained (None: the run was over before). `repeated`: steps that were trained twice."""

    case: Case
    problem: str
    starts: int
    end_s: float | None
    back_s: float | None
    repeated: int


class Run:
    """A run of a plan in folders of its own, started as often as needed."""

    def __init__(self, plan: Path, folder: Path, steps: int) -> None:
        self.plan, self.folder, self.steps = plan, folder, steps
        self.saved, self.logs = folder / "saved", folder / "logs"
        self.messages = folder / "messages"
        self.starts = 0

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
            "--hang-timeout": 6,
            "--log-dir": self.logs,
        }
        arguments = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "secc.runtime.training.supervisor", str(self.plan), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "SECC_CHAOS": str(self.folder)}
        with self.messages.open("ab") as messages:
            return subprocess.Popen(command, env=environment, stdout=messages, stderr=messages)

    def processes(self) -> dict[int, str]:
        """Returns the rank of each process of the run that is not its launcher: "1", and "1 loader"."""
        by_rank: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            names = dict(v.split(b"=", 1) for v in variables if b"=" in v)
            if names.get(b"SECC_CHAOS") == str(self.folder).encode() and b"RANK" in names:
                by_rank.setdefault(names[b"RANK"].decode(), []).append(int(entry.name))
        return {
            pid: rank if i == 0 else f"{rank} loader"
            for rank, pids in by_rank.items()
            for i, pid in enumerate(sorted(pids))
        }

    def trained_steps(self) -> list[int]:
        """Returns the numbers of the steps in the order in which they were trained."""
        path = self.logs / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps: list[int] = []
        for line in lines:
            with suppress(ValueError):
                steps.append(json.loads(line)["step"])
        return steps


def draw_cases(count: int, seed: int) -> list[Case]:
    """Draws cases; a truncated checkpoint needs one that was written, and a kill to be read again."""
    draw, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        case = Case(len(cases), draw.choice(FAULTS), draw.choice(PROCESSES), draw.choice(MOMENTS))
        if case.fault == "TRUNCATE" and case.moment == "start":
            continue
        if case.fault == "SIGSTOP" and case.process == "launcher":
            continue  # its ranks train on; nothing is to be noticed
        cases.append(case)
    return cases


def run_case(case: Case, run: Run, expected: dict[str, torch.Tensor], seed: int) -> Outcome:
    """Runs a case to its end."""
    draw, began = random.Random(f"{seed}/{case.number}"), time.monotonic()
    process = run.start()
    fault_at: float | None = None
    ended_at: float | None = None
    fault_steps = 0
    try:
        for moment in _await_moment(case, run, process, draw):
            if moment and process.poll() is None:
                fault_steps, fault_at = len(run.trained_steps()), time.monotonic()
                _break(case, run, process, draw)
                break
        back_at: float | None = None
        before = set(run.processes())
        while True:
            if (
                fault_at is not None
                and ended_at is None
                and (process.poll() is not None or before - set(run.processes()))
            ):
                ended_at = time.monotonic()
            if ended_at is not None and back_at is None and len(run.trained_steps()) > fault_steps:
                back_at = time.monotonic()
            if (code := process.poll()) is not None:
                newest = max(run.trained_steps(), default=0)
                if code == 0 and newest >= run.steps:
                    break
                if run.starts == MAX_STARTS:
                    return _outcome(case, run, "the run did not end", fault_at, ended_at, back_at)
                _wait_until_gone(run)
                process = run.start()
            if time.monotonic() - began > CASE_LIMIT_S:
                return _outcome(case, run, "the run takes too long", fault_at, ended_at, back_at)
            time.sleep(0.05)
        problem = _find_problem(run, expected)
        return _outcome(case, run, problem, fault_at, ended_at, back_at)
    finally:
        process.kill()
        process.wait()


def _await_moment(
    case: Case, run: Run, process: subprocess.Popen[bytes], draw: random.Random
) -> Iterator[bool]:
    """Yields whether the moment of a case has come, until the run is over."""
    step, delay, killed = draw.randrange(2, run.steps - 5), draw.random() * 4, False
    started: float | None = None
    while process.poll() is None:
        processes, trained = run.processes(), run.trained_steps()
        match case.moment:
            case "start":
                started = started or (time.monotonic() if processes else None)
                yield started is not None and time.monotonic() - started > delay
            case "step":
                yield max(trained, default=0) >= step
            case "save":
                late = max(trained, default=0) >= min(step, run.steps - 2 * SAVE_EVERY)
                yield late and any(run.saved.glob("step_*.incomplete"))
            case _:
                if not killed and max(trained, default=0) >= min(step, run.steps // 2):
                    os.kill(min(processes), signal.SIGKILL)  # a first fault, so that the run restarts
                    killed = True
                    started = time.monotonic()
                yield killed and time.monotonic() - (started or 0) > 1 + delay and bool(processes)
        time.sleep(0.002 if case.moment == "save" else 0.02)


def _break(case: Case, run: Run, process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Does what a case says."""
    victims = [process.pid]
    if case.process != "launcher":
        is_loader = case.process == "loader"
        victims = [
            pid for pid, name in run.processes().items() if name.endswith("loader") == is_loader
        ] or victims
    number = signal.SIGKILL if case.fault == "TRUNCATE" else signal.Signals[case.fault]
    if case.fault == "TRUNCATE":
        files = [path for path in run.saved.glob("step_????????/*") if path.stat().st_size]
        newest = max((path.parent.name for path in files), default="")
        for path in [path for path in files if path.parent.name == newest][:1]:
            os.truncate(path, path.stat().st_size // 2)
    with suppress(ProcessLookupError):
        os.kill(draw.choice(victims), number)


def _find_problem(run: Run, expected: dict[str, torch.Tensor]) -> str:
    """Returns what is wrong at the end of a case; "" if nothing is."""
    if not _wait_until_gone(run):
        return f"processes are left: {sorted(run.processes())}"
    weights = load_full_state_dict(run.saved)
    different = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    if different:
        return f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    text = run.messages.read_text(errors="replace")
    return "a traceback was printed" if "Traceback (most recent call last)" in text else ""


def _wait_until_gone(run: Run) -> bool:
    deadline = time.monotonic() + LEFT_S
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not run.processes()


def _outcome(
    case: Case, run: Run, problem: str, fault_at: float | None, ended_at: float | None, back_at: float | None
) -> Outcome:
    steps = run.trained_steps()
    end_s, back_s = (
        None if at is None or fault_at is None else round(at - fault_at, 2) for at in (ended_at, back_at)
    )
    return Outcome(case, problem, run.starts, end_s, back_s, len(steps) - len(set(steps)))


def main(arguments: Sequence[str]) -> int:
    """Runs cases and prints a line for each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", type=Path, help="a plan directory (default: examples/captions.py on 3 ranks)"
    )
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    o = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="secc-chaos-") as folder:
        plan = o.plan.resolve() if o.plan else _compile_example(Path(folder) / "plan")
        whole = Run(plan, Path(folder) / "whole", o.steps)
        whole.folder.mkdir()
        if whole.start().wait():
            sys.stderr.write(whole.messages.read_text())
            return 1
        expected, outcomes = load_full_state_dict(whole.saved), list[Outcome]()
        for case in draw_cases(o.cases, o.seed):
            run = Run(plan, Path(folder) / f"case_{case.number}", o.steps)
            run.folder.mkdir()
            outcome = run_case(case, run, expected, o.seed)
            outcomes.append(outcome)
            sys.stdout.write(_line(outcome) + "\n")
            sys.stdout.flush()
            if outcome.problem:
                sys.stderr.write(run.messages.read_text(errors="replace"))
            if o.json:
                o.json.write_text(json.dumps(_table(outcomes, o.seed, o.steps), indent=1) + "\n")
    failed = sum(bool(outcome.problem) for outcome in outcomes)
    sys.stdout.write(f"{len(outcomes) - failed} of {len(outcomes)} cases passed\n")
    return int(failed > 0)


def _line(o: Outcome) -> str:
    c = o.case
    times = f"ended {o.end_s} s, back {o.back_s} s, {o.repeated} steps repeated, {o.starts} starts"
    return f"{c.number:4} {c.fault:8} {c.process:8} {c.moment:8} {o.problem or 'ok'}: {times}"


def _table(outcomes: Sequence[Outcome], seed: int, steps: int) -> dict[str, Any]:
    cases = [asdict(o.case) | {k: v for k, v in asdict(o).items() if k != "case"} for o in outcomes]
    return {"seed": seed, "steps": steps, "passed": sum(not o.problem for o in outcomes), "cases": cases}


def _compile_example(output: Path) -> Path:
    model = ROOT / "examples" / "captions.py"
    options = ["-o", str(output), "--cluster", "local:3", "--global-batch", "4", "--strategy", "apart"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "secc", "compile", str(model), *options]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
