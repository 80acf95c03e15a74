"""What the time and the memory of a candidate consist of: the sums of `secc.alloc.problem.candidates`, part
by part, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil

from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem.candidates import (
    Load,
    Workload,
    bubbles_ns,
    busy_ns,
    in_turn,
    kept_alone,
    replica_of,
    room_of,
    update_ns,
)
from secc.alloc.problem.types import Candidate
from secc.cluster import Overheads
from secc.cost.model import roofline, tp_pp_scaling
from secc.cost.model.default_estimate import entries
from secc.cost.model.patterns_and_transfers import micro_batch
from secc.cost.model.recompute_cost import Again
from secc.cost.model.section_cost import SectionCost, ops_in
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp
from secc.ir.dialect.tensor_type import tensor
from secc.runtime.plan.expr_eval import evaluate

PRODUCTS, BYTES, ISSUE, MEASURED = (
    "products and attention",
    "memory traffic",
    "issuing operations",
    "measured blocks",
)
OVERHEADS = "between computations"
TP_SUMS, GRADIENTS, OPTIMIZER, BUBBLES = (
    "sums over tp",
    "sums of gradients",
    "optimizer",
    "filling and draining stages",
)
GATHERS = "gathering weights that nothing hides, waits for other replicas"
_NONE = {
    "ops": 0,
    "work": "0",
    "backward_work": "0",
    "glue_bytes": "0",
    "forward_ns": "0",
    "backward_ns": "0",
}
_KEPT = {
    PRODUCTS: (("work", "backward_work"), ("work",)),
    BYTES: (("glue_bytes",), ("moved",)),
    ISSUE: (("ops",), ("ops",)),
    MEASURED: (("forward_ns", "backward_ns"), ()),
}  # of a cost, and of what runs again


def time_parts(work: Workload, load: Load, c: Candidate) -> dict[str, int]:
    """Nanoseconds of a candidate's busiest rank in a step by what takes them, the largest part first."""
    rank = replica_of(work, load, c.tp, c.pp, c.ranks)
    found = {
        name: _of_step(work, rank, c, *_texts(work, rank, _only(rank.cost, *kept), c))
        for name, kept in _KEPT.items()
    }
    job = str(work.cluster.device.overheads.job)
    found[OVERHEADS] = _of_step(work, rank, c, job, job if load.mode != "forward" else "0")
    sums = tp_pp_scaling.sums_ns(rank.cost, c.tp, work.cluster)
    found[TP_SUMS] = _of_step(work, rank, c, sums, sums if load.mode != "forward" else "0")
    shards = c.dp if c.sharding != "none" else 1
    found[OPTIMIZER] = (
        roofline.optimizer_ns(rank.cost, work.cluster.device, shards) if load.mode == "train" else 0
    )
    found[GRADIENTS] = update_ns(work, rank, c.dp, c.sharding) - found[OPTIMIZER]
    found[BUBBLES] = bubbles_ns(
        rank, c.micro_batch, busy_ns(work, rank, c.dp, c.micro_batch, c.sharding, c.recompute)
    )
    found[GATHERS if c.sharding == "zero3" else "other"] = c.time_ns - sum(found.values())
    return {
        name: ns for name, ns in sorted(found.items(), key=lambda part: -part[1]) if ns > c.time_ns // 1000
    }


def _only(cost: SectionCost, kept: tuple[str, ...], again: tuple[str, ...]) -> SectionCost:
    """A cost without anything but some of what takes time."""
    none = {name: value for name, value in _NONE.items() if name not in kept}
    return replace(cost, **none, again={way: _only_again(a, again) for way, a in cost.again.items()})


def _only_again(way: Again, kept: tuple[str, ...]) -> Again:
    return replace(
        way,
        **{name: value for name, value in {"ops": 0, "work": "0", "moved": "0"}.items() if name not in kept},
    )


def _texts(work: Workload, load: Load, cost: SectionCost, c: Candidate) -> tuple[str, str]:
    device = replace(work.cluster.device, overheads=Overheads())
    return roofline.forward_ns(cost, device), roofline.backward_ns(cost, load.mode, device, c.recompute)


def _of_step(work: Workload, load: Load, c: Candidate, forward: str, backward: str) -> int:
    """What the busiest replica's micro-batches take together."""
    busiest, total = Fraction(-(-work.samples(load) // c.dp)), Fraction(0)
    for pattern in load.active:
        samples = busiest * pattern.share / load.share
        alike = min(c.micro_batch, ceil(samples))
        sizes = micro_batch(work.graph, pattern.sizes, alike)
        total += (
            samples
            / alike
            * load.spread.mean(pattern.when, evaluate(forward, sizes) + evaluate(backward, sizes))
        )
    return ceil(total)


def memory_parts(work: Workload, load: Load, c: Candidate, ahead: bool, messages: int = 0) -> dict[str, int]:
    """Bytes of a candidate on a rank by what takes them; `ahead` where all forwards come first, with
    `messages` bytes on their way."""
    rank = replica_of(work, load, c.tp, c.pp, c.ranks)
    found = room_of(work, rank, c)
    count = c.in_flight if ahead and c.in_flight else in_turn(work, rank, c.micro_batches)
    of = f"{count} micro-batch{'es' if count != 1 else ''}"
    if found.largest > count * found.activation:
        of = f"the largest sample ({largest_sample(work, rank, c.recompute)})"
    parts = {
        "weights": found.parameters,
        "gradients": found.beside(count),
        "optimizer states": found.optimizer,
        "gathered layers, gradients on their way": found.buffers,
        f"activations of {of}": found.kept(count),
        "tensors within a forward"
        if load.mode == "forward"
        else "gradients of an operation, or recomputing a layer": found.working,
        "messages": messages,
    }
    return {name: size for name, size in parts.items() if size}


def largest_sample(work: Workload, load: Load, recompute: str) -> str:
    """The sizes of the listed sample that keeps most, as text; `load` is that of a rank."""
    every = [
        (size, columns, i)
        for columns, kept in kept_alone(work, load, recompute)
        for i, size in enumerate(kept)
    ]
    _, columns, i = max(every, key=lambda found: found[0])
    return ", ".join(f"{name}={column[i]}" for name, column in columns.items() if column[i] and name != "B")


def largest_tensor(work: Workload, load: Load, c: Candidate) -> tuple[str, int]:
    """The largest tensor between blocks of a micro-batch (logits, in a language model): as text with its
    place, and bytes on a replica."""
    name, best = load.name, ("", 0)
    for pattern in load.active:
        sizes = micro_batch(work.graph, pattern.sizes, c.micro_batch)
        for case in work.graph.cases:
            for op in ops_in(case, name):
                for result in op.results:
                    kind = tensor(result)
                    size = _bytes(size_expr.text(entries(kind) * kind.itemsize), sizes)
                    if size > best[1]:
                        where = op.target.data if isinstance(op, CallOp) else _place(op)
                        best = (
                            f"{kind.dtype.data}[{', '.join(map(size_expr.text, kind.shape))}] of {where}",
                            size,
                        )
    return best


def _bytes(size: str, sizes: Mapping[str, int]) -> int:
    """0 where the inputs' values decide the size."""
    try:
        return evaluate(size, sizes)
    except (KeyError, ValueError):
        return 0


def _place(op: object) -> str:
    properties = getattr(op, "properties", {})
    where, target = properties.get("where"), properties.get("target")
    return (
        where.data
        if isinstance(where, StringAttr) and where.data
        else target.data
        if isinstance(target, StringAttr)
        else "glue"
    )
