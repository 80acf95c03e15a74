"""Ranks that torchrun's agents start: exit code 2 after bad input, on every node and without a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.captioner_plans import APART, FIXTURE, write_plan
from tests.runtime.gloo_ranks import free_port

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(600)]

OURS, PLAIN = "secc.runtime.training.torchrun", "torch.distributed.run"
BEFORE = "        g = torch.Generator()"
TORN = (FIXTURE / "model.py").read_text().replace(BEFORE, f"        assert i != 13, 'a torn page'\n{BEFORE}")


def start_agent(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )


def finish(agent: subprocess.Popen[str]) -> tuple[int, str]:
    errors = agent.communicate(timeout=400)[1]
    return agent.returncode, errors


@pytest.mark.parametrize(("module", "code"), [(OURS, 2), (PLAIN, 1)])
def test_bad_input_is_said_once_although_torchrun_restarts(module: str, code: int, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART, source=TORN)
    agent = start_agent(
        module, "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port()),
        str(tmp_path / "plan" / "run.py"), "--steps", "9", "--no-first-check", "--workers", "0",
    )  # fmt: skip
    found, errors = finish(agent)
    assert found == code and errors.count("a torn page") == 1, errors
    assert "Traceback" not in errors or module == PLAIN


def test_bad_input_on_one_node_ends_both_with_2(tmp_path: Path) -> None:
    """Sample 13 is in the share of rank 1, the only one of the second node."""
    write_plan(tmp_path / "plan", APART, source=TORN)
    port = free_port()
    agents = [
        start_agent(
            OURS, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1",
            "--master-addr", "127.0.0.1", "--master-port", str(port), str(tmp_path / "plan" / "run.py"),
            "--steps", "9", "--no-first-check", "--workers", "0", "--log-dir", str(tmp_path / "logs"),
        )
        for node in (0, 1)
    ]  # fmt: skip
    (first, errors), (second, more) = map(finish, agents)
    assert (first, second) == (2, 2), errors + more
    assert (errors + more).count("a torn page") == 1 and "Traceback" not in errors + more


def test_a_rank_that_fails_otherwise_is_named(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART)
    section = tmp_path / "plan" / "sections" / "decoder.py"
    section.write_text(section.read_text().replace('edges["target"]', 'edges["nothing"]'))
    agent = start_agent(
        OURS, "--nproc-per-node", "2", "--master-port", str(free_port()),
        str(tmp_path / "plan" / "run.py"), "--steps", "3", "--no-first-check", "--workers", "0",
    )  # fmt: skip
    found, errors = finish(agent)
    assert found == 1 and "KeyError: 'nothing'" in errors and errors.count("Traceback") == 1
    assert "error: rank 1 (process" in errors and "has ended with exit code 1" in errors
