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

from secc.alloc.problem.candidates import MOVED
from secc.codegen import plan_builder as plan_codegen
from secc.driver import what_if
from secc.errors import UserError
from secc.ir.dialect.ops import GraphOp, strings
from secc.ir.dialect.python_attributes import integer
from secc.runtime.monitoring.section_times import FILE, LAST, WARM
from secc.runtime.plan.schema import Plan, Section, load

KINDS = ("forward_s", "backward_s")


@dataclass(frozen=True)
class Moved:
    """A section's measured times over the predicted ones; None where nothing was predicted or timed."""

    forward: float | None
    backward: float | None


@dataclass(frozen=True)
class Drift:
    """`sections` by name; `shares` and `sizes` of each pattern (keys joined by +) in the plan and in the run;
    the plan, and the one that is best by what was measured. `gain`: how much longer a step of the first
    takes, relative; `set`: the choices that make the second."""

    steps: int
    sections: dict[str, Moved]
    mix: dict[str, tuple[float, float]]
    gain: float
    plan: Plan
    best: Plan
    set: tuple[str, ...]


def drift(directory: Path, log_dir: Path) -> Drift:
    """What moved in the last run that logged to `log_dir`, and what another plan would gain.

    Raises UserError for a log that says nothing.
    """
    plan = load(directory)
    steps = _read(log_dir / FILE)
    moved = {s.name: _moved(steps, s.name) for s in plan.whole_sections}
    passes, before = what_if.before_allocate(directory)
    allocate: Any = passes[0]
    made: list[Plan] = []
    mix: dict[str, tuple[float, float]] = {}
    for changed in (dataclasses.replace(allocate, **_as_planned(plan)), allocate):

        def adapt(graph: GraphOp) -> None:
            what_if.note_taken(plan, graph)
            _mark(graph, moved)
            mix.update(_remix(graph, steps))

        module = what_if.again(before, changed, passes[1:], adapt)
        made.append(plan_codegen.build(module, plan.model, {}))
    now, best = (float(p.prediction["step_time_s"]) for p in made)
    return Drift(len(steps), moved, mix, max(0.0, now / best - 1), made[0], made[1], choices(made[1]))


def choices(plan: Plan) -> tuple[str, ...]:
    """The pins, NAME.KEY=VALUE, that make a plan."""
    return tuple(pin for s in plan.whole_sections for pin in _pins(s)) + tuple(_together(plan))


def _as_planned(plan: Plan) -> dict[str, Any]:
    """The options of `allocate` under which nothing but the plan's own choices is left."""
    groups = {s.mesh.ranks for s in plan.whole_sections}
    strategy = (
        "auto" if 1 < len(groups) < len(plan.whole_sections) else "apart" if len(groups) > 1 else "auto"
    )
    return {"set": choices(plan), "strategy": strategy, "objective": "time", "step_time": 0.0}


def _pins(s: Section) -> Iterator[str]:
    values = {"dp": s.mesh.dp, "tp": s.mesh.tp, "pp": s.mesh.pp, "micro_batch": s.micro_batch}
    words = {"sharding": s.sharding, "recompute": s.recompute}
    yield from (
        f"{s.name}.{key}={value}"
        for key, value in (values | {k: w for k, w in words.items() if w != "none"}).items()
    )


def _together(plan: Plan) -> Iterator[str]:
    first: dict[tuple[int, ...], str] = {}
    for s in plan.whole_sections:
        if (other := first.setdefault(s.mesh.ranks, s.name)) != s.name:
            yield f"{s.name}.with={other}"


# -- the log
# ----------------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> list[dict[str, Any]]:
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
    steps = lines[starts[-1] + WARM if starts else 0 :][-LAST:]
    if not steps:
        raise UserError(
            f"the last run has no step beyond its first {WARM}, which do not count",
            str(path),
            "run more steps",
        )
    return steps


def _moved(steps: Sequence[Mapping[str, Any]], section: str) -> Moved:
    known = [step["sections"][section] for step in steps if section in step["sections"]]
    if not known:
        raise UserError(
            f"the log says nothing of section {section}", remedy="name the --log-dir of a run of this plan"
        )
    return Moved(
        *(
            _ratio(sum(s.get(k, 0.0) for s in known), sum(s.get(f"predicted_{k}", 0.0) for s in known))
            for k in KINDS
        )
    )


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None


# -- the IR
# -----------------------------------------------------------------------------------------------------------------------


def _mark(graph: GraphOp, moved: Mapping[str, Moved]) -> None:
    """Tell `allocate` by how much sections' times moved."""
    for section in graph.sections:
        found = moved[section.sym.data]
        for name, ratio in zip(MOVED, (found.forward, found.backward), strict=True):
            if ratio is not None:
                section.attributes[name] = integer(max(1, round(1000 * ratio)))


def _remix(graph: GraphOp, steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Replace the dataset's statistics by the run's; returns each pattern's share before and now. Patterns
    that no capture has are left out, and those that the run did not meet lose their share."""
    counts: Counter[frozenset[str]] = Counter()
    sizes: dict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for part in (part for step in steps for part in step["mix"]):
        counts[frozenset(part["when"])] += part["count"]
        sizes[frozenset(part["when"])].update(part["sizes"])
    known = {frozenset(strings(op.when)): op for op in graph.patterns}
    total = sum(counts[when] for when in known)
    found: dict[str, tuple[float, float]] = {}
    for when, op in known.items() if total else ():
        share = counts[when] / total
        found["+".join(sorted(when)) or "none"] = (float(op.share.data), share)
        op.share = StringAttr(str(share))
        if counts[when]:
            op.attributes |= {name: FloatAttr(size / counts[when], f64) for name, size in sizes[when].items()}
    return found
