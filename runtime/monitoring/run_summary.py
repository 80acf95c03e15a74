"""The closing lines of a run: measured and predicted step time, and whether planning again is likely to help.

The best plan depends on the relative times of the sections, and these on the samples. If the busiest ranks
are loaded less evenly than the plan expected, a plan for the measured times and samples may be faster by up
to the excess. There are two causes, which the plan's own costs tell apart: sections that are slower or faster
than modelled, and a mix of samples that differs from the one that the plan was made for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress
from math import sqrt
from pathlib import Path
from statistics import median, stdev

from secc.runtime.host.cpu_cores import available_cores
from secc.runtime.monitoring.section_times import MeasuredStep, SectionSeconds, section_time_columns
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta

NOTABLE_GAIN = 0.05  # the smallest gain that is reported
UNEXPLAINED_RATIO = 1.25  # measured over predicted step time that is explained
CERTAIN_STANDARD_ERRORS = 2  # drift must exceed the threshold by this many
# In a plan's prediction: mean seconds of each section for one sample of the dataset.
SAMPLE_SECONDS_KEY = "sample_s"


def summary_lines(
    plan: Plan, steps: Sequence[MeasuredStep], log_dir: Path, processes: int = 0
) -> Iterator[str]:
    """Yields the closing lines about the last `steps` of a run. `processes`: ranks and loaders that compute
    on this machine's cores."""
    if not steps:
        return
    step_seconds = median(s.seconds for s in steps)
    measured = f"{step_seconds:.4g} s a step, the median of the last {len(steps)}"
    predicted = plan.predicted_step_s
    yield (
        f"{measured}; predicted {predicted:.4g} s ({step_seconds / predicted:.2f} times as long)"
        if predicted
        else measured
    )
    if predicted and not 1 / UNEXPLAINED_RATIO < step_seconds / predicted < UNEXPLAINED_RATIO:
        yield from _misprediction_reasons(plan, processes)
    yield from drift_warning(plan, steps, log_dir)


def _misprediction_reasons(plan: Plan, processes: int) -> Iterator[str]:
    """Yields likely reasons why a prediction is far off, with remedies."""
    if kinds := ", ".join(dict.fromkeys(s.cost.label for s in plan.sections if s.cost.label != "measured")):
        measure = "secc profile MODEL.py -o costs.json measures them here"
        yield f"  the prediction uses {kinds} costs: {measure}, secc compile --costs costs.json takes them"
    if processes > (cores := available_cores()):
        shared = f"{processes} ranks and loaders share {cores} cores here"
        yield f"  {shared}, while the prediction assumes one core per rank"


def predict_sample_seconds(plan: Plan, samples: Sequence[SampleMeta]) -> dict[str, float]:
    """Predicts the mean seconds of forward and backward per sample, for each of the user's sections."""
    costs, total_ns = PredictedCosts(plan, samples), Counter[str]()
    for section in plan.sections:
        is_used = [is_active(section.when, s.pattern) for s in samples]
        total_ns[section.user_section_name] += sum(
            sum(compress(column, is_used)) for column in costs.sample_times(section)
        )
    return {name: ns / 1e9 / max(1, len(samples)) for name, ns in total_ns.items()}


def drift_warning(plan: Plan, steps: Sequence[MeasuredStep], log_dir: Path) -> Iterator[str]:
    """Warns if ranks were loaded less evenly than the plan expected, and says what to do about it."""
    shifted = _workload_shift(plan, [sample for step in steps for sample in step.samples])
    expected = [{key: s / shifted.get(key[0], 1.0) for key, s in step.predicted.items()} for step in steps]
    (now, busiest), (modelled, _), (planned, _) = (
        load_imbalance(plan, seconds_by_step)
        for seconds_by_step in ([s.measured for s in steps], [s.predicted for s in steps], expected)
    )
    by_step = [load_imbalance(plan, [s.measured])[0] for s in steps]
    uncertainty = CERTAIN_STANDARD_ERRORS * stdev(by_step) / sqrt(len(by_step)) if len(by_step) > 1 else 0.0
    if now - uncertainty > planned * (1 + NOTABLE_GAIN):
        load = f"{now:.2f} times as long as the average rank (the plan expected {planned:.2f} times)"
        cause, gain = _describe_cause(now, modelled, planned), f"{1 - planned / now:.0%}"
        gains = f"a plan for {cause} could be up to {gain} faster"
        yield f"drift: the ranks of {busiest} are busy {load}; {gains}"
        yield f"  what to do: secc drift {log_dir.parent if log_dir.name == 'logs' else 'PLAN/'} {log_dir}"


def _describe_cause(now: float, modelled: float, planned: float) -> str:
    """Names what has changed. `now` is the measured imbalance, `modelled` the plan's prediction for the
    samples of the run, `planned` its prediction for the samples of the dataset."""
    samples, times = modelled > planned * (1 + NOTABLE_GAIN / 2), now > modelled * (1 + NOTABLE_GAIN / 2)
    return "these times and samples" if samples and times else "these samples" if samples else "these times"


def _workload_shift(plan: Plan, samples: Sequence[SampleMeta]) -> dict[str, float]:
    """Returns each section's predicted work for these samples over that for the dataset's samples; empty if
    the plan does not record the latter."""
    before = plan.prediction.get(SAMPLE_SECONDS_KEY, {})
    now = predict_sample_seconds(plan, samples) if before else {}
    return {name: now[name] / s for name, s in before.items() if s and now.get(name)}


def load_imbalance(plan: Plan, steps: Sequence[SectionSeconds]) -> tuple[float, str]:
    """Returns (computing time of the busiest ranks over the mean of all ranks, the sections of the busiest
    ranks), from medians over steps."""
    seconds = {
        (name, kind): median(spent.get((name, kind), 0.0) for spent in steps)
        for name, kind, _ in section_time_columns(plan)
    }
    busy: defaultdict[tuple[int, ...], float] = defaultdict(float)
    names: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for s in plan.user_sections:
        ranks = tuple(sorted(s.mesh.ranks))
        busy[ranks] += (
            sum(seconds.get((s.name, kind), 0.0) for kind in "FB") * s.mesh.replica_size / len(ranks)
        )
        names[ranks].append(s.name)
    mean = sum(time * len(ranks) for ranks, time in busy.items()) / max(1, sum(map(len, busy)))
    longest = max(busy, key=lambda ranks: busy[ranks])
    return (busy[longest] / mean if mean else 1.0), ", ".join(names[longest])
