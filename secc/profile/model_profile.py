"""Profiles a model file: captures it, times its blocks on micro-batches of dataset samples, and trains
some steps."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from secc.cluster import Overheads, parse_cluster
from secc.cost.counting.annotate_calls import annotate_calls
from secc.cost.counting.example_arguments import CollatedSamples
from secc.cost.model.measured_costs import MeasuredCosts
from secc.driver.compile import load_and_capture
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.frontend.capture import to_ir
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey
from secc.profile.time_blocks import BlockReport, SizedBatch, TimedCall, time_blocks
from secc.profile.trace_overheads import measure_overheads
from secc.report.text_table import TextTable
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import read_symbol_sizes

OVERHEAD_DESCRIPTIONS = {
    "job": "a forward or backward",
    "message": "a message sent",
    "tensor": "norm and update of a parameter",
    "sample": "scheduling of a sample",
    "step": "metadata, totals and metrics of a step",
}
SAMPLES_PER_BATCH = (1, 2, 4, 8, 16, 3, 6, 12)


@dataclass(frozen=True)
class ModelProfile:
    """Measured costs of a model and how each block was timed. overheads_reason: why overheads of steps
    were not measured."""

    costs: MeasuredCosts
    reports: list[BlockReport]
    overheads_reason: str = ""

    def as_dict(self) -> dict[str, object]:
        """The profile for JSON output."""
        overheads = self.costs.overheads
        overheads_entry = (
            {"overheads": asdict(overheads)}
            if overheads is not None
            else {"overheads": None, "reason": self.overheads_reason}
        )
        return {
            "hardware": self.costs.hardware.description,
            "blocks": [_report_dict(r) for r in self.reports],
            **overheads_entry,
        }

    def to_tables(self) -> list[TextTable]:
        """The profile for the terminal; errors are on sizes that the fit did not use."""
        rows = tuple(_report_row(r) for r in self.reports)
        note = f"measured on {self.costs.hardware.description}; errors are medians over held-out sizes"
        blocks = TextTable("Blocks", ("block", "sizes", "forward", "error", "backward", "error"), rows, note)
        return [
            blocks,
            TextTable("Overheads", ("of", "time"), tuple(self._overhead_rows()), self.overheads_reason),
        ]

    def _overhead_rows(self) -> Iterator[tuple[str, str]]:
        if (overheads := self.costs.overheads) is not None:
            for name, what in OVERHEAD_DESCRIPTIONS.items():
                yield what, f"{getattr(overheads, name) / 1e3:.4g} us"


def profile_model(
    path: Path, small: bool, sizes: int, repeat: int, progress: Callable[[str], None], ranks: int = 0
) -> ModelProfile:
    """Time the blocks of a model file, and the overheads of its steps.

    path: the model file. small: profile small_model(); its steps are not representative, so only blocks are
        timed.
    sizes: micro-batches of different sizes. repeat: minimum number of rounds. progress: called with a line
        for each part.
    ranks: ranks on this machine; 0 for as many as the cluster `local` has.

    Raises UserError if the model cannot be captured or no block can be timed.
    """
    ranks = ranks or parse_cluster("local").ranks

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        progress(name)
        yield

    user, meta, _, survey, inputs, captured, _ = load_and_capture(path, CompileOptions(small=small), step)
    module = to_ir.capture_to_ir(captured)
    with step("measure blocks"):
        samples = CollatedSamples(
            [user.collate([d.sample]) for d in survey.drawn_samples if d.sample is not None],
            captured.constants,
        )
        annotate_calls(module, meta, samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # as ranks on CPUs have
    costs, reports = time_blocks(
        module,
        meta,
        _batches_of_patterns(user, survey, inputs, sizes),
        captured.constants,
        device,
        repeat,
        progress,
        ranks,
    )
    if not costs.entries:
        reasons = "; ".join(f"{r.path}: {r.reason}" for r in reports)
        raise UserError(
            f"no block could be timed on this machine: {reasons}",
            str(path),
            "profile with --small, or on a machine that the model fits on",
        )
    overheads, reason = (
        (None, "steps of small_model() were not trained")
        if small
        else _measure_overheads(path, ranks, costs, step)
    )
    return ModelProfile(replace(costs, overheads=overheads), reports, reason)


def _measure_overheads(
    path: Path, ranks: int, measured: MeasuredCosts, step: Callable[[str], AbstractContextManager[None]]
) -> tuple[Overheads | None, str]:
    """The overheads of steps, or the reason why they could not be measured."""
    with (
        step(f"train some steps on {ranks} ranks"),
        tempfile.NamedTemporaryFile("w", suffix=".json") as costs,
    ):
        costs.write(measured.to_json())
        costs.flush()
        try:
            return measure_overheads(path, ranks, Path(costs.name), measured.gauge_ns), ""
        except UserError as error:
            return None, error.message


def _batches_of_patterns(
    user: UserModel, survey: DatasetSurvey, inputs: ModelInputs, count: int
) -> list[SizedBatch]:
    """Collate `count` micro-batches of up to 16 samples for each input pattern."""
    batches: list[SizedBatch] = []
    for pattern in survey.pattern_counts:
        samples = survey.samples_of(pattern)
        for i in range(min(count, len(SAMPLES_PER_BATCH) * len(samples))):
            size = SAMPLES_PER_BATCH[i % len(SAMPLES_PER_BATCH)]
            chosen = [samples[(i // len(SAMPLES_PER_BATCH) + k * k) % len(samples)] for k in range(size)]
            batch = user.collate(chosen)
            batches.append(SizedBatch(batch, read_symbol_sizes(batch, inputs.symbols, size)))
    return batches


def _held_out_error(report: BlockReport, backward: bool) -> tuple[float, float] | None:
    """(median milliseconds, median relative error) over the held-out sizes; None without prices."""
    prices = (
        None if report.measured is None else report.measured.backward if backward else report.measured.forward
    )
    times = [_timed_ns(t, backward) for t in report.timings if t.held_out]
    return None if prices is None or not times else (statistics.median(times) / 1e6, prices.error)


def _timed_ns(timing: TimedCall, backward: bool) -> float:
    return timing.backward if backward else timing.forward


def _report_row(report: BlockReport) -> tuple[str, ...]:
    forward, backward = _held_out_error(report, False), _held_out_error(report, True)
    if forward is None:
        return report.path, str(len(report.timings)), report.reason, "", "", ""
    backward_cells = ("", "") if backward is None else (f"{backward[0]:.3g} ms", f"{backward[1]:.1%}")
    return report.path, str(len(report.timings)), f"{forward[0]:.3g} ms", f"{forward[1]:.1%}", *backward_cells


def _report_dict(report: BlockReport) -> dict[str, object]:
    forward, backward = _held_out_error(report, False), _held_out_error(report, True)
    return {
        "block": report.path,
        "class": report.class_name,
        "sizes": len(report.timings),
        "reason": report.reason,
        "forward_error": forward and forward[1],
        "backward_error": backward and backward[1],
    }
