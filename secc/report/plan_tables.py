"""Everything there is to say about a plan, as tables of text for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from secc.cluster import Cluster
from secc.report import decision_tables, tensor_parallel_rows
from secc.report.expected_error import expected_error_text
from secc.report.text_table import (
    MAX_RANKS_WIDTH,
    TextTable,
    amount_text,
    blocks_text,
    bytes_text,
    count_text,
    join_parts_of_layers,
    ranks_text,
    seconds_text,
)
from secc.runtime.plan.sample_predicates import describe_pattern, describe_predicate
from secc.runtime.plan.schema import Edge, Plan, RerecordedCase, Section, is_statistic
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import owes_backward
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections

_OF_WHOLE_BATCH = "no part of the loss: computed of the global batch first, and read by other terms"
LEAST_SPREAD = 0.05  # of the steps of drawn batches, over the shortest, for them to be shown


def plan_tables(plan: Plan) -> list[TextTable]:
    """All decisions and predictions of a plan, with reasons where there are any."""
    tables = [
        _sections_table(plan),
        _ranks_table(plan),
        _blocks_table(plan),
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
    return [t for t in tables if t.rows]


def plan_summary(plan: Plan) -> list[tuple[str, str]]:
    """The headline facts of a plan, as (name, value)."""
    cluster = plan.cluster.get("text") or plan.cluster.get("name") or plan.cluster.get("kind", "this machine")
    facts = [
        ("model", plan.model.path),
        (
            "ranks",
            f"{plan.world_size} on {cluster}",
        ),
        ("global batch", f"{plan.global_batch} samples"),
        ("predicted step", _predicted_step_text(plan)),
        ("expected error", expected_error_text(plan)),
        ("allocation", _allocation_text(plan)),
        ("widths", _widths_text(plan)),
        ("hash", plan.hash[:16]),
    ]
    if text := _dynamic_cp_text(plan):
        facts.insert(-2, ("dynamic cp", text))
    if text := batch_steps_text(plan):
        facts.insert(4, ("steps of batches", text))
    if text := _limits_text(plan, "micro_batches", " (its replicas wait for each other)"):
        facts.insert(-2, ("larger micro-batches", text))
    if text := _limits_text(plan, "sample_limits"):
        facts.insert(-2, ("more short samples in a micro-batch", text))
    if text := _interleaving_text(plan):
        facts.insert(-2, ("stages", text))
    if plan.run_ahead_gib:
        sections = find_prefetchable_sections(plan, SectionGraph(plan))
        names = ", ".join(dict.fromkeys(s.user_section_name for s in sections))
        limit = f"a rank keeps up to {plan.run_ahead_gib:.3g} GiB of results for the next step"
        facts.insert(-1, ("prefetch", f"{names}: {limit}"))
    if plan.dtype:
        precision = f"modules compute in {plan.dtype}; master weights, gradient sums and optimizer in float32"
        facts.insert(-1, ("precision", precision))
    return facts


def _predicted_step_text(plan: Plan) -> str:
    """The predicted step, its ratio to the lower bound, and how many plans it was chosen from."""
    seconds, tried = plan.predicted_step_s, plan.solver.get("tried", 1)
    if seconds is None:
        return "not predicted"
    others = f", the shortest of {tried} evaluated plans" if tried > 1 else ""
    simulated: dict[str, Any] = plan.prediction.get("simulated", {})
    if not simulated or not (bound := float(simulated["schedule_bound_s"])):
        return f"{seconds:.4g} s{others}"
    return (
        f"{seconds:.4g} s{others}; {seconds / bound:.3f} of the lower bound for any schedule"
        f" ({simulated['bound_reason']}); {simulated['plan_bound_s']:.4g} s for any plan of these layouts"
        f"{_least_step_text(plan)}"
    )


def batch_steps_text(plan: Plan) -> str:
    """The mean and the range of the steps over the batches of the search, where the batch decides how long a
    step is; "" elsewhere."""
    steps = plan.solver.get("batch_steps_s", ())
    if not steps or max(steps) - min(steps) <= LEAST_SPREAD * min(steps):
        return ""
    return (
        f"{sum(steps) / len(steps):.4g} s on average over {len(steps)} drawn batches,"
        f" {min(steps):.4g} to {max(steps):.4g} s"
    )


def _least_step_text(plan: Plan) -> str:
    """How far the search's step is from the least that any plan takes, on the batches of the search."""
    least, searched = plan.solver.get("least_step_s", 0.0), plan.solver.get("simulated_s", 0.0)
    if not least or not searched:
        return ""
    return (
        f"; no plan on these ranks, with any layouts, takes less than {least:.4g} s on the samples of the"
        f" search, where this one takes {searched:.4g} s ({searched / least:.3f} of it)"
    )


