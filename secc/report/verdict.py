"""What a plan is worth, in words: for someone who looks at its report for one minute."""

from __future__ import annotations

from dataclasses import dataclass

from secc.cluster import GIB, Cluster
from secc.report.plan_brief import checked_text
from secc.report.text_table import amount_text, bytes_text, seconds_text
from secc.runtime.plan.schema import Plan

NEAR_BOUND = 1.1  # steps up to this many times the bound count as close to it
ROOMY = 0.9  # of a device's memory: less is far from full
SEVERAL = 3  # sections that are named; of more, only the number is given
CERTAINTY = {
    "measured": "Times of blocks were measured on the hardware at hand.",
    "roofline": (
        "Floating-point operations and bytes were counted, and rates are the vendor's times an efficiency:"
        " plans compare well by such times, steps may last longer."
    ),
    "default": (
        "Operations were counted, and rates are assumed in some part: plans compare by such times, steps may"
        " last much longer or shorter."
    ),
}


@dataclass(frozen=True)
class KeyFigure:
    """A figure at the top of the page, what it means, and how it is: "good", "fair" or "" for neither."""

    name: str
    value: str
    meaning: str
    state: str = ""


@dataclass(frozen=True)
class Verdict:
    """A headline, some sentences, and the key figures."""

    headline: str
    sentences: tuple[str, ...]
    figures: tuple[KeyFigure, ...]


def describe_plan(plan: Plan) -> Verdict:
    """Describes what a plan is worth."""
    names = [s.name for s in plan.user_sections]
    ranks = amount_text(plan.world_size, "rank")
    step = plan.predicted_step_s
    batch = amount_text(plan.global_batch, "sample")
    headline = f"A plan for steps of {batch} on {ranks}."
    if step:
        headline = f"A step of {batch} is predicted to take {_short_seconds_text(step)} on {ranks}."
    named = ", ".join(names) if len(names) <= SEVERAL else amount_text(len(names), "section")
    sentences = [_layout_sentence(plan, named), _bound_sentence(plan), _work_sentence(plan)]
    figures = [_step_figure(plan), _bound_figure(plan), _memory_figure(plan), _exactness_figure(plan)]
    figures.append(_cost_figure(plan))
    return Verdict(headline, tuple(s for s in sentences if s), tuple(f for f in figures if f is not None))


def _short_seconds_text(seconds: float) -> str:
    """A time with three digits."""
    return seconds_text(float(f"{seconds:.3g}"))


def cost_labels(plan: Plan) -> list[str]:
    """Returns the labels of the sections' costs, each once."""
    return list(dict.fromkeys(s.cost.label for s in plan.sections))


def _layout_sentence(plan: Plan, named: str) -> str:
    sections = plan.user_sections
    if len(sections) == 1:
        return f"The model is one section, {named}, on all ranks of the plan."
    groups = {frozenset(s.mesh.ranks) for s in sections}
    if len(groups) == 1:
        return f"The sections {named} share the same ranks and take turns on them."
    if len(groups) == len(sections):
        shares = ", ".join(f"{s.name} {len(s.mesh.ranks)}" for s in sections)
        return f"Each section has ranks of its own: {shares}."
    return f"The sections {named} are on {len(groups)} sets of ranks; some share theirs."


def _bound_sentence(plan: Plan) -> str:
    simulated = plan.prediction.get("simulated", {})
    bound, step = float(simulated.get("schedule_bound_s", 0.0)), plan.predicted_step_s
    if not bound or step is None:
        return ""
    reason = simulated.get("bound_reason", "")
    shortest = f"No schedule of this layout takes less than {seconds_text(bound)}, a bound set by {reason}."
    over = (
        f" The step is {step / bound - 1:.0%} above it." if step / bound >= 1.005 else " The step is there."
    )
    spread = float(simulated.get("plan_bound_s", 0.0))
    own_sizes = float(simulated.get("micro_batch_bound_s", 0.0))
    with_sizes = f", none with its micro-batches less than {seconds_text(own_sizes)}" if own_sizes else ""
    even = f" No plan of these layouts takes less than {seconds_text(spread)}{with_sizes}." if spread else ""
    return shortest + over + even


