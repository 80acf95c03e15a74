"""What rank 0 reports to experiment trackers: which values of a run, under which names, and which files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from secc.runtime.monitoring.section_times import SECTION_TIMES_FILE, SectionSeconds
from secc.runtime.monitoring.throughput import peak_seconds, section_shares
from secc.runtime.monitoring.trackers import TrackedRun, open_trackers
from secc.runtime.training.callbacks import StepResult
from secc.runtime.training.evaluation import EvaluationResult
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.step_planner import PlannedStep

_GIB = 1 << 30


class RunReports:
    """Reports a run to the trackers of `--report-to`."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._plan = context, context.plan
        names = context.options.report_to
        # The library of a tracker may be slow to start, so nothing is opened without --report-to.
        opened = open_trackers(names, context.log_dir, f"secc-{context.run_id[:8]}", self._config())
        self._run = TrackedRun(dict(zip(names, opened, strict=True)))

    def _config(self) -> dict[str, Any]:
        plan = self._plan
        options = {k: v for k, v in dataclasses.asdict(self._context.options).items() if v not in (None, ())}
        config: dict[str, Any] = {f"run/{name}": str(value) for name, value in options.items()}
        config |= {
            "plan/hash": plan.hash,
            "plan/model": plan.model.path,
            "plan/world_size": plan.world_size,
            "plan/global_batch": plan.global_batch,
            "plan/predicted_step_s": plan.predicted_step_s,
        }
        for s in plan.user_sections:
            layout = f"dp {s.mesh.dp}, pp {s.mesh.pp}, tp {s.mesh.tp}"
            config[f"plan/section/{s.name}"] = f"{layout}, micro-batch {s.micro_batch}, {s.mode}"
        return config

    def log_step(
        self, result: StepResult, step: PlannedStep, seconds: SectionSeconds, exposed_s: float
    ) -> None:
        """Reports a step. `seconds`: computing and waiting of sections; `exposed_s`: mean seconds in which a
        rank waited for the reduction of gradients."""
        world, rate = result.world_size, 1 / result.seconds if result.seconds > 0 else 0.0
        values = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "throughput(tps)": result.tokens * rate / world,
            "throughput(samples/s)": result.samples * rate,
            "time_metrics/end_to_end(s)": result.seconds,
            "time_metrics/exposed_reduction(s)": exposed_s,
        }
        values |= {f"train/{name}": value for name, value in result.scalars.items()}
        peak = peak_seconds(self._plan, step.samples, step.schedule)
        if peak is not None:
            values["mfu(%)"] = 100 * peak * rate / world
        if self._context.device.type == "cuda":
            values["memory/max_reserved(GiB)"] = torch.cuda.max_memory_reserved(self._context.device) / _GIB
            values["memory/max_active(GiB)"] = torch.cuda.max_memory_allocated(self._context.device) / _GIB
        self._run.log(values | section_shares(self._plan, seconds, result.seconds), result.step)

    def log_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Reports the evaluation of a set, as `eval/loss` or `eval/SET_loss`."""
        values: Mapping[str, float] = result.metric_names()
        self._run.log(values, step)

    def log_samples(self, texts: Mapping[str, str], step: int) -> None:
        """Reports texts that `generate_samples` made of the checkpoint of a step, as `samples/NAME`."""
        self._run.log_texts({f"samples/{name}" if name else "samples": t for name, t in texts.items()}, step)

    def close(self) -> None:
        """Keeps the plan, its report, times and a trace as artifacts, and finishes the run."""
        context = self._context
        files = [context.directory / name for name in ("plan.json", "report.html", "trace.json")]
        files += [context.log_dir / SECTION_TIMES_FILE]
        self._run.close([*files, *([context.options.trace] if context.options.trace is not None else [])])
