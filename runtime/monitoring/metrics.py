"""Writes metrics.jsonl, one JSON object per step, and a progress line; used by rank 0."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TextIO

from secc.runtime.monitoring.json_lines import JsonLinesFile, say
from secc.runtime.plan.json_shapes import integer, nullable, number, record, text

METRICS_FILE = "metrics.jsonl"
_NUMBER = nullable(number(most=sys.float_info.max))
METRICS_LINE = record(  # the shape of a line of the file: of a step or, with "eval", of an evaluation
    {"step": integer(0)},
    {"loss": _NUMBER, "step_time_s": _NUMBER, "eval": text},
    others=lambda value: value,
)
_SPIKE_WINDOW = 100  # steps that a loss is compared with
_SPIKE_DEVIATIONS = 6.0
_SPIKE_SHARE = 0.01  # of the mean: the least standard deviation that is assumed
_PROGRESS_INTERVAL_S = 10.0  # between progress lines if the stream is not a terminal


def find_lost_steps(directory: Path, checkpoint_step: int) -> tuple[int, float]:
    """Returns the number and the seconds of the steps that the last run in a log directory has trained after
    the step of a checkpoint."""
    count, seconds = 0, 0.0
    try:
        lines = (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return 0, 0.0
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            step, spent, is_evaluation = entry["step"], entry["step_time_s"], "eval" in entry
        except (ValueError, KeyError, TypeError):
            continue  # a line that was being written, or that is no step's
        if is_evaluation:
            continue
        if step <= checkpoint_step:
            break
        count, seconds = count + 1, seconds + spent
        if step == checkpoint_step + 1:
            break
    return count, seconds


class MetricsLog:
    """Appends to `directory/metrics.jsonl` and shows progress towards `last_step` on `stream`. Every line has
    the id of the run, `run`, if given."""

    def __init__(
        self, directory: Path, last_step: int, stream: TextIO = sys.stderr, run: str | None = None
    ) -> None:
        self._file = JsonLinesFile(directory / METRICS_FILE, stream)
        self._run = {} if run is None else {"run": run}
        self._last_step, self._stream = last_step, stream
        self._in_place = stream.isatty()
        self._shown_at = float("-inf")
        self._shown_width = 0
        self._first: tuple[float, int] | None = None  # time and number of the first step
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)

    def log_step(self, values: dict[str, Any]) -> None:
        """Writes one step: `step, loss, grad_norm, samples, tokens, step_time_s`, and further scalars if
        given; `spike` if the loss is far above the last ones."""
        values |= self._find_spike(values["loss"])
        self._file.write(values | self._run)
        with suppress(OSError):  # a full or closed stream
            self._show_progress(values)

    def _find_spike(self, loss: float) -> dict[str, Any]:
        """Returns {"spike": how many standard deviations the loss is above the mean of the last steps} if
        they are many; {} else."""
        last = [*self._losses]
        if math.isfinite(loss):
            self._losses.append(loss)
        if len(last) < _SPIKE_WINDOW // 2 or not loss > (mean := fmean(last)):
            return {}
        deviations = (loss - mean) / max(pstdev(last), _SPIKE_SHARE * abs(mean), 1e-12)
        return {"spike": round(deviations, 1)} if deviations > _SPIKE_DEVIATIONS else {}

    def log_evaluation(
        self, step: int, name: str, values: Mapping[str, float], samples: int, tokens: int, seconds: float
    ) -> None:
        """Writes the evaluation of a set after a step, with the key `eval`: the set's name, or "eval" for an
        only set. Its line has the keys of a step's, and no gradient norm."""
        line = {"step": step, "eval": name or "eval"} | dict(values)
        line |= {"grad_norm": None, "samples": samples, "tokens": tokens, "step_time_s": seconds}
        self._file.write(line | self._run)
        shown = "  ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in values.items())
        self._end_line()
        about = f"evaluation{f' of {name}' if name else ''} after step {step}:  {shown}"
        say(f"{about}  ({samples} samples, {seconds:.1f} s)", self._stream)

    def close(self) -> None:
        """Ends the progress line."""
        self._end_line()

    def _end_line(self) -> None:
        """Ends a progress line that is written in place."""
        if self._in_place and self._shown_width:
            say("", self._stream)
        self._shown_width = 0

    def _show_progress(self, values: dict[str, Any]) -> None:
        now, last = time.monotonic(), values["step"] >= self._last_step
        if (
            not self._in_place
            and not last
            and "spike" not in values
            and now - self._shown_at < _PROGRESS_INTERVAL_S
        ):
            return
        self._shown_at = now
        self._first = self._first or (now, values["step"])
        seconds = values["step_time_s"]
        tokens = values["tokens"] > 0
        rate = values["tokens" if tokens else "samples"] / seconds if seconds > 0 else 0.0
        line = f"step {values['step']}/{self._last_step}  loss {values['loss']:.4f}"
        line += f"  grad norm {values['grad_norm']:.3g}"
        if "learning_rate" in values:
            line += f"  lr {values['learning_rate']:.3g}"
        rate_text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"
        line += f"  {seconds:.2f} s/step  {rate_text} {'tokens' if tokens else 'samples'}/s"
        since, first = self._first
        if values["step"] > first and not last:
            left = (now - since) / (values["step"] - first) * (self._last_step - values["step"])
            line += f"  {duration_text(left)} left"
        if "spike" in values:
            line += f"  loss spike ({values['spike']} standard deviations)"
        if values.get("recorded") or values.get("kept"):
            line += f"  {values['recorded']:.0f} recorded, {values['kept']:.0f} reused"
            line += f", {values['exposed_s']:.2f} s waited for recordings"
        if self._in_place:
            columns = _terminal_columns()
            self._stream.write("\r" + line[:columns].ljust(min(self._shown_width, columns)))
            self._shown_width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def duration_text(seconds: float) -> str:
    """A duration as a person says it: `45 s`, `12 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns - 1
    except OSError:
        return 100
