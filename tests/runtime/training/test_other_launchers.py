"""`python plan/run.py` in each process of a launcher that sets torchrun's variables and knows nothing of
secc: the losses are those of `secc run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import UNEVEN, write_plan
from tests.runtime.gloo_ranks import free_port

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(900)]

ARGUMENTS = ["--steps", "3", "--no-first-check", "--workers", "0", "--log-dir"]

# What each process of the launcher does: with an argument it joins a process group of its own first, at the
# address at which the ranks meet, as Ray Train's torch backend does.
WORKER = """
import os, subprocess, sys
import torch.distributed as dist
if sys.argv[1] == "joins":
    dist.init_process_group("gloo", "env://", rank=int(os.environ["RANK"]), world_size=3)
code = subprocess.run([sys.executable, *sys.argv[2:]]).returncode
if sys.argv[1] == "joins":
    dist.barrier()
sys.exit(code)
"""

RAY = """
import json, subprocess, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def train():
    subprocess.run([sys.executable, *{command!r}], check=True)

ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1")
TorchTrainer(
    train,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=3),
    run_config=RunConfig(storage_path={storage!r}),
).fit()
"""


def losses_in(logs: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (logs / "metrics.jsonl").read_text().splitlines()]


def environment() -> dict[str, str]:
    patience = {
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
        "RAY_worker_register_timeout_seconds": "600",
    }
    return os.environ | patience | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan that has run, with the logs in `here`."""
    write_plan(tmp_path / "plan", UNEVEN)
    assert run_plan(tmp_path / "plan", [*ARGUMENTS, str(tmp_path / "here")]) == 0
    return tmp_path / "plan"


@pytest.mark.parametrize("joins", ["joins", "joins nothing"])
def test_variables_are_enough(joins: str, plan: Path) -> None:
    port, logs = str(free_port()), plan.parent / "there"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, joins, str(plan / "run.py"), *ARGUMENTS, str(logs)],
            env=environment()
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(3)
    ]
    assert [process.wait(timeout=400) for process in processes] == [0, 0, 0]
    assert losses_in(logs) == losses_in(plan.parent / "here")


def test_workers_of_ray_train(plan: Path) -> None:
    pytest.importorskip("ray.train.torch")
    logs = plan.parent / "there"
    script = RAY.format(
        command=[str(plan / "run.py"), *ARGUMENTS, str(logs)], storage=str(plan.parent / "storage")
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses_in(logs) == losses_in(plan.parent / "here")
