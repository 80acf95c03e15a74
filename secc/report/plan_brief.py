"""A plan in ten lines: what `secc compile` ends with and `secc explain` starts with."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from secc.cluster import Cluster
from secc.report.plan_tables import batch_steps_text
from secc.report.plan_warnings import plan_warnings
from secc.report.text_table import amount_text, seconds_text, short_ranks_text
from secc.runtime.plan.schema import Plan, Section

MAX_SECTION_LINES = 4
WIDTH = 100  # columns of a line, unless names are long
_MODES = {"train": "trained", "dgrad": "frozen, passes gradients", "forward": "frozen"}


def plan_brief(plan: Plan, directory: Path, warnings: tuple[str, ...] = ()) -> list[str]:
    """Returns at most ten lines of at most 100 columns, unless names are long: sections with their ranks, the
    predicted step and what bounds it, memory, costs, `warnings`, and the next commands."""
    cluster = plan.cluster.get("text") or plan.cluster.get("name") or plan.cluster.get("kind", "this machine")
    sections = plan.user_sections
    lines = [
        f"{directory}: {amount_text(len(sections), 'section')} on {amount_text(plan.world_size, 'rank')}"
        f" of {cluster}, global batch {plan.global_batch}"
    ]
    checked = checked_text(plan)
    lines[0] += f", {checked if len(lines[0]) + len(checked) < WIDTH else checked.partition(',')[0]}"
    known = [*warnings, *(w.text for w in plan_warnings(plan))]
    batches = batch_steps_text(plan)
    most = MAX_SECTION_LINES - bool(known) - bool(batches)  # a warning may need two lines
    shown: tuple[Section, ...] = sections if len(sections) <= most else sections[: most - 1]
    columns = zip(*map(_section_cells, shown), strict=True)
    widths = [max(map(len, column), default=0) for column in columns]
    for section in shown:
        cells = zip(_section_cells(section), widths, strict=True)
        lines.append(f"  {'  '.join(cell.ljust(width) for cell, width in cells)}  {_busy(plan, section)}")
    if len(shown) < len(sections):
        rest = ", ".join(s.name for s in sections[len(shown) :])
        lines.append(f"  and {amount_text(len(sections) - len(shown), 'further section')}: {rest}"[:100])
    lines.append(f"  step     {_step_text(plan)}")
    lines += [f"  batches  {batches}"] if batches else []
    lines.append(f"  costs    {_cost_text(plan)}")
    if known:
        more = f" (and {len(known) - 1} more: secc explain {directory})" if len(known) > 1 else ""
        label = "  warning  "
        lines += wrap(
            known[0] + more,
            WIDTH,
            initial_indent=label,
            subsequent_indent=" " * len(label),
            max_lines=2,
            placeholder=" …",
            break_long_words=False,
            break_on_hyphens=False,
        )
    lines.append(f"  next     secc explain {directory} · secc simulate {directory} --baselines all")
    lines.append(f"           secc run {directory} --steps 100 · open {directory / 'report.html'}")
    return lines


def checked_text(plan: Plan) -> str:
    """Says whether the plan was compared with plain PyTorch."""
    patterns = plan.checks.get("patterns")
    if isinstance(patterns, tuple | list) and patterns:
        return f"shown to be exact for {amount_text(len(patterns), 'input pattern')}"
    return str(plan.checks.get("reason", "not compared with the eager model"))


def _section_cells(s: Section) -> tuple[str, str, str, str]:
    kinds = ("dp", "pp", "tp", "cp", "ep")
    degrees = " ".join(f"{kind} {n}" for kind in kinds if (n := getattr(s.mesh, kind)) > 1)
    degrees += f" x {s.chunks} ({s.placement})" if s.chunks > 1 else ""
    degrees += " per micro-batch" if s.may_deal else ""
    return s.name, short_ranks_text(s.mesh.ranks), degrees or "one rank", _MODES.get(s.mode, s.mode)


def _busy(plan: Plan, section: Section) -> str:
    share = plan.prediction.get("sections", {}).get(section.name, {}).get("busy")
    memory = f"{section.memory_gib:.3g} GiB"
    return f"{memory}, busy {float(share):.0%}" if share is not None else memory


def _step_text(plan: Plan) -> str:
    seconds = plan.predicted_step_s
    if seconds is None:
        return "not predicted"
    rate = f"{plan.global_batch / seconds:,.4g} samples/s" if seconds else ""
    simulated = plan.prediction.get("simulated", {})
    bound = float(simulated.get("schedule_bound_s", 0.0))
    over = f"; {seconds / bound:.2f} of the bound, {simulated.get('bound_reason', '')}" if bound else ""
    return f"{seconds_text(seconds)} predicted, {rate}{over}"


def fullest_rank_gib(plan: Plan) -> float:
    """Returns the GiB of the fullest rank: with mean micro-batches, or in the shown step if that is more. An
    order may hold several large samples at once, up to what a rank has room for."""
    simulated = plan.prediction.get("simulated", {}).get("peak_memory_gib")
    return max([float(simulated or 0.0), *(s.memory_gib for s in plan.sections)])


def _cost_text(plan: Plan) -> str:
    kinds = ", ".join(dict.fromkeys(s.cost.label for s in plan.sections))
    cluster = Cluster.from_dict(plan.cluster)
    memory = ""
    if cluster is not None and plan.sections:
        fullest = fullest_rank_gib(plan)
        memory = (
            f"; a rank of the fullest section needs {fullest:.3g} of {cluster.device.memory / 2**30:.4g} GiB"
        )
    measure = "" if kinds == "measured" else " (secc profile measures them)"
    return f"{kinds}{measure}{memory}"
