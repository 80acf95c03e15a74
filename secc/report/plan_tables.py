"""What there is to say about a plan, as tables of text: one source for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from secc.cluster import Cluster
from secc.report import decision_tables, tensor_parallel_rows
from secc.report.text_table import TextTable, blocks_text, bytes_text, count_text, ranks_text, seconds_text
from secc.runtime.plan.schema import Edge, Plan, RerecordedCase, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections

MODE_DESCRIPTIONS = {
    "train": "forward, and backward to weights and inputs",
    "dgrad": "forward, and backward to inputs only: frozen weights, trainable part upstream",
    "forward": "forward only: nothing trainable in it or upstream",
}


def plan_tables(plan: Plan) -> list[TextTable]:
    """All that a plan decides and predicts, with the reason where there is one."""
    found = [
        _sections_table(plan),
        _stages_table(plan),
        _work_table(plan),
        *decision_tables.decision_tables(plan),
        _placement_table(plan),
        _edges_table(plan),
        _tensor_parallel_table(plan),
        _loss_table(plan),
        fused_table(plan),
        _rerecorded_table(plan),
        _checks_table(plan),
        _notes_table(plan),
    ]
    return [t for t in found if t.rows]


def plan_summary(plan: Plan) -> list[tuple[str, str]]:
    """The headline facts."""
    step = plan.prediction.get("step_time_s")
    status, gap = plan.solver.get("status", "unknown"), plan.solver.get("gap")
    facts = [
        ("model", plan.model.path),
        (
            "ranks",
            f"{plan.world_size} on {plan.cluster.get('text') or plan.cluster.get('name') or plan.cluster.get('kind', 'this machine')}",
        ),
        ("global batch", f"{plan.global_batch} samples"),
        (
            "predicted step",
            f"{float(step):.4g} s{_evaluated_plans_text(plan)}" if step is not None else "not predicted",
        ),
        *_simulated_facts(plan),
        ("allocation", f"{status}" + (f", gap {float(gap):.2%}" if gap is not None else "")),
        ("widths", _widths_text(plan)),
        ("hash", plan.hash[:16]),
    ]
    if plan.run_ahead_gib:
        names = ", ".join(
            dict.fromkeys(s.user_section_name for s in find_prefetchable_sections(plan, SectionGraph(plan)))
        )
        facts.insert(
            -1,
            (
                "ahead of the step",
                f"{names}: a rank keeps up to {plan.run_ahead_gib:.3g} GiB of results for the next one",
            ),
        )
    if plan.dtype:
        facts.insert(
            -1,
            (
                "precision",
                f"modules compute in {plan.dtype}; masters, gradient sums and optimizer in float32",
            ),
        )
    return facts


def _evaluated_plans_text(plan: Plan) -> str:
    """What the order made of the step when the plan was chosen."""
    simulated, tried = plan.solver.get("simulated_s"), plan.solver.get("tried", 1)
    others = f", the shortest of {tried} plans tried" if tried > 1 else ""
    return (
        f" by closed forms, {float(simulated):.4g} s in the order that ranks run{others}"
        if simulated is not None
        else ""
    )


def _widths_text(plan: Plan) -> str:
    if plan.widths == "own":
        return "each micro-batch has its own: padding was shown not to reach the loss"
    return "every micro-batch is padded to the global batch's: padding reaches the loss, or could not be shown not to"


def _sections_table(plan: Plan) -> TextTable:
    def row(s: Section) -> tuple[str, ...]:
        active = "samples with " + " or ".join(s.when) if s.when else "every sample"
        layout = f"dp {s.mesh.dp}, pp {s.mesh.pp}, tp {s.mesh.tp}"
        return (
            s.name,
            s.mode,
            active,
            _section_ranks_text(plan, s),
            layout,
            str(s.micro_batch),
            s.recompute,
            s.sharding,
            blocks_text(s.blocks),
        )

    columns = (
        "section",
        "mode",
        "active for",
        "ranks",
        "layout",
        "micro-batch",
        "recompute",
        "sharding",
        "blocks",
    )
    return TextTable(
        "Sections",
        columns,
        tuple(row(s) for s in plan.user_sections),
        "Sections on the same ranks share their time and memory.",
    )


def _simulated_facts(plan: Plan) -> list[tuple[str, str]]:
    """What a simulated step says beside its bounds (`secc.driver.step_preview`)."""
    found: dict[str, Any] = plan.prediction.get("simulated", {})
    if not found:
        return []
    step, bound = float(found["step_time_s"]), float(found["schedule_bound_s"])
    over = (
        f", {step / bound:.3f} of the least that any order can take ({found['bound_reason']})"
        if bound
        else ""
    )
    return [
        (
            "simulated step",
            f"{step:.4g} s{over}; {found['plan_bound_s']:.4g} s if all work were spread evenly",
        )
    ]


def _section_ranks_text(plan: Plan, section: Section) -> str:
    """Ranks, with the kind of their devices where the cluster has several."""
    cluster = Cluster.from_dict(plan.cluster)
    kind = (
        f" ({cluster.view_of_ranks(section.mesh.ranks).device.kind})"
        if cluster is not None and cluster.groups
        else ""
    )
    return ranks_text(section.mesh.ranks) + kind


def _stages_table(plan: Plan) -> TextTable:
    def row(s: Section) -> tuple[str, ...]:
        held = "any" if s.mode == "forward" or not s.in_flight else str(s.in_flight)
        return (
            s.name,
            s.mode,
            ranks_text(s.mesh.ranks),
            _weights_text(plan, s),
            f"{s.memory_gib:.3g}",
            held,
            blocks_text(s.blocks),
        )

    columns = ("stage", "mode", "ranks", "weights", "GiB a rank", "in flight", "blocks")
    note = "Sections that run as pipelines; in flight: how many micro-batches a stage may hold between forward and backward."
    return TextTable("Stages", columns, tuple(row(s) for s in plan.sections if s.pipeline), note)


def _weights_text(plan: Plan, section: Section) -> str:
    """How many numbers the section's parameters hold, before they are shared between ranks."""
    table = plan.model.parameters
    shapes = (table[name].partition("[")[2].partition("]")[0] for name in section.params if name in table)
    return count_text(sum(math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes))