def _allocation_text(plan: Plan) -> str:
    """What the solver has proven, and what that leaves out: it is not a statement about the predicted
    step."""
    status, gap = plan.solver.get("status", "unknown"), plan.solver.get("gap")
    if gap is None:
        return str(status)
    text = f"{status}, gap {float(gap):.2%}"
    if (closed := plan.solver.get("closed_form_s")) is None:
        return text
    return (
        f"{text} among closed forms, which give this plan {float(closed):.4g} s and leave out the order of"
        " micro-batches, waits between sections and how uneven samples are; the predicted step has them"
    )


_CP_WAYS = {
    "section": "all ranks of cp for each sample",
    "one_or_all": "one rank or all for a sample",
    "any": "any divisor of cp for a sample",
}


_LAYER_PIECES = {
    "one": "one piece of layers on a rank",
    "loop": "two in a loop",
    "v": "two in a V",
    "split": "one piece and a split backward",
}


def _dynamic_cp_text(plan: Plan) -> str:
    """The scheduled steps that say how samples are dealt to ranks of cp, "" where nothing was compared."""
    compared: dict[str, Any] = plan.solver.get("dynamic_cp", {})
    texts = [
        f"{section}: {', '.join(f'{seconds:.4g} s with {_CP_WAYS[way]}' for way, seconds in ways.items())}"
        for section, ways in compared.get("sections", {}).items()
    ]
    if steps := compared.get("step_s"):
        priced = ", ".join(f"{seconds:.4g} s with samples {how}" for how, seconds in steps.items())
        texts.append(f"best plan {priced}")
    return "; ".join([*texts, *_dropped_texts(compared.get("dropped", {}), _CP_WAYS)])


