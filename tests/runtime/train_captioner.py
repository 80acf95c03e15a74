"""Training a captioner's plan on forked ranks, with what each rank saw."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tests.runtime.captioner_plans import CLASSES, Layout
from tests.runtime.gloo_ranks import enter_plan, run_ranks


def train(directory: Path, layout: Layout, steps: int, *arguments: str) -> list[dict[str, Any]]:
    """Train under the plan in `directory`; each rank returns its gradients of each step and its state dict at
    the end."""
    world_size = 1 + max(r for ranks in layout.values() for r in ranks)

    def target(rank: int) -> dict[str, Any]:
        enter_plan(directory)
        terms: Any = importlib.import_module("sections.terms")
        from secc.runtime.training.options import parse_options
        from secc.runtime.training.rank_context import RankContext
        from secc.runtime.training.trainer import Trainer

        held = [
            getattr(importlib.import_module(f"sections.{n}"), CLASSES[n])
            for n, ranks in layout.items()
            if rank in ranks
        ]
        with RankContext(
            directory, parse_options(["--steps", str(steps), "--workers", "0", *arguments]), terms
        ) as run:
            model = run.load_model()
            trainer = Trainer(run, model, [section(model) for section in held])
            gradients = []
            for batch in trainer.plan_steps():
                trainer.train_step(batch)
                here = [(n, p) for n, p in model.named_parameters() if not p.is_meta]
                gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in here})
            return {
                "gradients": gradients,
                "state": {k: v.clone() for k, v in model.state_dict().items() if not v.is_meta},
            }

    return run_ranks(world_size, target)


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "logs" / "metrics.jsonl").read_text().splitlines()]