def _work_table(plan: Plan) -> TextTable:
    shares: dict[str, Any] = plan.prediction.get("sections", {})
    simulated = all("busy" in shares.get(s.name, {}) for s in plan.user_sections)

    def row(s: Section) -> tuple[str, ...]:
        busy = (f"{float(shares[s.name]['busy']):.0%}",) if simulated else ()
        return (
            s.name,
            MODE_DESCRIPTIONS.get(s.mode, s.mode),
            _weights_text(plan, s),
            f"{s.memory_gib:.3g}",
            *busy,
            s.cost.label,
        )

    columns = ("section", "owes", "weights", "GiB a rank", *(("busy",) if simulated else ()), "costs are")
    return TextTable(
        "Work and memory",
        columns,
        tuple(row(s) for s in plan.user_sections),
        "Predictions rest on costs of the kind in the last column.",
    )


def _placement_table(plan: Plan) -> TextTable:
    """What `place` reached, beside ranks that are counted out section by section."""
    placed: dict[str, Any] = plan.prediction.get("placement", {})
    row: dict[str, Any] = placed.get("in_a_row", {})
    lines = [(what, show(placed[key]), show(row[key])) for key, what, show in PLACEMENT_ROWS if row]
    note = "Gradients are summed behind the last backward; the busiest device sums them and sends or receives its bytes, nothing hidden."
    return TextTable("Placement on nodes", ("of a step", "as placed", "ranks in a row"), tuple(lines), note)


