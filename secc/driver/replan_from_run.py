"""What another plan would gain by the times and the samples that a run had: `secc drift PLAN/ LOGDIR/`.

A run leaves what its sections took beside what the plan predicted, and its mix of samples
(`runtime/monitoring/section_times.py`). The allocation is run again from the IR that the plan keeps
(`secc/driver/what_if.py`), with each section's modelled times multiplied by measured over predicted and the
dataset's statistics replaced by the run's: once with the plan's own choices, once with all that the user left
open. The first step time over the second is the gain, both by the same model. What moved alike for all
sections gains nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import FloatAttr, StringAttr, f64

from secc.alloc.problem.candidates import MEASURED_PERMILLE_ATTRIBUTES
from secc.codegen import plan_builder as plan_codegen
from secc.driver import what_if
from secc.errors import UserError
from secc.ir.dialect.ops import GraphOp, strings_of
from secc.ir.dialect.python_attributes import int_attr
from secc.runtime.monitoring.section_times import MAX_KEPT_STEPS, SECTION_TIMES_FILE, UNCOUNTED_STEPS
from secc.runtime.plan.schema import Plan, Section, load_plan

TIMED_DIRECTIONS = ("forward_s", "backward_s")


@dataclass(frozen=True)
class SectionDrift:
    """A section's measured times over the predicted ones; None where nothing was predicted or timed."""

    forward: float | None
    backward: float | None


@dataclass(frozen=True)
class DriftReport:
    """`sections` by name; `shares` and `sizes` of each pattern (keys joined by +) in the plan and in the run;
    the plan, and the one that is best by what was measured. `gain`: how much longer a step of the first
    takes, relative; `set`: the choices that make the second."""

    steps: int
    sections: dict[str, SectionDrift]
    mix: dict[str, tuple[float, float]]
    gain: float
    plan: Plan
    best_plan: Plan
    best_pins: tuple[str, ...]


def measure_drift(directory: Path, log_dir: Path) -> DriftReport:
    """What moved in the last run that logged to `log_dir`, and what another plan would gain.

    Raises UserError for a log that says nothing.
    """
    plan = load_plan(directory)
    steps = _read_last_run(log_dir / SECTION_TIMES_FILE)
    moved = {s.name: _section_drift(steps, s.name) for s in plan.user_sections}
    passes, before = what_if.load_before_allocate(directory)
    allocate: Any = passes[0]
    made: list[Plan] = []
    mix: dict[str, tuple[float, float]] = {}
    for changed in (dataclasses.replace(allocate, **_pinned_allocate_options(plan)), allocate):

        def adapt(graph: GraphOp) -> None:
            what_if.allow_plan_tp(plan, graph)
            _set_time_ratios(graph, moved)
            mix.update(_replace_statistics(graph, steps))

        module = what_if.reallocate(before, changed, passes[1:], adapt)
        made.append(plan_codegen.build_plan(module, plan.model, {}))
    now, best = (float(p.prediction["step_time_s"]) for p in made)
    return DriftReport(len(steps), moved, mix, max(0.0, now / best - 1), made[0], made[1], plan_pins(made[1]))


def plan_pins(plan: Plan) -> tuple[str, ...]:
    """The pins, NAME.KEY=VALUE, that make a plan."""
    return tuple(pin for s in plan.user_sections for pin in _section_pins(s)) + tuple(_colocation_pins(plan))


def _pinned_allocate_options(plan: Plan) -> dict[str, Any]:
    """The options of `allocate` under which nothing but the plan's own choices is left."""
    groups = {s.mesh.ranks for s in plan.user_sections}
    strategy = "auto" if 1 < len(groups) < len(plan.user_sections) else "apart" if len(groups) > 1 else "auto"
    return {"set": plan_pins(plan), "strategy": strategy, "objective": "time", "step_time": 0.0}


def _section_pins(s: Section) -> Iterator[str]:
    values = {"dp": s.mesh.dp, "tp": s.mesh.tp, "pp": s.mesh.pp, "micro_batch": s.micro_batch}
    words = {"sharding": s.sharding, "recompute": s.recompute}
    yield from (
        f"{s.name}.{key}={value}"
        for key, value in (values | {k: w for k, w in words.items() if w != "none"}).items()
    )


def _colocation_pins(plan: Plan) -> Iterator[str]:
    first: dict[tuple[int, ...], str] = {}
    for s in plan.user_sections:
        if (other := first.setdefault(s.mesh.ranks, s.name)) != s.name:
            yield f"{s.name}.with={other}"


# -- the log
# ----------------------------------------------------------------------------------------------------------------------


def _read_last_run(path: Path) -> list[dict[str, Any]]:
    """The steps of the last run in a log, without its first ones."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        starts = [k for k, line in enumerate(lines) if k == 0 or line["step"] != lines[k - 1]["step"] + 1]
    except OSError as error:
        raise UserError(
            f"cannot read what a run took: {error.strerror}",
            str(path),
            "name the --log-dir of a run of this plan",
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            "not a log of what sections took", str(path), "name the --log-dir of a run of this plan"
        ) from None
    steps = lines[starts[-1] + UNCOUNTED_STEPS if starts else 0 :][-MAX_KEPT_STEPS:]
    if not steps:
        raise UserError(
            f"the last run has no step beyond its first {UNCOUNTED_STEPS}, which do not count",
            str(path),
            "run more steps",
        )
    return steps


def _section_drift(steps: Sequence[Mapping[str, Any]], section: str) -> SectionDrift:
    known = [step["sections"][section] for step in steps if section in step["sections"]]
    if not known:
        raise UserError(
            f"the log says nothing of section {section}", remedy="name the --log-dir of a run of this plan"
        )
    return SectionDrift(
        *(
            _measured_ratio(
                sum(s.get(k, 0.0) for s in known), sum(s.get(f"predicted_{k}", 0.0) for s in known)
            )
            for k in TIMED_DIRECTIONS
        )
    )


def _measured_ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None


# -- the IR
# -----------------------------------------------------------------------------------------------------------------------


def _set_time_ratios(graph: GraphOp, moved: Mapping[str, SectionDrift]) -> None:
    """Tell `allocate` by how much sections' times moved."""
    for section in graph.sections:
        found = moved[section.sym.data]
        for name, ratio in zip(MEASURED_PERMILLE_ATTRIBUTES, (found.forward, found.backward), strict=True):
            if ratio is not None:
                section.attributes[name] = int_attr(max(1, round(1000 * ratio)))


def _replace_statistics(graph: GraphOp, steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Replace the dataset's statistics by the run's; returns each pattern's share before and now. Patterns
    that no capture has are left out, and those that the run did not meet lose their share."""
    counts: Counter[frozenset[str]] = Counter()
    sizes: dict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for part in (part for step in steps for part in step["mix"]):
        counts[frozenset(part["when"])] += part["count"]
        sizes[frozenset(part["when"])].update(part["sizes"])
    known = {frozenset(strings_of(op.when)): op for op in graph.patterns}
    total = sum(counts[when] for when in known)
    found: dict[str, tuple[float, float]] = {}
    for when, op in known.items() if total else ():
        share = counts[when] / total
        found["+".join(sorted(when)) or "none"] = (float(op.share.data), share)
        op.share = StringAttr(str(share))
        if counts[when]:
            op.attributes |= {name: FloatAttr(size / counts[when], f64) for name, size in sizes[when].items()}
    return found
