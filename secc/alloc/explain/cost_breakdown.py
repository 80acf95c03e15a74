"""Breaks the time and memory of a candidate down into the parts that `secc.alloc.problem` sums up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil

from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem.allowed_choices import require_rank_load
from secc.alloc.problem.candidate_memory import candidate_memory, sample_activation_bytes
from secc.alloc.problem.in_flight import in_flight_alternating
from secc.alloc.problem.micro_batch_times import busiest_replica_ns, pipeline_bubble_ns
from secc.alloc.problem.parameter_update import gradient_and_optimizer_ns
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import Workload
from secc.cluster import Overheads
from secc.cost.model import cp_scaling, roofline, tp_pp_scaling
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.default_estimate import count_entries
from secc.cost.model.expert_parallel_cost import cost_with_expert_parts, exchange_ns
from secc.cost.model.patterns_and_transfers import micro_batch_sizes
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS, RecomputeCost
from secc.cost.model.section_cost import SectionCost, ops_in_section
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.plan.expr_eval import evaluate_expr

PRODUCTS_PART = "products and attention"
MEMORY_TRAFFIC_PART = "memory traffic"
ISSUE_PART = "issuing operations"
MEASURED_PART = "measured blocks"
OVERHEADS_PART = "between computations"
TP_SUMS_PART = "sums over tp"
ROWS_PART = "keys and values over cp"
EXPERTS_PART = "products of experts"
EXCHANGE_PART = "tokens to experts and back"
GRADIENTS_PART = "sums of gradients"
OPTIMIZER_PART = "optimizer"
HOST_COPIES_PART = "copies from and to host memory"
BUBBLES_PART = "filling and draining stages"
GATHERS_PART = "gathering weights that nothing hides, waits for other replicas"
_ZERO_COSTS = {
    "ops": 0,
    "work": "0",
    "backward_work": "0",
    "routed_work": "0",
    "routed_backward_work": "0",
    "glue_bytes": "0",
    "forward_ns": "0",
    "backward_ns": "0",
}
# Fields of a `SectionCost` and of a `RecomputeCost` that make up each part.
_COST_FIELDS_BY_PART = {
    PRODUCTS_PART: (("work", "backward_work"), ("work",)),
    EXPERTS_PART: (("routed_work", "routed_backward_work"), ()),
    MEMORY_TRAFFIC_PART: (("glue_bytes",), ("moved",)),
    ISSUE_PART: (("ops",), ("ops",)),
    MEASURED_PART: (("forward_ns", "backward_ns"), ()),
}


def break_down_time(work: Workload, load: SectionLoad, c: Candidate, ahead: bool) -> dict[str, int]:
    """Ns of a candidate's busiest rank in a step by purpose, largest first; parts below a thousandth are
    left out. `ahead`: whether its stages run ahead of the step, so that they fill and drain once in a run.
    """
    rank = require_rank_load(work, load, c.shape, c.ranks)
    ns_by_part = {
        name: _evaluate_over_step(
            work, rank, c, *_time_expressions(work, rank, _restrict_cost(rank.cost, *kept), c)
        )
        for name, kept in _COST_FIELDS_BY_PART.items()
    }
    job = str(work.cluster.device.overheads.job)
    ns_by_part[OVERHEADS_PART] = _evaluate_over_step(
        work, rank, c, job, job if load.mode != "forward" else "0"
    )
    sums = tp_pp_scaling.price_tensor_sums(
        rank.cost, c.tp, work.cluster, rank.overlap, rank.mean_sizes, c.backward_parts > 1
    )
    ns_by_part[TP_SUMS_PART] = _evaluate_over_step(
        work, rank, c, sums.forward_ns, sums.backward_ns(c.recompute) if load.mode != "forward" else "0"
    )
    exchange = exchange_ns(rank.cost, c.tp * c.cp, c.ep, work.cluster)
    again = scale_expression(exchange, 1 + RECOMPUTED_LAYERS[c.recompute])
    ns_by_part[EXCHANGE_PART] = _evaluate_over_step(
        work, rank, c, exchange, again if load.mode != "forward" else "0"
    )
    whole_rows = cost_with_expert_parts(load.cost, c.tp, c.ep, rank.stages)
    rows = cp_scaling.price_row_exchange(whole_rows, c.tp, c.cp, work.cluster, rank.row_attention)
    ns_by_part[ROWS_PART] = _evaluate_over_step(
        work, rank, c, rows.forward_ns, rows.backward_ns(c.recompute) if load.mode != "forward" else "0"
    )
    shards = c.dp // rank.cost.expert_replicas if c.sharding != "none" else 1
    ns_by_part[OPTIMIZER_PART] = (
        roofline.optimizer_step_ns(rank.cost, work.cluster.device, shards) if load.mode == "train" else 0
    )
    on_device = work.rank_load(load, c.shape._replace(offload="none"))
    update_ns, update_on_device_ns = (
        gradient_and_optimizer_ns(work, held, c.dp, c.micro_batch, c.sharding, c.recompute)
        for held in (rank, on_device)
    )
    ns_by_part[GRADIENTS_PART] = update_on_device_ns - ns_by_part[OPTIMIZER_PART]
    ns_by_part[HOST_COPIES_PART] = update_ns - update_on_device_ns
    busy = busiest_replica_ns(work, rank, c.dp, c.micro_batch, c.sharding, c.recompute)
    ns_by_part[BUBBLES_PART] = 0 if ahead else pipeline_bubble_ns(rank, c.micro_batch, busy, c.recompute)
    total = c.busy_ns if ahead else c.time_ns
    in_rounds = c.sharding == "zero3" or rank.cost.expert_replicas > 1
    in_passes = c.offload in ("weights", "activations")
    rest = HOST_COPIES_PART if in_passes else GATHERS_PART if in_rounds else "other"
    ns_by_part[rest] = total - sum(ns_by_part.values())
    return {
        name: ns for name, ns in sorted(ns_by_part.items(), key=lambda part: -part[1]) if ns > total // 1000
    }


def _restrict_cost(cost: SectionCost, kept: tuple[str, ...], kept_recomputed: tuple[str, ...]) -> SectionCost:
    """Cost with only the fields in `kept`, and for recomputation those in `again`."""
    zeros = {name: value for name, value in _ZERO_COSTS.items() if name not in kept}
    return replace(
        cost,
        **zeros,
        recompute={mode: _restrict_recompute_cost(a, kept_recomputed) for mode, a in cost.recompute.items()},
    )


def _restrict_recompute_cost(way: RecomputeCost, kept: tuple[str, ...]) -> RecomputeCost:
    return replace(
        way,
        **{name: value for name, value in {"ops": 0, "work": "0", "moved": "0"}.items() if name not in kept},
    )


def _time_expressions(work: Workload, load: SectionLoad, cost: SectionCost, c: Candidate) -> tuple[str, str]:
    """(forward, backward) expressions of a cost, without overheads."""
    device = replace(work.cluster.device, overheads=Overheads())
    return roofline.forward_ns_expression(cost, device), roofline.backward_ns_expression(
        cost, load.mode, device, c.recompute
    )


def _evaluate_over_step(work: Workload, load: SectionLoad, c: Candidate, forward: str, backward: str) -> int:
    """Ns of all micro-batches of the busiest replica for expressions of one micro-batch."""
    busiest, total = Fraction(-(-work.active_sample_count(load) // c.dp)), Fraction(0)
    for pattern in load.active_patterns:
        samples = busiest * pattern.share / load.sample_share
        samples_each = min(c.micro_batch, ceil(samples))
        sizes = micro_batch_sizes(work.graph, pattern.sizes, samples_each)
        total += (
            samples
            / samples_each
            * load.spread.mean_ns(
                pattern.when, evaluate_expr(forward, sizes) + evaluate_expr(backward, sizes)
            )
        )
    return ceil(total)


def break_down_memory(
    work: Workload, load: SectionLoad, c: Candidate, ahead: bool, messages: int = 0
) -> dict[str, int]:
    """Bytes of a candidate on a rank by purpose.

    `ahead`: whether all forwards come before the first backward; `messages`: bytes of messages that the rank
    holds.
    """
    rank = require_rank_load(work, load, c.shape, c.ranks)
    memory = candidate_memory(work, rank, c)
    count = c.in_flight if ahead and c.in_flight else in_flight_alternating(work, rank, c.micro_batches)
    count_text = f"{count} micro-batch{'es' if count != 1 else ''}"
    if memory.largest_sample > count * memory.activation + memory.kept_between:
        count_text = f"the largest sample ({describe_largest_sample(work, rank, c.recompute)})"
    parts = {
        "weights": memory.parameters,
        "gradients": memory.extra_gradient_bytes(count),
        "optimizer states" if c.offload != "optimizer" else "optimizer states on their way": memory.optimizer,
        "layers on their way from host memory"
        if c.offload == "weights"
        else "gathered layers, gradients on their way": memory.buffers,
        f"activations of {count_text}": memory.activation_bytes(count),
        "tensors within a forward"
        if load.mode == "forward"
        else "layers' activations on their way, gradients of an operation"
        if c.offload == "activations"
        else "gradients of an operation, or recomputing a layer": memory.working,
        "messages": messages,
    }
    return {name: size for name, size in parts.items() if size}


def describe_largest_sample(work: Workload, load: SectionLoad, recompute: str) -> str:
    """Sizes of the listed sample that keeps most bytes, as text; `load` is that of a rank."""
    listed = [
        (size, columns, i)
        for columns, kept in sample_activation_bytes(work, load, recompute)
        for i, size in enumerate(kept)
    ]
    _, columns, i = max(listed, key=lambda found: found[0])
    return ", ".join(f"{name}={column[i]}" for name, column in columns.items() if column[i] and name != "B")


def find_largest_tensor(work: Workload, load: SectionLoad, c: Candidate) -> tuple[str, int]:
    """The largest tensor between blocks of a micro-batch (in language models the logits): (text with its
    location, bytes on a replica)."""
    name, best = load.name, ("", 0)
    for pattern in load.active_patterns:
        sizes = micro_batch_sizes(work.graph, pattern.sizes, c.micro_batch)
        for case in work.graph.cases:
            for op in ops_in_section(case, name):
                for result in op.results:
                    kind = tensor_type(result)
                    size = _evaluate_or_zero(
                        size_expr.format_expr(count_entries(kind) * kind.itemsize), sizes
                    )
                    if size > best[1]:
                        where = op.target.data if isinstance(op, CallOp) else _describe_op_location(op)
                        shape = ", ".join(map(size_expr.format_expr, kind.shape))
                        best = (f"{kind.dtype.data}[{shape}] of {where}", size)
    return best


def _evaluate_or_zero(size: str, sizes: Mapping[str, int]) -> int:
    """Value of a size expression; 0 if it depends on values of inputs."""
    try:
        return evaluate_expr(size, sizes)
    except (KeyError, ValueError):
        return 0


def _describe_op_location(op: object) -> str:
    properties = getattr(op, "properties", {})
    where, target = properties.get("where"), properties.get("target")
    return (
        where.data
        if isinstance(where, StringAttr) and where.data
        else target.data
        if isinstance(target, StringAttr)
        else "glue"
    )
