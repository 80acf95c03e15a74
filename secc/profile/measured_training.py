"""Training a plan on processes of this machine to measure its steps."""

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
from secc.runtime.training.launch import rank_environment

TRAINING_TIMEOUT_S = 300


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each step on rank 0, and what the gauge took behind it on each rank, in ns (0 on GPUs)."""

    seconds: Sequence[float]
    gauge_times: Sequence[Sequence[int]]

    def mean_gauge_ns(self, warm: int, weights: Sequence[float] = ()) -> float:
        """What the gauge took at the mean speed behind the first `warm` steps, of the ranks in proportion to
        `weights` (alike without)."""
        shares = weights or [1.0] * len(self.gauge_times)
        speed = sum(
            share / time_at_mean_speed(rank[warm:])
            for share, rank in zip(shares, self.gauge_times, strict=True)
            if all(rank)
        )
        return sum(shares) / speed if speed else 0.0


def train_plan(plan: Path, ranks: int, steps: int, log_dir: Path, arguments: Sequence[str] = ()) -> StepTimes:
    """Train a plan for some steps, its ranks as processes of this one. Raises UserError where one fails.

    torchrun would start each in a session of its own, for which Linux forgets how nice this process is to
    others.
    """
    place = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    with rank_environment():
        own = [os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
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
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for env in own
    ]
    try:
        said = [process.communicate(timeout=TRAINING_TIMEOUT_S)[1] for process in running]
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{steps} steps of the model took more than {TRAINING_TIMEOUT_S} s here", str(plan)
        ) from None
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        last = next((text.strip().splitlines()[-1] for text in said if text.strip()), "no message")
        raise UserError(f"the model does not train here: {last}", str(plan))
    return read_step_times(log_dir, ranks)


def read_step_times(log_dir: Path, ranks: int) -> StepTimes:
    """What the ranks of a run left among its logs."""
    found = [json.loads((log_dir / f"steps_{rank}.json").read_text()) for rank in range(ranks)]
    return StepTimes([seconds for seconds, _ in found[0]], [[ns for _, ns in steps] for steps in found])
