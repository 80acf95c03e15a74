"""slurm.sbatch of a plan for two nodes, under a real Slurm on this machine: results, the warning before the
time is over, queueing again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks
from tools.slurm_cluster import missing_programs, run_cluster

MODEL = Path(__file__).parent.parent / "models" / "evaluated.py"
LACKS = missing_programs()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gloo,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(LACKS), reason=f"Slurm: this machine lacks {', '.join(LACKS)}"),
]


def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)


def test_two_nodes_train_save_when_warned_and_go_on(tmp_path: Path) -> None:
    cluster = tmp_path / "two.yaml"
    cluster.write_text("nodes: 2\ndevices: 2\nkind: cpu\n")
    plan = tmp_path / "plan"
    compile_and_write(MODEL, plan, check=False, cluster=str(cluster), global_batch=8, strategy="apart")
    run_plan_ranks(plan, 4, ["--steps", "4", "--workers", "0", "--log-dir", str(tmp_path / "here")])

    with run_cluster(2, 2) as environment:
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

        def slurm(*command: str, code: int = 0) -> str:
            done = subprocess.run(
                command, cwd=plan, env=environment, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout

        def submit(name: str, *options: str) -> str:
            logs = ["--log-dir", str(tmp_path / name), "--workers", "0"]
            log = f"--output={tmp_path / name}.out"
            return slurm("sbatch", "--parsable", log, "slurm.sbatch", *logs, *options).strip()

        def count_steps(name: str) -> int:
            file = tmp_path / name / "metrics.jsonl"
            return len(file.read_text().splitlines()) if file.exists() else 0

        def show(job: str, field: str) -> str:
            words = slurm("scontrol", "show", "job", job).split()
            return next(w.partition("=")[2] for w in words if w.startswith(f"{field}="))

        # Two nodes compute what three ranks on this machine compute.
        job = submit("there", "--steps", "4")
        wait_for(lambda: show(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"))
        assert show(job, "JobState") == "COMPLETED", (tmp_path / "there.out").read_text()
        assert show(job, "NumNodes") == "2"
        here, there = ([m["loss"] for m in read_metrics(tmp_path / name)] for name in ("here", "there"))
        assert here == there and len(there) == 4

        # The warning before the limit: the ranks save, the job queues itself again and goes on from there.
        saved = tmp_path / "saved"
        job = submit("long", "--steps", "1000000", "--save", str(saved))
        wait_for(lambda: count_steps("long") > 5)
        slurm("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: show(job, "Restarts") == "1")
        manifest = json.loads(next(saved.glob("step_*/checkpoint.json")).read_text())
        steps = count_steps("long")
        assert manifest["step"] == steps > 5
        wait_for(lambda: count_steps("long") > steps)
        assert [m["step"] for m in read_metrics(tmp_path / "long")][: steps + 1] == [*range(1, steps + 2)]
        assert len({m["run"] for m in read_metrics(tmp_path / "long")}) == 1
        slurm("scancel", job)

        # Without --save there is nothing to go on from: said, and not queued again.
        job = submit("unsaved", "--steps", "1000000")
        wait_for(lambda: count_steps("unsaved") > 1)
        slurm("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: "there is no --save DIR" in (tmp_path / "unsaved.out").read_text())
        assert show(job, "JobState") == "RUNNING" and show(job, "Restarts") == "0"
        slurm("scancel", job)

        # Bad input ends the job with its message.
        job = submit("wrong", "--steps", "1", "--epochs", "1")
        wait_for(lambda: show(job, "JobState") == "FAILED")
        assert "--steps and --epochs were both given" in (tmp_path / "wrong.out").read_text()
        assert show(job, "ExitCode").startswith("2:")
