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

from secc.cluster import Overheads, parse
from secc.cost.counting.annotate_calls import measure
from secc.cost.counting.example_arguments import Samples
from secc.cost.model.measured_costs import Table
from secc.driver.compile import Options, front
from secc.errors import UserError
from secc.frontend.capture import to_ir
from secc.frontend.dataset.input_symbols import Inputs
from secc.frontend.dataset.survey import Survey
from secc.profile.time_blocks import Batch, Report, Timed, profile
from secc.profile.trace_overheads import overheads
from secc.report import plan_tables
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import sizes_of

OVERHEADS = {
    "job": "a forward or backward", "message": "a message sent", "tensor": "a parameter's norm and update",
    "sample": "a sample's part of planning a step", "step": "a step's metadata, totals and metrics",
}  # fmt: skip
SAMPLES = (1, 2, 4, 8, 16, 3, 6, 12)  # in a micro-batch


@dataclass(frozen=True)
class Profile:
    """The table and how each block was timed."""

    table: Table
    reports: list[Report]
    unknown: str = ""  # why overheads were not measured

    def as_dict(self) -> dict[str, object]:
        found = self.table.overheads
        known = (
            {"overheads": asdict(found)} if found is not None else {"overheads": None, "reason": self.unknown}
        )
        return {"hardware": self.table.hardware.text, "blocks": [_block(r) for r in self.reports], **known}

    def tables(self) -> list[plan_tables.Table]:
        """For people: errors on sizes that were not profiled."""
        rows = tuple(_row(r) for r in self.reports)
        note = (
            f"measured on {self.table.hardware.text}; errors are medians over sizes that the fit did not see"
        )
        blocks = plan_tables.Table(
            "Blocks", ("block", "sizes", "forward", "error", "backward", "error"), rows, note
        )
        return [blocks, plan_tables.Table("Overheads", ("of", "time"), tuple(self._beside()), self.unknown)]

    def _beside(self) -> Iterator[tuple[str, str]]:
        if (found := self.table.overheads) is not None:
            for name, what in OVERHEADS.items():
                yield what, f"{getattr(found, name) / 1e3:.4g} us"


def profile_model(
    path: Path, small: bool, sizes: int, repeat: int, progress: Callable[[str], None], ranks: int = 0
) -> Profile:
    """Time the blocks of a model file, and what its steps take beside them, on `ranks` ranks of this machine
    (0: those of `local`).

    Raises UserError for what is wrong with it, and where nothing can be timed. Steps of a small model say
    nothing of the whole one's, so that with `small` blocks alone are timed.
    """
    ranks = ranks or parse("local").ranks

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        progress(name)
        yield

    user, meta, _, drawn, inputs, captured = front(path, Options(small=small), step)
    module = to_ir.to_ir(captured)
    with step("measure blocks"):
        samples = Samples(
            [user.collate([d.sample]) for d in drawn.drawn if d.sample is not None], captured.constants
        )
        measure(module, meta, samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # as ranks on CPUs have
    table, reports = profile(
        module,
        meta,
        _batches(user, drawn, inputs, sizes),
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
        (None, "steps of small_model() were not trained") if small else _overheads(path, ranks, table, step)
    )
    return Profile(replace(table, overheads=found), reports, why)


def _overheads(
    path: Path, ranks: int, table: Table, step: Callable[[str], AbstractContextManager[None]]
) -> tuple[Overheads | None, str]:
    """What the model's steps take beside blocks, or why that is not known."""
    with (
        step(f"train some steps on {ranks} ranks"),
        tempfile.NamedTemporaryFile("w", suffix=".json") as costs,
    ):
        costs.write(table.to_json())
        costs.flush()
        try:
            return overheads(path, ranks, Path(costs.name), table.gauge_ns), ""
        except UserError as error:
            return None, error.message


def _batches(user: UserModel, drawn: Survey, inputs: Inputs, count: int) -> list[Batch]:
    """Micro-batches of up to 16 samples of each pattern, `count` of each pattern."""
    found: list[Batch] = []
    for pattern in drawn.patterns:
        samples = drawn.samples(pattern)
        for i in range(min(count, len(SAMPLES) * len(samples))):
            size = SAMPLES[i % len(SAMPLES)]
            chosen = [samples[(i // len(SAMPLES) + k * k) % len(samples)] for k in range(size)]
            batch = user.collate(chosen)
            found.append(Batch(batch, sizes_of(batch, inputs.symbols, size)))
    return found


def _held_out(report: Report, backward: bool) -> tuple[float, float] | None:
    """(median milliseconds, median relative error) over the sizes that were held out."""
    prices = None if report.entry is None else report.entry.backward if backward else report.entry.forward
    times = [_ns(t, backward) for t in report.timed if t.held_out]
    return None if prices is None or not times else (statistics.median(times) / 1e6, prices.error)


def _ns(timed: Timed, backward: bool) -> float:
    return timed.backward if backward else timed.forward


def _row(report: Report) -> tuple[str, ...]:
    forward, backward = _held_out(report, False), _held_out(report, True)
    if forward is None:
        return report.path, str(len(report.timed)), report.reason, "", "", ""
    shown = ("", "") if backward is None else (f"{backward[0]:.3g} ms", f"{backward[1]:.1%}")
    return report.path, str(len(report.timed)), f"{forward[0]:.3g} ms", f"{forward[1]:.1%}", *shown


def _block(report: Report) -> dict[str, object]:
    forward, backward = _held_out(report, False), _held_out(report, True)
    return {
        "block": report.path, "class": report.cls, "sizes": len(report.timed), "reason": report.reason,
        "forward_error": forward and forward[1], "backward_error": backward and backward[1],
    }  # fmt: skip