def _dropped_texts(dropped: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> Iterator[str]:
    """Yields for each section the ways that were dropped on the first batch, with what they take there."""
    for section, ways in dropped.items():
        texts = (
            f"{names[way]} {f'{ratio - 1:.0%} longer' if ratio else 'too much memory'}"
            for way, ratio in ways.items()
        )
        yield f"{section}, dropped on the first batch: {', '.join(texts)}"


def _limits_text(plan: Plan, table: str, why: str = "") -> str:
    """The sections that got larger micro-batches, which make the scheduled step shorter, with the steps; ""
    where none did. `why`: what is said of such sections."""
    compared: dict[str, dict[str, float]] = plan.solver.get(table, {})
    return "; ".join(
        f"{section}{why}: "
        + ", ".join(
            f"{seconds:.4g} s with up to {amount_text(int(size), 'sample')}"
            for size, seconds in by_size.items()
        )
        for section, by_size in compared.items()
    )


def _interleaving_text(plan: Plan) -> str:
    """The scheduled steps that say how many pieces of layers a rank holds, "" where nothing was compared."""
    compared: dict[str, dict[str, float]] = plan.solver.get("interleaved", {})
    steps = {
        section: [f"{seconds:.4g} s with {_LAYER_PIECES[way]}" for way, seconds in ways.items()]
        for section, ways in compared.items()
    }
    compared_texts = [f"{section}: {', '.join(texts)}" for section, texts in steps.items()]
    dropped = plan.solver.get("dropped", {})
    return "; ".join([*compared_texts, *_dropped_texts(dropped, _LAYER_PIECES)])


def _widths_text(plan: Plan) -> str:
    widths = "each micro-batch is padded to its own width"
    if plan.widths != "own":
        widths = "every micro-batch is padded to the width of the global batch"
    reasons = [str(plan.checks[key]) for key in ("widths", "widths_price") if key in plan.checks]
    return f"{widths}: {'; '.join(reasons)}" if reasons else widths


def micro_batch_text(section: Section) -> str:
    """The most samples of a micro-batch, or the most tokens of one of several samples."""
    if section.whole_batch:
        return "all of a step"
    tokens = section.micro_batch_tokens
    return f"up to {tokens:,} tokens" if tokens else str(section.micro_batch)


def offload_text(section: Section) -> str:
    """What a section keeps in host memory."""
    what = "optimizer states" if section.offload == "optimizer" else section.offload
    return f"{what} in host memory ({section.host_gib:.3g} GiB a rank)"


def chunks_text(section: Section) -> str:
    """How many chunks of layers each rank of a pipeline has, and how they lie on the ranks."""
    return f"{section.chunks} chunks in a {section.placement}"


def overlap_text(section: Section) -> str:
    """Which sums over tp travel behind products."""
    return "sums hidden" if section.overlap == "both" else "gradient sums hidden"


def _sections_table(plan: Plan) -> TextTable:
    def row(s: Section) -> tuple[str, ...]:
        active = describe_predicate(s.when)
        degrees = ((kind, getattr(s.mesh, kind)) for kind in ("dp", "pp", "tp", "cp", "ep"))
        layout = ", ".join(f"{kind} {n}" for kind, n in degrees if n > 1) or "one rank"
        layout += f", {chunks_text(s)}" if s.chunks > 1 else ""
        layout += ", split backward" if s.weight_permille else ""
        layout += " per micro-batch" if s.may_deal else ""
        layout += f" ({s.row_attention})" if s.row_attention != "gather" else ""
        layout += ", norms on parts of the sequence" if s.norms == "sequence" else ""
        layout += f", {overlap_text(s)}" if s.overlap != "none" else ""
        layout += f", {offload_text(s)}" if s.offload != "none" else ""
        return (
            s.name,
            s.mode,
            active,
            _section_ranks_text(plan, s),
            layout,
            micro_batch_text(s),
            s.recompute,
            s.sharding,
        )

    columns = ("section", "mode", "active for", "ranks", "layout", "micro-batch", "recompute", "sharding")
    return TextTable(
        "Sections",
        columns,
        tuple(row(s) for s in plan.user_sections),
        "Sections on the same ranks share their time and memory.",
    )


def _section_ranks_text(plan: Plan, section: Section) -> str:
    """Ranks, with the kind of their devices in a cluster of several kinds."""
    cluster = Cluster.from_dict(plan.cluster)
    kind = (
        f" ({cluster.view_of_ranks(section.mesh.ranks).device.kind})"
        if cluster is not None and cluster.groups
        else ""
    )
    text = ranks_text(section.mesh.ranks)
    return (text if len(text) <= MAX_RANKS_WIDTH else f"{len(section.mesh.ranks)}, see Ranks") + kind


def _ranks_table(plan: Plan) -> TextTable:
    """The ranks of sections that have too many ranges of them for a column."""
    found = [(s.name, str(len(s.mesh.ranks)), ranks_text(s.mesh.ranks)) for s in plan.user_sections]
    rows = tuple(row for row in found if len(row[2]) > MAX_RANKS_WIDTH)
    return TextTable("Ranks", ("section", "number", "ranks"), rows)


def _blocks_table(plan: Plan) -> TextTable:
    rows = tuple(
        (s.name, blocks_text(join_parts_of_layers(s.blocks))) for s in plan.user_sections if s.blocks
    )
    return TextTable("Blocks", ("section", "blocks"), rows, "Modules that a section calls as a whole.")


def _stages_table(plan: Plan) -> TextTable:
    def row(s: Section) -> tuple[str, ...]:
        others = [path for other in plan.sections if other is not s for path in other.blocks]
        in_flight = "any" if s.mode == "forward" or not s.in_flight else str(s.in_flight)
        return (
            s.name,
            s.mode,
            ranks_text(s.mesh.ranks),
            weights_text(plan, s),
            f"{s.memory_gib:.3g}",
            in_flight,
            blocks_text(join_parts_of_layers(s.blocks, others)),
        )

    columns = ("stage", "mode", "ranks", "weights", "GiB per rank", "in flight", "blocks")
    note = (
        "Sections that run as pipelines; in flight: micro-batches that a stage may hold "
        "between forward and backward."
    )
    return TextTable("Stages", columns, tuple(row(s) for s in plan.sections if s.pipeline), note)


def weights_text(plan: Plan, section: Section) -> str:
    """Number of weights of a section, before they are divided between ranks."""
    table = plan.model.parameters
    shapes = (table[name].partition("[")[2].partition("]")[0] for name in section.params if name in table)
    return count_text(sum(math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes))


def describe_work(plan: Plan, section: Section) -> str:
    """Says which passes a section computes, and why not all."""
    if section.mode == "train":
        return "forward, and backward to weights and inputs"
    if section.mode == "dgrad":
        return "forward, and backward to inputs only: frozen weights, trainable part upstream"
    trains = any(plan.model.parameters.get(name, "").endswith(" train") for name in section.params)
    graph = SectionGraph(plan)
    upstream = set[str]().union(*(graph.ancestors[stage.name] for stage in plan.pipelines[section.name]))
    if trains or any(owes_backward(s) for s in plan.sections if s.name in upstream):
        return "forward only: the model stops gradients here (no_grad, detach), or the loss reads none of it"
    return "forward only: nothing trainable in it or upstream"


def _work_table(plan: Plan) -> TextTable:
    shares: dict[str, Any] = plan.prediction.get("sections", {})
    simulated = all("busy" in shares.get(s.name, {}) for s in plan.user_sections)

    def row(s: Section) -> tuple[str, ...]:
        busy = (f"{float(shares[s.name]['busy']):.0%}",) if simulated else ()
        return (
            s.name,
            describe_work(plan, s),
            weights_text(plan, s),
            f"{s.memory_gib:.3g}",
            *busy,
            s.cost.label,
        )

    columns = (
        "section",
        "computes",
        "weights",
        "GiB per rank",
        *(("busy",) if simulated else ()),
        "costs based on",
    )
    return TextTable(
        "Work and memory",
        columns,
        tuple(row(s) for s in plan.user_sections),
        "Predictions are computed from costs of the kind in the last column.",
    )


def _placement_table(plan: Plan) -> TextTable:
    """Figures of the placement on nodes, compared with sections on consecutive ranks."""
    placed: dict[str, Any] = plan.prediction.get("placement", {})
    consecutive: dict[str, Any] = placed.get("in_a_row", {})
    rows = [
        (name, show(placed[key]), show(consecutive[key])) for key, name, show in PLACEMENT_ROWS if consecutive
    ]
    note = (
        "Communication of the busiest device: gradient sums after the last backward, and "
        "its messages, without any overlap."
    )
    return TextTable(
        "Placement on nodes", ("per step", "as placed", "on consecutive ranks"), tuple(rows), note
    )


def _padding_text(edge: Edge) -> str:
    numbers = [f"{n:g}" for n in (edge.fills if len(set(edge.fills)) > 1 else edge.fills[:1])]
    return f", padded with {' and '.join(numbers)}" if numbers else ""


def _edges_table(plan: Plan) -> TextTable:
    def row(e: Edge) -> tuple[str, ...]:
        shape = f"{e.dtype}[{', '.join(e.dims)}]"
        return (
            e.name,
            f"{e.src} → {e.dst}",
            shape,
            (f"{e.rows} rows per sample" if e.rows else "whole") + _padding_text(e),
            bytes_text(e.bytes_per_sample),
            "both ways" if e.grad else "forward",
        )

    columns = ("edge", "from → to", "tensor of a micro-batch", "sent as", "bytes per sample", "direction")
    return TextTable(
        "Edges",
        columns,
        tuple(row(e) for e in plan.edges),
        "Tensors sent between sections; means over the input patterns of the dataset.",
    )


def _loss_table(plan: Plan) -> TextTable:
    rows = tuple(
        (t.name, t.section, _OF_WHOLE_BATCH if is_statistic(t.name) else t.coefficient, t.where)
        for t in plan.terms
        if not t.logged_scalar
    )
    note = (
        "The loss is the sum of coefficient × numerator. Numerators add up over samples; "
        "coefficients are computed for the "
        "global batch."
    )
    return TextTable("Loss", ("term", "section", "coefficient", "at"), rows, note)


def fused_table(plan: Plan) -> TextTable:
    """Operations that were replaced by fused operators."""
    rows = tuple((f.rule, f.what, f.where) for f in plan.fusions if not f.why)
    return TextTable(
        "Fused",
        ("rule", "replaces", "at"),
        rows,
        "One operator replaces several of the model; docs/fusion.md describes the rules.",
    )


def unfused_table(plan: Plan) -> TextTable:
    """Operations that fusion rules matched and left as they are, with the reason."""
    rows = tuple((f.rule, f.what, f.where, f.why) for f in plan.fusions if f.why)
    return TextTable("Not fused", ("rule", "matched", "at", "why not"), rows)


def _rerecorded_table(plan: Plan) -> TextTable:
    """The cases with glue that ranks re-record for each micro-batch."""

    def row(case: RerecordedCase) -> tuple[str, ...]:
        tensors = sum(n["kind"][0] == "recorded" for n in case.nodes)
        used = "if no compiled case fits" if case.spare else "always"
        return (describe_pattern(case.when), used, str(tensors), case.why, case.where)

    note = (
        "Recorded for each micro-batch before its step, on the rank that loads it; see a "
        "run's metrics (recorded, recording_s, "
        "exposed_s)."
    )
    return TextTable(
        "Re-recorded glue",
        ("pattern", "used", "tensors", "why", "where"),
        tuple(map(row, plan.recorded)),
        note,
    )


def _checks_table(plan: Plan) -> TextTable:
    rows = tuple(
        (
            describe_pattern(c["pattern"]),
            str(c["samples"]),
            "exact" if c["exact"] else "NOT EXACT",
            f"{float(c['loss_error']):.2g}",
            f"{float(c['gradient_error']):.2g}",
            str(c["worst_gradient"]),
        )
        for c in plan.checks.get("patterns", ())
    )
    note = "Compared with the eager model; errors are multiples of the tolerance, so 1 is the limit."
    for text in dict.fromkeys(c["tolerances"] for c in plan.checks.get("patterns", ()) if "tolerances" in c):
        note += f" Tolerances of {text}."
    return TextTable(
        "Checks",
        ("pattern", "samples", "result", "loss error", "gradient error", "worst gradient"),
        rows,
        note,
    )


def _tensor_parallel_table(plan: Plan) -> TextTable:
    note = (
        "Split modules have a part on each rank of a replica, whole ones are replicated; * "
        "stands for any number."
    )
    return TextTable(
        "Tensor parallelism",
        ("section", "modules", "number", "how"),
        tensor_parallel_rows.tensor_parallel_rows(plan),
        note,
    )


def taken_back_texts(plan: Plan) -> list[str]:
    """Returns a line for each choice that was taken back, with reason and place."""
    return [
        f"{r['choice']} taken back, because {r['reason']}" + (f" ({r['where']})" if r["where"] else "")
        for r in plan.checks.get("taken_back", ())
    ]


def _notes_table(plan: Plan) -> TextTable:
    notes: Sequence[str] = (
        *plan.checks.get("accepted", ()),
        *plan.checks.get("logged", ()),
        *plan.checks.get("notes", ()),
        *taken_back_texts(plan),
    )
    return TextTable("Notes", ("why",), tuple((n,) for n in notes))


PLACEMENT_ROWS = (
    ("bytes_between_nodes", "bytes between nodes", bytes_text),
    ("bytes_inside_nodes", "bytes inside nodes", bytes_text),
    ("gradient_sums_s", "longest gradient reduction", seconds_text),
    ("communication_s", "busiest device's communication", seconds_text),
)
