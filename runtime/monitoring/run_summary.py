"""What a run says of itself at its end: the step that it had beside the one that the plan predicts, and
whether another plan may win.

Which plan is best depends on how long sections take in relation to each other, and that on the samples. So
ranks that were busy less evenly than the plan expected are worth a word: a plan made for these times and
samples could be faster by up to what the busiest ranks take beyond that. There are two causes, and the plan's
own costs tell them apart: sections that are slower or faster than modelled, and another mix of samples, by
which these costs themselves come out otherwise than with the samples that the plan was made for.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress
from math import sqrt
from pathlib import Path
from statistics import median, stdev

from secc.runtime.monitoring.section_times import MeasuredStep, SectionSeconds, section_time_columns
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, is_active

NOTABLE_GAIN = 0.05  # a gain worth a word
UNEXPLAINED_RATIO = 1.25  # measured over predicted that asks for a reason
CERTAIN_STANDARD_ERRORS = 2  # standard errors by which drift must be more than that
# the entry of a plan's prediction: seconds of a section's work for one of the dataset's samples, in the mean
SAMPLE_SECONDS_KEY = "sample_s"


def summary_lines(
    plan: Plan, steps: Sequence[MeasuredStep], log_dir: Path, processes: int = 0
) -> Iterator[str]:
    """Lines for people about the steps that a run ended with, on a machine where so many processes compute on
    its cores."""
    if not steps:
        return
    took = median(s.seconds for s in steps)
    said = f"{took:.4g} s a step, the median of the last {len(steps)}"
    predicted = float(plan.prediction.get("simulated", plan.prediction).get("step_time_s", 0.0))
    yield f"{said}; predicted {predicted:.4g} s ({took / predicted:.2f} times as long)" if predicted else said
    if predicted and not 1 / UNEXPLAINED_RATIO < took / predicted < UNEXPLAINED_RATIO:
        yield from _misprediction_reasons(plan, processes)
    yield from drift_warning(plan, steps, log_dir)


def _misprediction_reasons(plan: Plan, processes: int) -> Iterator[str]:
    """Why a prediction may be far off, and what to do."""
    if kinds := ", ".join(dict.fromkeys(s.cost.label for s in plan.sections if s.cost.label != "measured")):
        remedy = "secc profile MODEL.py -o costs.json measures them here, secc compile --costs costs.json takes them"
        yield f"  the prediction rests on {kinds} costs: {remedy}"
    if processes > (cores := available_cores()):
        yield f"  {processes} ranks and loaders share {cores} cores here, while the prediction gives each rank one of its own"


def available_cores() -> int:
    """The cores that this process may compute on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predict_sample_seconds(plan: Plan, samples: Sequence[SampleMeta]) -> dict[str, float]:
    """Seconds of each whole section's forward and backward for a sample alone, in the mean over these, by the
    plan's costs."""
    costs, found = PredictedCosts(plan, samples), Counter[str]()
    for section in plan.sections:
        works = [is_active(section.when, s.pattern) for s in samples]
        found[section.user_section_name] += sum(
            sum(compress(column, works)) for column in costs.sample_times(section)
        )
    return {name: ns / 1e9 / max(1, len(samples)) for name, ns in found.items()}


def drift_warning(plan: Plan, steps: Sequence[MeasuredStep], log_dir: Path) -> Iterator[str]:
    """A line if the ranks were busy less evenly than the plan expected, and one that says what to do."""
    shifted = _workload_shift(plan, [sample for step in steps for sample in step.samples])
    expected = [{key: s / shifted.get(key[0], 1.0) for key, s in step.predicted.items()} for step in steps]
    (now, busiest), (modelled, _), (planned, _) = (
        load_imbalance(plan, some)
        for some in ([s.measured for s in steps], [s.predicted for s in steps], expected)
    )
    each = [load_imbalance(plan, [s.measured])[0] for s in steps]
    doubt = CERTAIN_STANDARD_ERRORS * stdev(each) / sqrt(len(each)) if len(each) > 1 else 0.0
    if now - doubt > planned * (1 + NOTABLE_GAIN):
        ratio = (
            f"{now:.2f} times as long as ranks are in the mean, where the plan expected at most {planned:.2f}"
        )
        gain = f"a plan for {_describe_cause(now, modelled, planned)} could be up to {1 - planned / now:.0%} faster"
        yield f"drift: the ranks of {busiest} are busy {ratio}; {gain}"
        yield f"  what to do: secc drift {log_dir.parent if log_dir.name == 'logs' else 'PLAN/'} {log_dir}"


def _describe_cause(now: float, modelled: float, planned: float) -> str:
    """What moved: `modelled` is by the plan's costs of the samples that there were."""
    samples, times = modelled > planned * (1 + NOTABLE_GAIN / 2), now > modelled * (1 + NOTABLE_GAIN / 2)
    return "these times and samples" if samples and times else "these samples" if samples else "these times"


def _workload_shift(plan: Plan, samples: Sequence[SampleMeta]) -> dict[str, float]:
    """By the plan's costs, each section's work for these samples over that for the dataset's; empty where the
    plan does not say that."""
    before = plan.prediction.get(SAMPLE_SECONDS_KEY, {})
    now = predict_sample_seconds(plan, samples) if before else {}
    return {name: now[name] / s for name, s in before.items() if s and now.get(name)}


def load_imbalance(plan: Plan, steps: Sequence[SectionSeconds]) -> tuple[float, str]:
    """How long the busiest ranks compute over what ranks do in the mean, and their sections; by medians over
    steps."""
    seconds = {
        (name, kind): median(spent.get((name, kind), 0.0) for spent in steps)
        for name, kind, _ in section_time_columns(plan)
    }
    busy: defaultdict[tuple[int, ...], float] = defaultdict(float)
    names: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for s in plan.user_sections:
        ranks = tuple(sorted(s.mesh.ranks))
        busy[ranks] += sum(seconds.get((s.name, kind), 0.0) for kind in "FB") * s.mesh.tp / len(ranks)
        names[ranks].append(s.name)
    mean = sum(time * len(ranks) for ranks, time in busy.items()) / max(1, sum(map(len, busy)))
    longest = max(busy, key=lambda ranks: busy[ranks])
    return (busy[longest] / mean if mean else 1.0), ", ".join(names[longest])
