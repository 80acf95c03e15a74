"""Profiling a model file: capture, micro-batches of the dataset's own sizes, timing, and what to say of it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from secc.compiler import Options, front
from secc.cost.examples import Samples
from secc.cost.measure import measure
from secc.cost.table import Table
from secc.errors import UserError
from secc.frontend import import_ir
from secc.frontend.inputs import Inputs
from secc.frontend.survey import Survey
from secc.profile.blocks import Batch, Report, Timed, profile
from secc.report import facts
from secc.runtime.sizes import sizes_of
from secc.runtime.user_model import UserModel

MOST = 4  # samples in a micro-batch


@dataclass(frozen=True)
class Profile:
    """The table and how each block was timed."""

    table: Table
    reports: list[Report]

    def as_dict(self) -> dict[str, object]:
        return {"hardware": self.table.hardware.text, "blocks": [_block(r) for r in self.reports]}

    def tables(self) -> list[facts.Table]:
        """For people: errors on sizes that were not profiled."""
        rows = tuple(_row(r) for r in self.reports)
        note = f"measured on {self.table.hardware.text}; errors are medians over sizes that the fit did not see"
        return [facts.Table("Blocks", ("block", "sizes", "forward", "error", "backward", "error"), rows, note)]


def profile_model(path: Path, small: bool, sizes: int, repeat: int, progress: Callable[[str], None]) -> Profile:
    """Time the blocks of a model file. Raises UserError for what is wrong with it, and where nothing can be timed."""

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        progress(name)
        yield

    user, meta, _, drawn, inputs, captured = front(path, Options(small=small), step)
    module = import_ir.to_ir(captured)
    with step("measure blocks"):
        samples = Samples([user.collate([d.sample]) for d in drawn.drawn if d.sample is not None], captured.constants)
        measure(module, meta, samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # as ranks on CPUs have
    table, reports = profile(module, meta, _batches(user, drawn, inputs, sizes), captured.constants, device, repeat, progress)
    if not table.entries:
        reasons = "; ".join(f"{r.path}: {r.reason}" for r in reports)
        raise UserError(f"no block could be timed here: {reasons}", str(path), "profile with --small, or where the model fits")
    return Profile(table, reports)


def _batches(user: UserModel, drawn: Survey, inputs: Inputs, count: int) -> list[Batch]:
    """Micro-batches of 1, 2, 3 and 4 samples of each pattern, `count` of each where the survey has samples enough."""
    found: list[Batch] = []
    for pattern in drawn.patterns:
        samples = drawn.samples(pattern)
        for i in range(min(count, MOST * len(samples))):
            size = 1 + i % MOST
            chosen = [samples[(i // MOST + k * k) % len(samples)] for k in range(size)]
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
