"""Keeps the checkpoint with the best value of an evaluation metric in `DIR/best`, and tells when to stop
training early.

Every rank sees the same metrics and so decides the same. `DIR/best/best.json` says which metric, value and
step it is, so that a resumed run goes on comparing with it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.monitoring.json_lines import say
from secc.runtime.plan.json_shapes import MalformedValue, integer, number, read_json, record, text

BEST_FOLDER, BEST_FILE = "best", "best.json"
_MAX_BYTES = 1 << 16
_BEST = record({"metric": text, "value": number(most=sys.float_info.max), "step": integer(0)})


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
            known = _read_best(self.folder / BEST_FILE)
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
        if not math.isfinite(value) or not (gain > 0 or math.isnan(self._value)):
            return False
        self._value, self._step = value, step
        return True

    def record(self) -> None:
        """Writes which metric, value and step the saved checkpoint has; for rank 0. A file that cannot be
        written is said and ends no run."""
        scratch = self.folder / (BEST_FILE + ".tmp")
        try:
            scratch.write_text(
                json.dumps({"metric": self.metric.name, "value": self._value, "step": self._step}) + "\n"
            )
            os.replace(scratch, self.folder / BEST_FILE)
        except OSError as error:
            say(f"warning: cannot write {scratch.with_suffix('')}: {error.strerror}; training goes on")

    def gives_up(self, step: int) -> bool:
        """Whether training stops: as many evaluations up to `step` were no better as the patience allows."""
        return self._patience is not None and (step - self._step) // self._every >= self._patience


def _read_best(path: Path) -> dict[str, Any]:
    """Returns metric, value and step. Raises UserError for a file that is not what `record` writes."""
    try:
        return _BEST(read_json(path, _MAX_BYTES))
    except (OSError, MalformedValue) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        remedy = "remove it: the next evaluation then counts as the best"
        raise UserError(f"cannot read the best value so far: {problem}", str(path), remedy) from None