def _edges_table(plan: Plan) -> TextTable:
    def row(e: Edge) -> tuple[str, ...]:
        shape = f"{e.dtype}[{', '.join(e.dims)}]"
        return (
            e.name,
            f"{e.src} → {e.dst}",
            shape,
            f"{e.rows} rows a sample" if e.rows else "whole",
            bytes_text(e.bytes_per_sample),
            "both ways" if e.grad else "forward",
        )

    columns = ("edge", "from → to", "tensor of a micro-batch", "carried as", "bytes a sample", "direction")
    return TextTable(
        "Edges",
        columns,
        tuple(row(e) for e in plan.edges),
        "What travels between sections, in the mean over the dataset's patterns.",
    )


def _loss_table(plan: Plan) -> TextTable:
    rows = tuple((t.name, t.section, t.coefficient, t.where) for t in plan.terms if not t.logged_scalar)
    note = "The loss is the sum of coefficient × numerator; numerators add up over samples, coefficients belong to the whole global batch."
    return TextTable("Loss", ("term", "section", "coefficient", "at"), rows, note)


def fused_table(plan: Plan) -> TextTable:
    """What fused operators took the place of."""
    rows = tuple((f.rule, f.what, f.where) for f in plan.fusions if not f.why)
    return TextTable(
        "Fused",
        ("rule", "in place of", "at"),
        rows,
        "One operator in place of several of yours; docs/fusion.md has the rules.",
    )


def unfused_table(plan: Plan) -> TextTable:
    """What fusion rules looked at and left as it is."""
    rows = tuple((f.rule, f.what, f.where, f.why) for f in plan.fusions if f.why)
    return TextTable("Not fused", ("rule", "looked at", "at", "why not"), rows)


def _rerecorded_table(plan: Plan) -> TextTable:
    """The cases whose glue is recorded anew."""

    def row(case: RerecordedCase) -> tuple[str, ...]:
        tensors = sum(n["kind"][0] == "recorded" for n in case.nodes)
        taken = "where no compiled case fits" if case.spare else "always"
        return (", ".join(case.when) or "no optional inputs", taken, str(tensors), case.why, case.where)

    note = "Recorded for each micro-batch ahead of its step, where it is loaded; see a run's metrics (recorded, recording_s, exposed_s)."
    return TextTable(
        "Glue recorded anew",
        ("pattern", "taken", "tensors", "why", "where"),
        tuple(map(row, plan.recorded)),
        note,
    )


def _checks_table(plan: Plan) -> TextTable:
    rows = tuple(
        (
            ", ".join(c["pattern"]) or "no optional inputs", str(c["samples"]), "exact" if c["exact"] else "NOT EXACT",
            f"{float(c['loss_error']):.2g}", f"{float(c['gradient_error']):.2g}", str(c["worst_gradient"]),
        )
        for c in plan.checks.get("patterns", ())
    )  # fmt: skip
    note = "Against the eager model; errors in units of the tolerance (1 is the limit)."
    return TextTable(
        "Checks",
        ("pattern", "samples", "result", "loss error", "gradient error", "worst gradient"),
        rows,
        note,
    )


def _tensor_parallel_table(plan: Plan) -> TextTable:
    note = "Of what is cut each rank of a replica has a part; * stands for alike modules. What is whole, every rank computes."
    return TextTable(
        "Tensor parallelism",
        ("section", "modules", "number", "how"),
        tensor_parallel_rows.tensor_parallel_rows(plan),
        note,
    )


def _notes_table(plan: Plan) -> TextTable:
    notes: Sequence[str] = (
        *plan.checks.get("accepted", ()),
        *plan.checks.get("logged", ()),
        *plan.checks.get("notes", ()),
    )
    return TextTable("Notes", ("why",), tuple((n,) for n in notes))


PLACEMENT_ROWS = (
    ("bytes_between_nodes", "bytes between nodes", bytes_text),
    ("bytes_inside_nodes", "bytes inside nodes", bytes_text),
    ("gradient_sums_s", "longest sums of gradients", seconds_text),
    ("communication_s", "busiest device's communication", seconds_text),
)
