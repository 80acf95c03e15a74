"""The list of checks, and the run that goes through it: first those that only compare, together; then those
that measure time, one after the other. Each check is a process of its own with a time limit, each result a
file of its own, so that a later call goes on where one call ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_day import cost_checks as costs
from tools.gpu_day import kernel_checks as kernels
from tools.gpu_day import training_checks as training
from tools.gpu_day.outcome import Bench, Check, Outcome, set_environment

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("secc", "passes", "runtime", "templates", "tools", "tests/models", "examples")
CHECKS = (
    Check("kernels-exact", "fused operators against float64 on 500 shapes", 300, kernels.check_exactness),
    Check("kernels-same-bits", "fused operators twice", 120, kernels.check_same_bits),
    Check("sanitizer", "memory accesses and races of the operators", 300, kernels.check_memory_accesses),
    Check("examples", "the examples against plain PyTorch", 300, training.check_examples),
    Check("zoo", "twenty architectures against plain PyTorch", 300, training.check_zoo),
    Check("features", "models with unlike operations against plain PyTorch", 400, training.check_features),
    Check("shared-ranks", "several ranks on the card, the same", 300, training.check_shared_ranks),
    Check("same-bits", "a plan twice, and with every launch awaited", 240, training.check_same_bits),
    Check("leaks", "memory over 200 steps", 240, training.check_leaks),
    Check("kernels-compiled", "the operators' launches, compiled and kept", 300, kernels.compile_launches),
    Check("steps-compiled", "plans of the timed steps", 300, costs.compile_step_plans),
    *(
        Check(
            f"long-{name}",
            "500 steps against plain PyTorch's curve",
            580,
            partial(costs.check_long_run, name),
        )
        for name in ("distillation", "llava")
    ),
    Check("card", "the software, and the card with its rates", 90, kernels.describe_card, True),
    *(
        Check(
            f"steps-{name}",
            "a rank's steps and memory",
            200,
            partial(costs.measure_steps, name),
            True,
            "steps-compiled",
        )
        for name in costs.STEP_MODELS
    ),
    *(
        Check(f"profile-{name}", "costs at sizes held back", 300, partial(costs.measure_profile, name), True)
        for name in costs.STEP_MODELS
    ),
    Check(
        "kernel-speed",
        "fused operators against eager, compiled, Liger",
        420,
        kernels.measure_speed,
        True,
        "kernels-compiled",
    ),
    Check("links", "rates and links of this machine", 180, costs.measure_links, True),
)


def run_here(name: str, out: Path, dry: bool) -> None:
    """Runs one check in this process and writes its result; an error counts as a failure."""
    check = next(c for c in CHECKS if c.name == name)
    folder = out / f"{name}-{os.getpid()}"
    folder.mkdir(parents=True)
    start = time.monotonic()
    try:
        outcome = check.run(Bench(folder, dry))
    except Exception:
        outcome = Outcome(failures=[traceback.format_exc(limit=-4)])
    _write(out, name, outcome, time.monotonic() - start, dry)


def run_all(out: Path, dry: bool, minutes: float, only: Sequence[str] = ()) -> bool:
    """Runs the checks that have no result for these sources yet, until the time is over. Returns whether all
    have one and none failed."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    needed = {check.needs for check in CHECKS if check.name in only}
    chosen = [check for check in CHECKS if not only or check.name in {*only, *needed}]

    def run(check: Check) -> bool:
        done = _run_if_due(check, out, dry, end)
        (out / "page.md").write_text(make_page(out))
        return done

    together = 1 if dry else sum(not check.alone for check in chosen)
    with ThreadPoolExecutor(max(1, together)) as pool:
        finished = list(pool.map(run, [check for check in chosen if not check.alone]))
    finished += [run(check) for check in chosen if check.alone]
    return all(finished)


def _run_if_due(check: Check, out: Path, dry: bool, end: float) -> bool:
    """Runs a check that has no result for these sources, if the time until `end` is enough. Returns whether
    it has a result and nothing failed."""
    if (known := read_result(out, check.name)) is None or known["sources"] != source_digest():
        left = end - time.monotonic()
        if left < min(check.limit_s, 60):
            print(f"{check.name}: left for the next call", flush=True)
            return False
        _run_apart(check, out, dry, min(check.limit_s, left))
        known = read_result(out, check.name)
    assert known is not None
    print(f"{check.name}: {_verdict(known)}", flush=True)
    return not known["failures"]


def _run_apart(check: Check, out: Path, dry: bool, limit_s: float) -> None:
    """Runs a check in a session of its own, and ends all its processes after the limit."""
    command = [sys.executable, "-m", "tools.gpu_day", "--run", check.name, "--out", str(out)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = set_environment({"PYTHONPATH": os.pathsep.join(paths)})
    start = time.monotonic()
    with (out / f"{check.name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_session(process.pid)
    if code != 0:
        why = f"ended with {code}" if code is not None else f"not done within {limit_s:.0f} s"
        tail = (out / f"{check.name}.log").read_text()[-1500:]
        _write(out, check.name, Outcome(failures=[f"{why}: {tail}"]), time.monotonic() - start, dry)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def source_digest() -> str:
    """Returns a digest of the sources that a result depends on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def read_result(out: Path, name: str) -> dict[str, Any] | None:
    """Returns the result of a check: name, figures, failures, seconds, sources; None if there is none."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _write(out: Path, name: str, outcome: Outcome, seconds: float, dry: bool) -> None:
    result = {"name": name, **asdict(outcome), "seconds": round(seconds, 1), "dry": dry}
    result |= {"sources": source_digest(), "commit": os.environ.get("COMMIT", "")}
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))


def _verdict(result: dict[str, Any]) -> str:
    failures = result["failures"]
    first = f"{len(failures)} wrong: {failures[0].splitlines()[-1][:160]}" if failures else "as it should be"
    return f"{first} ({result['seconds']} s)"


def make_page(out: Path) -> str:
    """Returns the results as a Markdown page: a table of verdicts, then all figures and failures."""
    results = [(check, r) for check in CHECKS if (r := read_result(out, check.name)) is not None]
    lines = ["# Results on a GPU", "", "`bash tools/gpu_day.sh`", "", "| check | shows | result | seconds |"]
    lines.append("| --- | --- | --- | --- |")
    for check, r in results:
        verdict = f"{len(r['failures'])} wrong" if r["failures"] else "right"
        lines.append(f"| {check.name} | {check.shows} | {verdict} | {r['seconds']} |")
    for check, r in results:
        lines += ["", f"## {check.name}", ""]
        lines += [f"- {name}: {_text(value)}" for name, value in r["figures"].items()]
        lines += [f"- wrong: {failure.strip()[:600]}" for failure in r["failures"]]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
