"""Trains a plan on processes of this machine to measure its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from secc.errors import UserError
from secc.profile.machine_probe import find_free_port
from secc.profile.speed_gauge import time_at_mean_speed
from secc.runtime.training.supervisor import rank_environment

TRAINING_TIMEOUT_S = 300


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each step on rank 0, and gauge times after it on each rank in nanoseconds ([rank][step];
    0 on GPUs)."""

    seconds: Sequence[float]
    gauge_times: Sequence[Sequence[int]]

    def mean_gauge_ns(self, warm_up: int, weights: Sequence[float] = ()) -> float:
        """Time of the gauge at its mean speed after the first `warm_up` steps. weights: of ranks, equal by
        default."""
        shares = weights or [1.0] * len(self.gauge_times)
        speed = sum(
            share / time_at_mean_speed(rank[warm_up:])
            for share, rank in zip(shares, self.gauge_times, strict=True)
            if all(rank)
        )
        return sum(shares) / speed if speed else 0.0


def train_plan(plan: Path, ranks: int, steps: int, log_dir: Path, arguments: Sequence[str] = ()) -> StepTimes:
    """Train a plan for `steps` steps with its ranks as child processes, and return its step times.

    Raises UserError if a rank fails or the time limit is exceeded. torchrun is not used: it starts each rank
    in a session of its own, for which Linux ignores the niceness of this process.
    """
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    with rank_environment():
        environments = [
            os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
        ]
    command = [
        sys.executable,
        "-m",
        "secc.profile.measured_rank",
        str(plan),
        "--steps",
        str(steps),
        "--log-dir",
        str(log_dir),
        *arguments,
    ]
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for env in environments
    ]
    try:
        errors = [process.communicate(timeout=TRAINING_TIMEOUT_S)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{steps} steps of the model took more than {TRAINING_TIMEOUT_S} s on this machine", str(plan)
        ) from None
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        last = next((text.strip().splitlines()[-1] for text in errors if text.strip()), "no message")
        raise UserError(f"the model does not train on this machine: {last}", str(plan))
    return read_step_times(log_dir, ranks)


def read_step_times(log_dir: Path, ranks: int) -> StepTimes:
    """Read the files that the ranks of a run left in its log directory."""
    by_rank = [
        json.loads((log_dir / f"steps_{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)
    ]
    return StepTimes([seconds for seconds, _ in by_rank[0]], [[ns for _, ns in steps] for steps in by_rank])
