"""Finds out what another plan would gain, given the times and samples that a run had: `secc drift PLAN/
LOGDIR/`.

A run logs measured and predicted times of its sections and its mix of samples
(`runtime/monitoring/section_times.py`). The allocation is run again from the IR in the plan directory
(`secc/driver/what_if.py`), with each section's modelled times multiplied by measured/predicted and the
dataset's statistics replaced by the run's: once with the plan's own choices, once free to choose whatever the
user left open. The ratio of both predicted step times is the gain. A factor that is the same for all sections
cancels out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import FloatAttr, StringAttr, f64

from secc.alloc.problem.section_load import MEASURED_PERMILLE_ATTRIBUTES
from secc.codegen import plan_builder as plan_codegen
from secc.driver import what_if
from secc.errors import UserError
from secc.ir.dialect.ops import GraphOp, strings_of
from secc.ir.dialect.python_attributes import int_attr
from secc.runtime.monitoring.json_lines import read_lines
from secc.runtime.monitoring.section_times import (
    MAX_KEPT_STEPS,
    SECTION_TIMES_FILE,
    SECTION_TIMES_LINE,
    UNCOUNTED_STEPS,
)
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan, Section

TIMED_DIRECTIONS = ("forward_s", "backward_s")
_MOST_RATIO = 1e6  # of measured over predicted times that the allocation is given


@dataclass(frozen=True)
class SectionDrift:
    """Measured over predicted time of a section; None where either is missing."""

    forward: float | None
    backward: float | None


@dataclass(frozen=True)
class DriftReport:
    """What changed in a run, and the plan that would be best for it.

    steps: number of logged steps. mix: (share in the plan, share in the run) of each input pattern, with its
    keys joined by +. gain: how much longer a step of the present plan takes than one of `best_plan`,
    relative. best_pins: the choices NAME.KEY=VALUE that make `best_plan`.
    """

    steps: int
    sections: dict[str, SectionDrift]
    mix: dict[str, tuple[float, float]]
    gain: float
    plan: Plan
    best_plan: Plan
    best_pins: tuple[str, ...]


def measure_drift(directory: Path, log_dir: Path) -> DriftReport:
    """Compares the last run that logged to `log_dir` with its plan, and allocates again for what was
    measured.

    Raises UserError if the log has no usable steps or does not belong to the plan.
    """
    plan = load_plan(directory)
    steps = _read_last_run(log_dir / SECTION_TIMES_FILE)
    drifts = {s.name: _section_drift(steps, s.name) for s in plan.user_sections}
    passes, ir_file = what_if.load_before_allocate(directory)
    allocate: Any = passes[0]
    plans: list[Plan] = []
    mix: dict[str, tuple[float, float]] = {}
    for candidate_allocate in (dataclasses.replace(allocate, **_pinned_allocate_options(plan)), allocate):

        def set_measured_values(graph: GraphOp) -> None:
            what_if.allow_plan_tp(plan, graph)
            _set_time_ratios(graph, drifts)
            mix.update(_replace_statistics(graph, steps))

        module = what_if.reallocate(ir_file, candidate_allocate, passes[1:], set_measured_values)
        plans.append(plan_codegen.build_plan(module, plan.model, {}))
    now, best = (float(p.prediction["step_time_s"]) for p in plans)
    return DriftReport(
        len(steps), drifts, mix, max(0.0, now / best - 1), plans[0], plans[1], plan_pins(plans[1])
    )


def plan_pins(plan: Plan) -> tuple[str, ...]:
    """Returns the pins, NAME.KEY=VALUE, that reproduce a plan's choices."""
    return tuple(pin for s in plan.user_sections for pin in _section_pins(s)) + tuple(_colocation_pins(plan))


def _pinned_allocate_options(plan: Plan) -> dict[str, Any]:
    """Returns options of `allocate` that leave nothing open but the plan's own choices."""
    groups = {s.mesh.ranks for s in plan.user_sections}
    strategy = "auto" if 1 < len(groups) < len(plan.user_sections) else "apart" if len(groups) > 1 else "auto"
    return {"set": plan_pins(plan), "strategy": strategy, "objective": "time", "step_time": 0.0}


