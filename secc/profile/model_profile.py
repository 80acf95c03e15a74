"""Profiling a model file: capture, micro-batches of the dataset's own sizes, timing, and what to say of
it."""

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
from secc.report import plan_tables
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import read_symbol_sizes

OVERHEAD_DESCRIPTIONS = {
    "job": "a forward or backward", "message": "a message sent", "tensor": "a parameter's norm and update",
    "sample": "a sample's part of planning a step", "step": "a step's metadata, totals and metrics",
}  # fmt: skip
SAMPLES_PER_BATCH = (1, 2, 4, 8, 16, 3, 6, 12)  # in a micro-batch


@dataclass(frozen=True)
class ModelProfile:
    """The table and how each block was timed."""

    costs: MeasuredCosts
    reports: list[BlockReport]
    overheads_reason: str = ""  # why overheads were not measured

    def as_dict(self) -> dict[str, object]:
        found = self.costs.overheads
        known = (
            {"overheads": asdict(found)}
            if found is not None
            else {"overheads": None, "reason": self.overheads_reason}
        )
        return {
            "hardware": self.costs.hardware.description,
            "blocks": [_report_dict(r) for r in self.reports],
            **known,
        }

    def to_tables(self) -> list[plan_tables.TextTable]:
        """For people: errors on sizes that were not profiled."""
        rows = tuple(_report_row(r) for r in self.reports)
        note = f"measured on {self.costs.hardware.description}; errors are medians over sizes that the fit did not see"
        blocks = plan_tables.TextTable(
            "Blocks", ("block", "sizes", "forward", "error", "backward", "error"), rows, note
        )
        return [
            blocks,
            plan_tables.TextTable(
                "Overheads", ("of", "time"), tuple(self._overhead_rows()), self.overheads_reason
            ),
        ]

    def _overhead_rows(self) -> Iterator[tuple[str, str]]:
        if (found := self.costs.overheads) is not None:
            for name, what in OVERHEAD_DESCRIPTIONS.items():
                yield what, f"{getattr(found, name) / 1e3:.4g} us"


def profile_model(
    path: Path, small: bool, sizes: int, repeat: int, progress: Callable[[str], None], ranks: int = 0
) -> ModelProfile:
    """Time the blocks of a model file, and what its steps take beside them, on `ranks` ranks of this machine
    (0: those of `local`).

    Raises UserError for what is wrong with it, and where nothing can be timed. Steps of a small model say
    nothing of the whole one's, so that with `small` blocks alone are timed.
    """
    ranks = ranks or parse_cluster("local").ranks

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        progress(name)
        yield

    user, meta, _, drawn, inputs, captured = load_and_capture(path, CompileOptions(small=small), step)
    module = to_ir.capture_to_ir(captured)
    with step("measure blocks"):
        samples = CollatedSamples(
            [user.collate([d.sample]) for d in drawn.drawn_samples if d.sample is not None],
            captured.constants,
        )
        annotate_calls(module, meta, samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # as ranks on CPUs have
    table, reports = time_blocks(
        module,
        meta,
        _batches_of_patterns(user, drawn, inputs, sizes),
        captured.constants,
        device,
        repeat,
        progress,
        ranks,
    )
    if not table.entries:
        reasons = "; ".join(f"{r.path}: {r.reason}" for r in reports)
        raise UserError(
            f"no block could be timed here: {reasons}",
            str(path),
            "profile with --small, or where the model fits",
        )
    found, why = (
        (None, "steps of small_model() were not trained")
        if small
        else _measure_overheads(path, ranks, table, step)
    )
    return ModelProfile(replace(table, overheads=found), reports, why)


def _measure_overheads(
    path: Path, ranks: int, table: MeasuredCosts, step: Callable[[str], AbstractContextManager[None]]
) -> tuple[Overheads | None, str]:
    """What the model's steps take beside blocks, or why that is not known."""
    with (
        step(f"train some steps on {ranks} ranks"),
        tempfile.NamedTemporaryFile("w", suffix=".json") as costs,
    ):
        costs.write(table.to_json())
        costs.flush()
        try:
            return measure_overheads(path, ranks, Path(costs.name), table.gauge_ns), ""
        except UserError as error:
            return None, error.message


def _batches_of_patterns(
    user: UserModel, drawn: DatasetSurvey, inputs: ModelInputs, count: int
) -> list[SizedBatch]:
    """Micro-batches of up to 16 samples of each pattern, `count` of each pattern."""
    found: list[SizedBatch] = []
    for pattern in drawn.pattern_counts:
        samples = drawn.samples_of(pattern)
        for i in range(min(count, len(SAMPLES_PER_BATCH) * len(samples))):
            size = SAMPLES_PER_BATCH[i % len(SAMPLES_PER_BATCH)]
            chosen = [samples[(i // len(SAMPLES_PER_BATCH) + k * k) % len(samples)] for k in range(size)]
            batch = user.collate(chosen)
            found.append(SizedBatch(batch, read_symbol_sizes(batch, inputs.symbols, size)))
    return found


def _held_out_error(report: BlockReport, backward: bool) -> tuple[float, float] | None:
    """(median milliseconds, median relative error) over the sizes that were held out."""
    prices = (
        None if report.measured is None else report.measured.backward if backward else report.measured.forward
    )
    times = [_timed_ns(t, backward) for t in report.timings if t.held_out]
    return None if prices is None or not times else (statistics.median(times) / 1e6, prices.error)


def _timed_ns(timed: TimedCall, backward: bool) -> float:
    return timed.backward if backward else timed.forward


def _report_row(report: BlockReport) -> tuple[str, ...]:
    forward, backward = _held_out_error(report, False), _held_out_error(report, True)
    if forward is None:
        return report.path, str(len(report.timings)), report.reason, "", "", ""
    shown = ("", "") if backward is None else (f"{backward[0]:.3g} ms", f"{backward[1]:.1%}")
    return report.path, str(len(report.timings)), f"{forward[0]:.3g} ms", f"{forward[1]:.1%}", *shown


def _report_dict(report: BlockReport) -> dict[str, object]:
    forward, backward = _held_out_error(report, False), _held_out_error(report, True)
    return {
        "block": report.path, "class": report.class_name, "sizes": len(report.timings), "reason": report.reason,
        "forward_error": forward and forward[1], "backward_error": backward and backward[1],
    }  # fmt: skip
