"""`secc report`: writes the page of a plan again, with a simulated step and with a run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

import secc
from secc.cli import main
from secc.codegen.plan_writer import replace_file
from secc.runtime.plan.compiled_files import read_compiled_files
from secc.runtime.plan.plan_file import load_plan
from tests.cli.test_drift import write_run_log
from tests.e2e.harness import compile_and_write


def run_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def plan(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("plan") / "plan", root / "examples/captions.py"
    compile_and_write(model, folder, check=False, cluster="local:3", strategy="apart", global_batch=8)
    return folder


def write_metrics(logs: Path, steps: int) -> None:
    common = {"grad_norm": 1.0, "samples": 32, "tokens": 99, "step_time_s": 0.5}
    lines = [json.dumps({"step": 1 + i, "loss": 4.0 - i / 10} | common) for i in range(steps)]
    (logs / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_report_of_a_plan_has_a_simulated_step(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (plan / "report.html").read_text()
    assert "secc report PLAN/" in before and '"timeline":null' in before
    assert run_command("report", plan, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(plan / "report.html")}
    page = (plan / "report.html").read_text()
    assert '"timeline":{"ns_per_tick"' in page and "waiting for other ranks" in page
    assert {*(read_compiled_files(plan) or ())} >= {"report.html", "plan.json"}


def test_report_says_where_its_step_differs_from_the_plan(plan: Path, tmp_path: Path) -> None:
    page = secc.Plan(plan).report(out=tmp_path / "page.html")
    assert page == tmp_path / "page.html" and "The step was simulated for this report" in page.read_text()


def test_report_of_a_run_shows_loss_times_waits_and_drift(plan: Path, tmp_path: Path) -> None:
    logs = write_run_log(tmp_path / "logs", load_plan(plan), {"encoder": 12.0})
    write_metrics(logs, 6)
    assert run_command("report", plan, logs) == 0
    page = (logs / "report.html").read_text()
    assert "the loss went from 4 to 3.5" in page and "when the plan was made" in page
    assert "12.00×" in page and '"losses":[[1.0,4.0,4.0,4.0]' in page


def test_a_short_run_has_no_drift_but_a_report(plan: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    write_metrics(logs, 1)
    assert run_command("report", plan, logs, "-o", tmp_path / "page.html") == 0
    assert (
        "Drift is not known" in (tmp_path / "page.html").read_text() and not (logs / "report.html").exists()
    )


def test_bad_input_is_one_message(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "metrics.jsonl").write_text('one\n[1]\n{"step": "two", "loss": null}\n')
    for arguments, message in (
        ([plan, tmp_path / "empty"], "cannot read the run's log"),
        ([plan, tmp_path / "words"], "not a line of a run's log: expected an object, got a list of 1"),
        ([plan, "-o", tmp_path], "the output is a folder"),
        ([plan, "-o", tmp_path / "no" / "page.html"], "cannot write the report"),
        ([plan, "--baselines", "none"], "expected names of baselines"),
        ([tmp_path / "empty"], "plan.json"),
    ):
        assert run_command("report", *arguments) == 2, message
        said = capsys.readouterr().err
        assert message in said and "what to do" in said and "Traceback" not in said


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """`--output /dev/stdout` and pipes: a rename over them would leave a regular file there."""
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    replace_file(pipe, "page\n")
    reader.join(timeout=10)
    assert received == ["page\n"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
