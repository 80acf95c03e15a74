"""Keeps the checkpoint with the best value of an evaluation metric in `DIR/best`, and tells when to stop
training early.

Every rank sees the same metrics and decides alike. `DIR/best/best.json` says which metric, value and step it
is, so that a resumed run goes on comparing with it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from secc.runtime.errors import UserError

BEST_FOLDER, BEST_FILE = "best", "best.json"


@dataclass(frozen=True)
class BestMetric:
    """The metric that `--keep-best` names, and whether larger values are better."""

    name: str
    is_maximized: bool = False

    @staticmethod
    def parse(text: str) -> BestMetric:
        """Parses `eval/NAME`, `eval/NAME:min` or `eval/NAME:max`. Raises ValueError for other text."""
        name, _, direction = text.partition(":")
        if not name.startswith("eval/") or direction not in ("", "min", "max"):
            raise ValueError(f"expected eval/NAME, eval/NAME:min or eval/NAME:max, got {text!r}")
        return BestMetric(name, direction == "max")


class BestCheckpoint:
    """Compares evaluations with the best one so far. `folder`: that of the run's checkpoints. `patience`:
    evaluations without a better value after which training stops (None: never), one every `every` steps.
    `first_step`: where the run continues, 0 for a new one."""

    def __init__(
        self, metric: BestMetric, folder: Path, patience: int | None, every: int | None, first_step: int
    ) -> None:
        self.metric, self.folder = metric, folder / BEST_FOLDER
        self._patience, self._every = patience, every or 1
        self._value, self._step = math.nan, 0
        if first_step and (self.folder / BEST_FILE).exists():
            known = json.loads((self.folder / BEST_FILE).read_text())
            if known["metric"] == metric.name and known["step"] <= first_step:
                self._value, self._step = known["value"], known["step"]

    def is_improved(self, step: int, values: Mapping[str, float]) -> bool:
        """Takes in the metrics of an evaluation after `step`, and returns whether it is the best so far.
        Raises UserError if the metric is not among them."""
        if self.metric.name not in values:
            raise UserError(
                f"--keep-best: there is no metric {self.metric.name!r}",
                remedy=f"use one of {', '.join(sorted(values))}",
            )
        value = values[self.metric.name]
        gain = value - self._value if self.metric.is_maximized else self._value - value
        if math.isnan(value) or not (gain > 0 or math.isnan(self._value)):
            return False
        self._value, self._step = value, step
        return True

    def record(self) -> None:
        """Writes which metric, value and step the saved checkpoint has; for rank 0."""
        scratch = self.folder / (BEST_FILE + ".tmp")
        scratch.write_text(
            json.dumps({"metric": self.metric.name, "value": self._value, "step": self._step}) + "\n"
        )
        os.replace(scratch, self.folder / BEST_FILE)

    def gives_up(self, step: int) -> bool:
        """Whether so many evaluations up to `step` were no better that training stops."""
        return self._patience is not None and (step - self._step) // self._every >= self._patience
