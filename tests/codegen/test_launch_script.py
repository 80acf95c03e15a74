"""launch.sh on several nodes, with a stand-in for python: flags, variables, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from secc.codegen.plan_files import render_launcher
from secc.runtime.plan.plan_file import parse_plan
from secc.runtime.plan.schema import Plan

GOLDEN = Path(__file__).parent / "golden"
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "-m secc.runtime.training.torchrun"
AT_NODE_1 = (
    f"{TORCHRUN} --nnodes 2 --nproc-per-node 8 --node-rank 1 --rdzv-id secc --master-addr ten --master-port"
)


def plan_on(nodes: int, backend: str = "cuda") -> Plan:
    """The pinned plan, for nodes of eight devices."""
    plan = parse_plan(json.loads((GOLDEN / "plan.json.golden").read_text()))
    device = {**plan.cluster["device"], "backend": backend, "kind": "H100" if backend == "cuda" else "cpu"}
    cluster = {**plan.cluster, "nodes": nodes, "per_node": 8, "device": device}
    return replace(plan, cluster=cluster, world_size=8 * nodes)


def run_launcher(
    folder: Path, nodes: int, arguments: list[str], variables: dict[str, str], ranks: int = 0, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the launch.sh of a plan for a number of nodes, where python prints its arguments and ends with
    `code`."""
    plan = plan_on(nodes)
    plan = replace(plan, world_size=ranks or plan.world_size)
    (folder / "launch.sh").write_text(render_launcher(plan, "launch.sh.j2"))
    (folder / "python").write_text(f'#!/usr/bin/env bash\necho "$@"\nexit {code}\n')
    (folder / "python").chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k.removeprefix("PET_") not in VARIABLES}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(folder / "launch.sh"), *arguments],
        env=inherited | {"PATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "port"),
    [
        (["--node-rank", "1", "--master-addr=ten", "--master-port", "7"], {"MASTER_ADDR": "other"}, 7),
        ([], {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "ten"}, 29500),
        ([], {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "ten", "PET_MASTER_PORT": "5"}, 5),
    ],
)
def test_flags_win_over_variables(
    arguments: list[str], variables: dict[str, str], port: int, tmp_path: Path
) -> None:
    done = run_launcher(tmp_path, 2, [*arguments, "--save", "a b"], variables)
    assert done.stdout == f"{AT_NODE_1} {port} {tmp_path}/run.py --save a b\n", done.stderr


@pytest.mark.parametrize("node", [0, 1])
def test_the_last_node_has_the_ranks_that_are_left(node: int, tmp_path: Path) -> None:
    arguments = ["--node-rank", str(node), "--master-addr", "ten"]
    done = run_launcher(tmp_path, 2, arguments, {}, ranks=11)
    assert f"--nnodes 2 --nproc-per-node {(8, 3)[node]} --node-rank {node}" in done.stdout, done.stderr
    job = render_launcher(replace(plan_on(3), world_size=11), "slurm.sbatch.j2")
    assert "#SBATCH --nodes=2" in job and "--nproc-per-node $((SLURM_NODEID == 1 ? 3 : 8))" in job


def test_nodes_with_a_secret_start_the_supervisor(tmp_path: Path) -> None:
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "ten", "RDZV_SECRET": "s"}
    done = run_launcher(tmp_path, 2, ["--max-restarts", "3"], variables)
    assert done.stdout == (
        f"-m secc.runtime.training.supervisor {tmp_path} --max-restarts 0 --max-restarts 3"
        " --nnodes 2 --node-rank 1 --rdzv-endpoint ten:29500 --rdzv-secret s\n"
    ), done.stderr


@pytest.mark.parametrize(("code", "attempts"), [(0, 1), (2, 1), (1, 2)])
def test_bad_input_is_not_tried_again(code: int, attempts: int, tmp_path: Path) -> None:
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "ten", "MAX_RESTARTS": "1"}
    done = run_launcher(tmp_path, 2, ["--steps", "3"], variables, code=code)
    assert done.returncode == code and done.stdout.count(TORCHRUN) == attempts, done.stderr


def test_one_node_starts_the_supervisor(tmp_path: Path) -> None:
    done = run_launcher(tmp_path, 1, ["--node-rank=0", "--steps", "3"], {"NNODES": "1"})
    assert done.stdout == f"-m secc.runtime.training.supervisor {tmp_path} --steps 3\n", done.stderr


@pytest.mark.parametrize(
    ("nodes", "arguments", "message"),
    [
        (1, ["--nnodes", "2"], "the plan is for 1 node, got 2"),
        (2, ["--nnodes", "3"], "the plan is for 2 nodes, got 3"),
        (2, ["--master-addr", "ten"], "--node-rank or NODE_RANK must be the number of this node, 0 to 1"),
        (2, ["--master-addr", "ten", "--node-rank", "2"], "0 to 1, got '2'"),
        (2, ["--node-rank", "1"], "--master-addr or MASTER_ADDR"),
        (2, ["--node-rank"], "--node-rank needs a value"),
    ],
)
def test_wrong_nodes_are_refused(nodes: int, arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_launcher(tmp_path, nodes, arguments, {})
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


def test_slurm_job_asks_for_the_devices_of_the_plan(tmp_path: Path) -> None:
    for backend, asked, never in (
        ("cuda", "#SBATCH --gpus-per-node=8", "--cpus-per-task=8"),
        ("cpu", "#SBATCH --cpus-per-task=8", "--gpus"),
    ):
        text = render_launcher(plan_on(2, backend), "slurm.sbatch.j2")
        assert asked in text.splitlines()
        assert never not in text
        for line in ("--time=24:00:00", "--requeue", "--signal=B:USR1@180", "--nodes=2"):
            assert f"#SBATCH {line}" in text.splitlines()
        (tmp_path / "job").write_text(text)
        subprocess.run(["bash", "-n", str(tmp_path / "job")], check=True, timeout=60)
