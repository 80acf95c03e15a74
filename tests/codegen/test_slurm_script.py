"""The Slurm script, with stand-ins for Slurm's commands: warnings, queueing again, and restarts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

WARNED = "kill -USR1 $PPID; sleep 0.5"
GOLDEN = Path(__file__).parent / "golden" / "slurm.sbatch.golden"


@pytest.mark.parametrize(
    ("behaviour", "arguments", "code", "expected"),
    [
        ("exit 0", [], 0, ["srun 0"]),
        ("exit 2", [], 2, ["srun 0"]),
        ("((SECC_ATTEMPT)) || exit 1", [], 0, ["srun 0", "srun 1"]),
        (WARNED, ["--save", "a b"], 0, ["srun 0", "scancel --signal=TERM 7", "scontrol requeue 7"]),
        (f"{WARNED}; exit 1", ["--save=d"], 0, ["srun 0", "scancel --signal=TERM 7", "scontrol requeue 7"]),
        (f"{WARNED}; exit 2", ["--save=d"], 2, ["srun 0", "scancel --signal=TERM 7"]),
        (WARNED, [], 0, ["srun 0"]),
        (f"{WARNED}; exit 3", [], 3, ["srun 0", "srun 1"]),
    ],
)
def test_script_restarts_and_queues_itself_again(
    tmp_path: Path, behaviour: str, arguments: list[str], code: int, expected: list[str]
) -> None:
    calls = tmp_path / "calls"
    for name, lines in {
        "srun": f'echo "srun $SECC_ATTEMPT" >> {calls}; {behaviour}',
        "scancel": f'echo "scancel $*" >> {calls}',
        "scontrol": f'[[ $1 == show ]] && echo node0 || echo "scontrol $*" >> {calls}',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node0", "SLURM_JOB_ID": "7"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(GOLDEN), *arguments],
        env=os.environ | environment | {"PATH": path, "MAX_RESTARTS": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert calls.read_text().splitlines() == expected