def _section_pins(s: Section) -> Iterator[str]:
    mesh = s.mesh
    values = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "micro_batch": s.micro_batch}
    values |= {key: n for key, n in (("cp", mesh.cp), ("ep", mesh.ep)) if n > 1}
    if s.mean_samples:
        values |= {"micro_batch": s.mean_samples, "most_samples": s.micro_batch}
    values |= {"micro_batch_tokens": s.micro_batch_tokens} if s.micro_batch_tokens else {}
    words = {"sharding": s.sharding, "recompute": s.recompute, "offload": s.offload}
    words |= {"attention": s.row_attention} if mesh.cp > 1 else {}
    words |= {"cp_per": s.cp_per} if mesh.cp > 1 else {}
    words |= {"cp_degrees": s.cp_degrees} if s.may_deal else {}
    words |= {"backward": "split" if s.weight_permille else "whole"} if mesh.pp > 1 else {}
    values |= {"chunks": s.chunks} if s.chunks > 1 else {}
    words |= {"placement": s.placement} if s.chunks > 1 else {}
    found = values | {k: w for k, w in words.items() if w != "none"}
    found |= {"overlap": s.overlap, "norms": s.norms} if mesh.tp > 1 else {}
    yield from (f"{s.name}.{key}={value}" for key, value in found.items())


def _colocation_pins(plan: Plan) -> Iterator[str]:
    first: dict[tuple[int, ...], str] = {}
    for s in plan.user_sections:
        if (other := first.setdefault(s.mesh.ranks, s.name)) != s.name:
            yield f"{s.name}.with={other}"


# -- the log


def _read_last_run(path: Path) -> list[dict[str, Any]]:
    """Returns the logged steps of the last run, without its first UNCOUNTED_STEPS. Raises UserError if
    there are none."""
    lines = list(read_lines(path, SECTION_TIMES_LINE, "name the --log-dir of a run of this plan"))
    starts = [k for k, line in enumerate(lines) if k == 0 or line["step"] != lines[k - 1]["step"] + 1]
    steps = lines[starts[-1] + UNCOUNTED_STEPS if starts else 0 :][-MAX_KEPT_STEPS:]
    if not steps:
        raise UserError(
            f"the last run has no step after its first {UNCOUNTED_STEPS}, which are left out as warm-up",
            str(path),
            "run more steps",
        )
    return steps


def _section_drift(steps: Sequence[Mapping[str, Any]], section: str) -> SectionDrift:
    logged = [step["sections"][section] for step in steps if section in step["sections"]]
    if not logged:
        raise UserError(
            f"the log has no times of section {section}", remedy="name the --log-dir of a run of this plan"
        )
    return SectionDrift(
        *(
            _measured_ratio(
                sum(s.get(k, 0.0) for s in logged), sum(s.get(f"predicted_{k}", 0.0) for s in logged)
            )
            for k in TIMED_DIRECTIONS
        )
    )


def _measured_ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None


# -- the IR


def _set_time_ratios(graph: GraphOp, drifts: Mapping[str, SectionDrift]) -> None:
    """Writes measured/predicted times onto sections, in permille, for `allocate` to scale modelled times
    with."""
    for section in graph.sections:
        drift = drifts[section.sym.data]
        for name, ratio in zip(MEASURED_PERMILLE_ATTRIBUTES, (drift.forward, drift.backward), strict=True):
            if ratio is not None:
                section.attributes[name] = int_attr(round(1000 * min(max(ratio, 0.001), _MOST_RATIO)))


def _replace_statistics(graph: GraphOp, steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Replaces the dataset's statistics by the run's, and returns each pattern's share before and now.

    Patterns of the run that no capture has are ignored; patterns that the run did not meet get the share 0.
    """
    counts: Counter[frozenset[str]] = Counter()
    sizes: dict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for part in (part for step in steps for part in step["mix"]):
        counts[frozenset(part["when"])] += part["count"]
        sizes[frozenset(part["when"])].update(part["sizes"])
    pattern_ops = {frozenset(strings_of(op.when)): op for op in graph.patterns}
    total = sum(counts[when] for when in pattern_ops)
    shares: dict[str, tuple[float, float]] = {}
    for when, op in pattern_ops.items() if total else ():
        share = counts[when] / total
        shares["+".join(sorted(when)) or "none"] = (float(op.share.data), share)
        op.share = StringAttr(str(share))
        if counts[when]:
            op.attributes |= {name: FloatAttr(size / counts[when], f64) for name, size in sizes[when].items()}
    return shares