def _work_sentence(plan: Plan) -> str:
    """Which section does most of the work, and what that consists of."""
    times = {n: r["time_s"] for n, r in plan.reasons.items() if r.get("time_s")}
    ranks = {s.name: len(s.mesh.ranks) for s in plan.user_sections}
    if not times:
        return ""
    work = {name: sum(parts.values()) * ranks.get(name, 0) for name, parts in times.items()}
    name = max(work, key=lambda n: work[n])
    share = work[name] / (sum(work.values()) or 1.0)
    parts = times[name]
    total = sum(parts.values()) or 1.0
    largest = ", ".join(f"{what} {seconds / total:.0%}" for what, seconds in list(parts.items())[:2])
    if len(times) == 1:
        return f"Its time goes to {largest}."
    return f"Most of the work is in {name}, {share:.0%}; its time goes to {largest}."


def _step_figure(plan: Plan) -> KeyFigure | None:
    step = plan.predicted_step_s
    if not step:
        return None
    mfu = plan.prediction.get("simulated", {}).get("mfu")
    rate = f"{plan.global_batch / step:,.4g} samples/s"
    peak = f", {float(mfu):.0%} of the devices' peak" if mfu else ""
    return KeyFigure("Step", seconds_text(step), rate + peak)


def _bound_figure(plan: Plan) -> KeyFigure | None:
    bound = float(plan.prediction.get("simulated", {}).get("schedule_bound_s", 0.0))
    step = plan.predicted_step_s
    if not bound or step is None:
        return None
    ratio = step / bound
    meaning = "of the shortest step that this layout allows"
    return KeyFigure(
        "Distance to the bound", f"{ratio:.2f}×", meaning, "good" if ratio <= NEAR_BOUND else "fair"
    )


def _memory_figure(plan: Plan) -> KeyFigure | None:
    held = {s.name: s.memory_gib * GIB for s in plan.sections}
    if not any(s.pipeline for s in plan.sections):  # plan.json rounds what a section holds
        held |= {
            n: float(r["memory"]["used"]) for n, r in plan.reasons.items() if n in held and "memory" in r
        }
    name = max(held, key=lambda n: held[n], default="")
    if not name or not held[name]:
        return None
    used = max(held[name], float(plan.prediction.get("simulated", {}).get("peak_memory_gib") or 0.0) * GIB)
    cluster = Cluster.from_dict(plan.cluster)
    if cluster is None:
        return KeyFigure("Memory", bytes_text(used), f"on the fullest rank, of {name}")
    capacity = cluster.view_of_ranks(plan.find_section(name).mesh.ranks).device.memory
    of_section = f", of {name}" if used == held[name] else ""
    meaning = f"of {bytes_text(capacity)} on the fullest rank{of_section}"
    return KeyFigure("Memory", bytes_text(used), meaning, "good" if used < ROOMY * capacity else "fair")


def _exactness_figure(plan: Plan) -> KeyFigure:
    patterns = plan.checks.get("patterns", ())
    if plan.checks.get("accepted"):
        return KeyFigure("Exactness", "approximate", "approximations were accepted, see the warnings", "fair")
    if patterns:
        inputs = amount_text(len(patterns), "input pattern")
        return KeyFigure("Exactness", "shown", f"loss and gradients are plain PyTorch's for {inputs}", "good")
    return KeyFigure("Exactness", "not compared", checked_text(plan), "fair")


def _cost_figure(plan: Plan) -> KeyFigure:
    labels = cost_labels(plan)
    meanings = {
        "measured": "times of blocks measured here",
        "roofline": "counted work at the vendor's rates",
        "default": "rates assumed in some part",
    }
    meaning = "; ".join(meanings.get(label, label) for label in labels)
    return KeyFigure("Costs", ", ".join(labels), meaning, "good" if labels == ["measured"] else "fair")
