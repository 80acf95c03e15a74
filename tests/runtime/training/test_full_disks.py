"""Disks that are full and folders that are gone: a run says so, trains on and keeps what it has saved."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from secc.runtime.host.process_table import find_descendants
from secc.runtime.parameters.checkpoint_folder import find_checkpoint
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import APART, write_plan
from tests.runtime.run_processes import LAUNCH, wait_for_step, wait_until

pytestmark = pytest.mark.gloo
BROKEN = """
import resource
from secc.runtime.parameters import sliced_tensor_store as store
real, calls = store.write_entries, []
def write_entries(directory, rank, state):
    calls.append(1)
    if len(calls) >= 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, -1))
    try:
        return real(directory, rank, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
store.write_entries = write_entries
"""


def steps_of(logs: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (logs / "metrics.jsonl").read_text().splitlines()]


def break_saves(plan: Path, limit: str) -> None:
    """Lets rank 1 write no more than `limit` bytes into a file from its second save on, as on a full disk."""
    rank = plan / "ranks" / "rank_00001.py"
    rank.write_text(
        rank.read_text().replace("def train(", f"{BROKEN.replace('MOST', limit)}\n\ndef train(", 1)
    )


def test_a_save_on_a_full_disk_is_said_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan", APART)
    break_saves(tmp_path / "plan", "1000 if len(calls) < 4 else -1")
    arguments = ["--steps", "5", "--save", str(tmp_path / "saved"), "--save-every", "1"]
    assert run_plan(tmp_path / "plan", arguments) == 0
    errors = capfd.readouterr().err
    assert errors.count("was not saved: ") == 2 and "Traceback" not in errors
    assert "the checkpoint of step 2 was not saved: " in errors and "training goes on" in errors
    assert steps_of(tmp_path / "plan/logs") == [1, 2, 3, 4, 5]
    assert sorted(p.name for p in (tmp_path / "saved").glob("step_*")) == [
        f"step_{step:08d}" for step in (1, 4, 5)
    ]
    assert find_checkpoint(tmp_path / "saved").manifest.step == 5


@pytest.mark.slow
def test_the_last_save_that_fails_ends_the_run_with_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan", APART)
    break_saves(tmp_path / "plan", "1000")
    arguments = ["--steps", "2", "--save", str(tmp_path / "saved"), "--save-every", "1", "--no-save-async"]
    assert run_plan(tmp_path / "plan", arguments) == 2
    errors = capfd.readouterr().err
    assert "the checkpoint of step 2 was not saved: " in errors
    assert "what to do: make room" in errors and "Traceback" not in errors
    assert find_checkpoint(tmp_path / "saved").manifest.step == 1


@pytest.mark.slow
def test_logs_that_cannot_be_written_end_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan", APART)
    (tmp_path / "logs").mkdir()
    for name in ("metrics.jsonl", "times.jsonl"):
        (tmp_path / "logs" / name).symlink_to("/dev/full")
    arguments = ["--steps", "3", "--log-dir", str(tmp_path / "logs"), "--save", str(tmp_path / "saved")]
    assert run_plan(tmp_path / "plan", arguments) == 0
    errors = capfd.readouterr().err
    assert errors.count("cannot write") == 2 and "No space left on device" in errors
    assert "Traceback" not in errors
    assert find_checkpoint(tmp_path / "saved").manifest.step == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "repair", "cause"),
    [
        (
            "mount --bind {0} {0} && until mount -o remount,ro,bind {0}; do :; done",
            "umount {0}",
            "Read-only file system",
        ),
        ("dd if=/dev/zero of={0}/filler bs=64k", "rm {0}/filler", "No space left on device"),
        ("mv {0} {0}.away && touch {0}", "rm {0} && mv {0}.away {0}", "File exists"),
    ],
    ids=["read-only", "full", "replaced by a file"],
)
@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_folder_that_cannot_be_written_during_a_run(
    tmp_path: Path, damage: str, repair: str, cause: str, is_repaired: bool
) -> None:
    write_plan(tmp_path / "plan", APART)
    mounted, messages = tmp_path / "disk", tmp_path / "messages"
    mounted.mkdir()
    saved = mounted / "saved"
    command = [sys.executable, "-c", LAUNCH, str(tmp_path / "plan"), "--save", str(saved)]
    command += ["--steps", "600", "--save-every", "20", "--keep", "3", "--no-first-check"]
    space = ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c"]
    if subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not permitted here")
    script = f"mount -t tmpfs -o size=2m none {mounted} && {shlex.join(command)}; code=$?"
    script += f"; cp -r {mounted} {tmp_path}/after; exit $code"
    with messages.open("w") as stream:
        run = subprocess.Popen([*space, script], env=os.environ | {"PYTHONPATH": os.getcwd()}, stderr=stream)

    def in_space(text: str) -> None:
        shell = find_descendants(run.pid)[0]
        inside = ["nsenter", "--target", str(shell), "--mount", "sh", "-c", text.format(saved)]
        subprocess.run(inside, check=False, stderr=subprocess.DEVNULL)

    wait_for_step(tmp_path / "plan", 45, run)
    in_space(damage)
    wait_until(lambda: messages.read_text().count("was not saved: ") >= 2, run)
    if is_repaired:
        in_space(repair)
    code = run.wait(120)
    errors = messages.read_text()
    assert code == (0 if is_repaired else 2) and "Traceback" not in errors, errors
    assert cause in errors and "  what to do: make " in errors
    assert steps_of(tmp_path / "plan/logs") == list(range(1, 601))
    if is_repaired:
        assert find_checkpoint(tmp_path / "after/saved").manifest.step == 600
