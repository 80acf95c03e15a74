"""Starting and ending a run: rejected input, a rank's death, exit codes, and the trace."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from secc.runtime.errors import UserError
from secc.runtime.host.folder_lock import hold_lock
from secc.runtime.training.options import parse_options
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import ALONE, APART, FIXTURE, UNEVEN, write_plan
from tests.runtime.fixtures.captioner.sections import terms
from tests.runtime.run_processes import process_of_rank, ranks_of, start, start_run, wait_for_step
from tests.runtime.train_captioner import train

pytestmark = pytest.mark.gloo


def test_killed_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000")
    wait_for_step(plan, 1, process)
    assert len(list(ranks_of(plan))) >= 6  # each rank and its loader
    victim = process_of_rank(plan, 1)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"error: rank 1 (process {victim}) was killed by SIGKILL; all ranks were stopped" in errors
    assert "rank 0" not in errors and "Traceback" not in errors
    assert not list(ranks_of(plan))


def test_trace_shows_every_compute_and_transfer(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", UNEVEN)
    train(tmp_path / "plan", UNEVEN, 2, "--trace", str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert list(tmp_path.glob("trace.json.*")) == []
    assert {e["pid"] for e in events} == {0, 1, 2}
    compute = [e["args"] for e in events if e["cat"] in "FB"]
    assert all(a.keys() == {"kind", "section", "replica", "stage", "microbatch", "samples"} for a in compute)
    forwards = [i for a in compute if a["kind"] == "F" and a["section"] == "decoder" for i in a["samples"]]
    assert sorted(forwards) == list(range(16))
    sent = [e["args"] for e in events if e["cat"] == "SEND"]
    received = [e["args"] for e in events if e["cat"] == "RECV"]
    assert all(a.keys() >= {"kind", "edge", "src", "dst", "samples", "bytes"} for a in sent)

    def message_key(args: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(args[name] for name in ("edge", "direction", "src", "dst", "samples", "bytes"))

    assert sorted(map(message_key, sent)) == sorted(map(message_key, received)) != []


def test_changed_model_is_rejected_once_with_a_diff(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan", APART)
    model = tmp_path / "plan" / "model.py"
    model.write_text(
        model.read_text().replace(
            "VOCABULARY, WIDTH, PATCHES = 32, 16, 4", "VOCABULARY, WIDTH, PATCHES = 32, 24, 4"
        )
    )
    assert run_plan(tmp_path / "plan", ["--steps", "1"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert (
        "-VOCABULARY, WIDTH, PATCHES = 32, 16, 4" in errors
        and "+VOCABULARY, WIDTH, PATCHES = 32, 24, 4" in errors
    )
    assert "what to do: compile the model again" in errors


def test_error_of_one_rank_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Sample 13 is in the second rank's share of the second batch."""
    before = "        g = torch.Generator()"
    source = (
        (FIXTURE / "model.py").read_text().replace(before, f"        assert i != 13, 'a torn page'\n{before}")
    )
    write_plan(tmp_path / "plan", APART, source=source)
    assert run_plan(tmp_path / "plan", ["--steps", "3"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert "dataset()[13]" in errors and "a torn page" in errors


@pytest.mark.slow
def test_exception_on_one_rank_shows_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan", APART)
    section = tmp_path / "plan" / "sections" / "decoder.py"
    section.write_text(section.read_text().replace('edges["target"]', 'edges["nothing"]'))
    assert run_plan(tmp_path / "plan", ["--steps", "3"]) == 1
    errors = capfd.readouterr().err
    assert "KeyError: 'nothing'" in errors and errors.count("Traceback") == 1
    assert "error: rank 1" in errors and "rank 0" not in errors


def test_a_forward_that_ends_its_process_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if it says that all is well: the other ranks wait for it."""
    before = "        return x + self.gate * self.out("
    source = (FIXTURE / "model.py").read_text()
    assert source.count(before) == 1
    source = source.replace(before, f"        raise SystemExit(0)\n{before}")
    write_plan(tmp_path / "plan", APART, source=source)
    assert run_plan(tmp_path / "plan", ["--steps", "3", "--no-first-check"]) == 1
    errors = capfd.readouterr().err
    assert "SystemExit: 0" in errors and 'model.py", line' in errors
    assert "error: rank 1" in errors and "rank 0" not in errors


def test_wrong_number_of_ranks_is_rejected(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART)
    process = start(str(tmp_path / "plan" / "run.py"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("error: the plan is made for 2 ranks, but 1 were started\n  what to do: ")


@pytest.mark.parametrize("name", ["file", "file/inside", "loop", "n" * 300, "fifo"])
@pytest.mark.parametrize("option", ["--log-dir", "--save", "--trace"])
def test_unwritable_output_is_rejected(
    tmp_path: Path, option: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    write_plan(tmp_path / "plan", ALONE)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    output = tmp_path / name / "trace" if option == "--trace" else tmp_path / name
    with pytest.raises(UserError, match="cannot write") as error:
        RankContext(
            tmp_path / "plan",
            parse_options([option, str(output)]),
            terms,  # pyright: ignore[reportArgumentType]
        )
    assert f"give another {option}" in error.value.remedy


def test_a_device_is_not_replaced_by_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of ranks are merged into a file that is renamed over the named one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    write_plan(tmp_path / "plan", ALONE)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="cannot write the trace: no regular file") as error:
        RankContext(
            tmp_path / "plan",
            parse_options(["--trace", str(tmp_path / "fifo")]),
            terms,  # pyright: ignore[reportArgumentType]
        )
    assert "give another --trace" in error.value.remedy


@pytest.mark.parametrize(("option", "what"), [("--log-dir", "logs"), ("--save", "checkpoints")])
def test_a_second_run_into_a_folder_is_rejected(
    tmp_path: Path, option: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("secc.runtime.host.folder_lock._WAIT_S", 0.0)
    write_plan(tmp_path / "plan", ALONE)
    (tmp_path / "out").mkdir()
    with (
        hold_lock(tmp_path / "out" / f".{what}.lock", tmp_path, "", ""),
        pytest.raises(UserError, match=f"another run writes its {what} into the directory") as error,
    ):
        RankContext(tmp_path / "plan", parse_options([option, str(tmp_path / "out")]), terms)  # pyright: ignore[reportArgumentType]
    assert f"give another {option}" in error.value.remedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1"),
        (["--steps", "many"], "argument --steps: must be a whole number, got 'many'"),
        (["--order", "random"], "argument --order: invalid choice"),
        (["--clip", "-1"], "argument --clip: must be greater than 0"),
        (["--speed"], "unrecognized arguments: --speed"),
        (["--save", ""], "argument --save: must not be empty"),
        (["--steps", "12345678901234567890"], "argument --steps: must be at most 9223372036854775807"),
        (["--hang-timeout", "1e400"], "argument --hang-timeout: must be a number of seconds; 0 stands for"),
        (["--hang-timeout", "nan"], "argument --hang-timeout: must not be negative"),
        (["--hang-timeout", ""], "argument --hang-timeout: must be a number, got ''"),
        (["--rdzv-endpoint", "node0:29500"], "--rdzv-endpoint needs --nnodes N"),
        (["--node-rank", "0"], "--node-rank needs --nnodes N"),
    ],
)
def test_invalid_options_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_options(arguments)


def test_launcher_rejects_bad_plans_and_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the plan"):
        run_plan(tmp_path / "missing")
    with pytest.raises(UserError, match="--save-every needs --save"):
        run_plan(tmp_path, ["--save-every", "2"])
