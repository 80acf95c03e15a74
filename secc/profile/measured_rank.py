"""Trains one rank of a plan to measure its steps: `python -m secc.profile.measured_rank PLAN`, and the
options of run.py.

Works as the plan's run.py, but runs the speed gauge between steps, outside of their measured time. Each rank
writes seconds of steps and gauge times to `steps_RANK.json` in the log directory.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from secc.profile.speed_gauge import SpeedGauge
from secc.runtime.sections.base import load_section_module
from secc.runtime.training.launch import main
from secc.runtime.training.options import RunOptions
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.trainer import Trainer


def train_rank(plan: Path, options: RunOptions) -> None:
    """Train this rank's sections."""
    sys.path.insert(0, str(plan))
    terms: Any = importlib.import_module("sections.terms")
    with RankContext(plan, options, terms) as run:
        model = run.load_model()
        sections = [
            load_section_module(plan, s, model) for s in run.plan.sections if run.rank in s.mesh.ranks
        ]
        trainer, gauge, times = Trainer(run, model, sections), SpeedGauge(), list[tuple[float, int]]()
        start = time.perf_counter()
        for step in trainer.plan_steps():
            trainer.train_step(step)
            seconds = time.perf_counter() - start
            with run.trace.record_event("GAUGE", kind="GAUGE"):
                times.append((seconds, gauge.measure_ns() if run.device.type == "cpu" else 0))
            start = time.perf_counter()
        (run.log_dir / f"steps_{run.rank}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    directory = Path(sys.argv[1]).resolve()
    sys.argv = [str(directory / "run.py"), *sys.argv[2:]]
    sys.exit(main(lambda options: train_rank(directory, options)))
