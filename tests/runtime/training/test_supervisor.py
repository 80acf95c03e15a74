"""The launcher: who may meet its ranks, what it leaves behind, and how it passes signals on."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.parameters import checkpoint_copies
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.parameters.checkpoint_copies import COPIES_VARIABLE, CopyName
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import ALONE, UNEVEN, write_plan
from tests.runtime.run_processes import (
    listening_addresses,
    process_of_rank,
    ranks_of,
    start,
    start_run,
    steps_of,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.gloo


def test_nothing_listens_beyond_this_machine_and_strangers_cannot_join(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000")
    wait_for_step(plan, 1, process)
    assert listening_addresses([process.pid]) == set()
    assert listening_addresses(pid for pid, _ in ranks_of(plan)) == {"127.0.0.1"}
    variables = Path(f"/proc/{next(ranks_of(plan))[0]}/environ").read_bytes().split(b"\0")
    store = Path(next(v for v in variables if v.startswith(b"SECC_STORE=")).decode().partition("=")[2])
    assert store.exists() and stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    process.kill()
    process.communicate()
    wait_until(lambda: not list(ranks_of(plan)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.5])
def test_launcher_killed_while_ranks_start_leaves_no_process(tmp_path: Path, delay: float) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000")
    wait_until(lambda: list(ranks_of(plan)), process)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not list(ranks_of(plan)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_finishes_the_step_saves_and_says_what_to_do(tmp_path: Path, number: signal.Signals) -> None:
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000", "--save", str(saved))
    wait_for_step(plan, 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    last = steps_of(plan / "logs")[-1]["step"]
    assert process.returncode == 0, errors
    assert f"{number.name}: the run ends after this step; once more ends it at once" in errors
    assert f"stopped as asked after step {last} of 1000000 and saved to {saved}" in errors
    assert (saved / "latest").read_text() == f"step_{last:08d}\n"
    assert not list(ranks_of(plan))


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000")
    wait_for_step(plan, 1, process)
    os.kill(process_of_rank(plan, 1), signal.SIGSTOP)  # so that the step never ends
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert not list(ranks_of(plan))


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("by", ["secc", "torchrun"])
def test_restart_continues_from_the_newest_checkpoint_and_is_bit_equal(tmp_path: Path, by: str) -> None:
    plan, saved, whole = tmp_path / "plan", tmp_path / "saved", tmp_path / "whole"
    write_plan(plan, UNEVEN)
    options = ["--steps", "60", "--save-every", "10", "--resume", "auto", "--save"]
    assert run_plan(plan, [*options, str(whole), "--log-dir", str(tmp_path / "logs")]) == 0
    if by == "secc":
        process = start_run(plan, *options, str(saved), "--max-restarts", "2")
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=2"]
        process = start(*torchrun, str(plan / "run.py"), *options, str(saved), GLOO_SOCKET_IFNAME="lo")
    wait_for_step(plan, 25, process)
    os.kill(process_of_rank(plan, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    steps = [line["step"] for line in steps_of(plan / "logs")]
    back = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    lost = steps[back - 1] - steps[back] + 1
    assert steps[back] % 10 == 1 and 0 <= lost < 15 and steps[-1] == 60
    assert f"continuing from {saved}/step_{steps[back] - 1:08d}" in errors
    assert f"restart 1: {lost} steps" in errors and "were lost and are computed again" in errors
    expected, weights = load_full_state_dict(whole), load_full_state_dict(saved)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert not list(ranks_of(plan))


def test_a_plan_that_has_gone_is_named_before_ranks_start(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", ALONE)
    (tmp_path / "plan" / "run.py").unlink()
    with pytest.raises(UserError, match=r"the plan has no run\.py") as error:
        run_plan(tmp_path / "plan", ["--steps", "1"])
    assert error.value.where == str(tmp_path / "plan") and "--resume auto" in error.value.remedy


def stop_between_saves(launcher: subprocess.Popen[str], saved: Path) -> str:
    """Stops the launcher when it has copies of the newest checkpoint and none is being written: none is
    published then, because its copies come first. Returns the name of the checkpoint."""
    while launcher.poll() is None:
        listed, _ = checkpoint_copies._ask("list", CopyName("", 0))
        os.kill(launcher.pid, signal.SIGSTOP)
        name = (saved / "latest").read_text().strip()
        folders = sorted(path.name for path in saved.glob("step_*"))
        if listed and name == f"step_{listed['step']:08d}" == folders[-1]:
            return name
        os.kill(launcher.pid, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError(f"the launcher ended with {launcher.returncode}")


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("lost", ["folder of the newest checkpoint", "all of --save"])
def test_lost_rank_continues_from_copies_although_storage_has_lost_them(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, saved, whole = tmp_path / "plan", tmp_path / "saved", tmp_path / "whole"
    write_plan(plan, UNEVEN)
    options = ["--steps", "120", "--save-every", "10", "--no-first-check", "--save"]
    assert run_plan(plan, [*options, str(whole), "--log-dir", str(tmp_path / "logs")]) == 0
    process = start_run(plan, *options, str(saved), "--max-restarts", "2", "--replicate")
    wait_for_step(plan, 25, process)
    environment = Path(f"/proc/{process_of_rank(plan, 0)}/environ").read_bytes().split(b"\0")
    variables = dict(entry.decode().split("=", 1) for entry in environment if entry)
    monkeypatch.setenv(COPIES_VARIABLE, variables[COPIES_VARIABLE])
    newest = stop_between_saves(process, saved)
    os.kill(process_of_rank(plan, 1), signal.SIGKILL)
    shutil.rmtree(saved if lost == "all of --save" else saved / newest)
    os.kill(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"reading copies of {newest} in memory" in errors
    assert f"continuing from {saved / newest}" in errors and "restart 1:" in errors
    expected, weights = load_full_state_dict(whole), load_full_state_dict(saved)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_finished_run_is_no_error_and_bad_input_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    write_plan(plan, ALONE)
    options = ["--steps", "4", "--save", str(saved), "--resume", "auto", "--max-restarts", "3"]
    assert run_plan(plan, options) == 0
    assert f"no checkpoint in {saved}: starting" in capfd.readouterr().err
    assert run_plan(plan, options) == 0
    assert f"the run is complete: {saved}/step_00000004 is of step 4 of 4" in capfd.readouterr().err
    assert run_plan(plan, ["--steps", "4", "--save", str(saved), "--max-restarts", "3"]) == 2
    assert "restart" not in capfd.readouterr().err
