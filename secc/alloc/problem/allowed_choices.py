"""Says which choices a section has: shapes of replicas, sharding, recomputation, offload, split backwards.

`list_*` gives what is possible; `require_*` raises UserError, with the reason and a remedy, for what the user
pinned and the section cannot do.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from secc.alloc.problem.pins import PIN_WORDS, Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Candidate, ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.errors import UserError
from secc.ir.analysis.tp_layouts import expert_counts
from secc.ir.analysis.whole_batch import ALONE
from secc.runtime.plan.expr_eval import evaluate_expr


def require_rank_load(work: Workload, load: SectionLoad, shape: ReplicaShape, ranks: int) -> SectionLoad:
    """Returns the section's load on one rank of its replicas.

    Raises UserError for a shape that is impossible on `ranks` ranks or for this section.
    """
    tp, pp, cp, ep, *_ = shape
    if shape.ranks > ranks:
        rows = f" and cp={cp}" if cp > 1 else ""
        message = (
            f"{load.name}.tp={tp} with pp={pp}{rows} is impossible: "
            f"a replica would need {shape.ranks} ranks, and there are {ranks}"
        )
        raise UserError(message, remedy="set smaller ones, or give more ranks")
    if tp * ep > 1 and load.cost.trainable and work.unshardable:
        key = f"{load.name}.tp={tp}" if tp > 1 else f"{load.name}.ep={ep}"
        message = f"{key} is impossible: ranks would have parts of parameters, but {work.unshardable}"
        raise UserError(message, remedy=f"leave it out, or set {key.partition('=')[0]}=1")
    if pp > 1 and load.cost.trainable and work.coupled:
        message = (
            f"{load.name}.pp={pp} is impossible: ranks would have some of the parameters, but {work.coupled}"
        )
        raise UserError(message, remedy=f"leave it out, or set {load.name}.pp=1")
    layer_count = work.stackable_layers(load)
    if shape.chunks > 1 and (pp == 1 or shape.stages > layer_count):
        reason = f"the section has {layer_count} layers to cut between"
        reason += f", and {shape.stages} stages need one each" if pp > 1 else ""
        message = f"{load.name}.chunks={shape.chunks} with pp={pp} is impossible: {reason}"
        most = layer_count // pp
        remedy = f"set {load.name}.chunks to at most {most}" if most > 1 else f"leave out {load.name}.chunks"
        raise UserError(message, remedy=remedy)
    if pp > max(1, layer_count):
        message = f"{load.name}.pp={pp} is impossible: the section has {layer_count} layers to cut between"
        raise UserError(message, remedy=f"set {load.name}.pp to at most {max(1, layer_count)}")
    if ep > 1:
        _require_expert_parts(work, load, tp, ep)
    return work.rank_load(load, shape)


def _require_expert_parts(work: Workload, load: SectionLoad, tp: int, ep: int) -> None:
    """Raises UserError if the section's experts cannot form `ep` parts on replicas of `tp` ranks."""
    counts = expert_counts(work.graph, load.section)
    out = f"leave {load.name}.ep out"
    if not counts:
        raise UserError(f"{load.name}.ep={ep} is impossible: the section has no experts", remedy=out)
    common = gcd(*counts)
    if common % ep:
        possible = [n for n in range(2, common + 1) if common % n == 0]
        remedy = f"set {load.name}.ep to {' or '.join(map(str, possible))}" if possible else out
        counted = " and ".join(map(str, counts))
        raise UserError(
            f"{load.name}.ep={ep} is impossible: it does not divide {counted} experts", remedy=remedy
        )
    if tp % ep and ep % tp:
        message = (
            f"{load.name}.ep={ep} is impossible: it and the {tp} ranks (tp) of a replica are no multiples"
        )
        raise UserError(message, remedy=f"set {load.name}.tp to a divisor or a multiple of {ep}, or {out}")


def require_exchanging_replicas(load: SectionLoad, most: int, pins: Pins) -> None:
    """Raises UserError if no dp, up to `most`, has groups of ep / tp replicas that can exchange tokens."""
    replicas, key = max(1, load.shape.ep // load.shape.tp), f"{load.name}.ep={load.shape.ep}"
    dp = pins.pinned_number(load.name, "dp")
    if replicas > most or (dp is not None and dp % replicas):
        given = f"dp={dp} is no multiple of that" if dp else f"there are ranks and samples for at most {most}"
        message = f"{key} is impossible: {replicas} replicas would share experts, and {given}"
        raise UserError(message, remedy=f"set {load.name}.dp to a multiple of {replicas}, or another ep")
    if replicas > 1 and pins.splits_backward(load.name):
        message = f"{key} is impossible with backward=split: replicas exchange tokens in every backward"
        raise UserError(message, remedy=f"leave {load.name}.backward out")


def list_sharding_and_recompute(work: Workload, load: SectionLoad, pins: Pins) -> list[tuple[str, str]]:
    """Lists the (sharding, recompute) pairs to consider for a section, in order of preference among equals.

    Raises UserError where a pinned choice does not apply to the section.
    """
    sharding, recompute = (pins.word_choices(load.name, key) for key in ("sharding", "recompute"))
    if load.mode == "forward":
        _require_none_pinned(load, "recompute", pins, "it has no backward")
        recompute = ("none",)
    if kind := work.whole_batch_kind(load):
        sharding = tuple(s for s in sharding if s != "zero3")
        recompute = ("none",) if kind == ALONE else recompute
    if pins.splits_backward(load.name):
        if sharding == ("zero3",):
            _require_none_pinned(
                load, "sharding", pins, "each part of a split backward would gather parameters again"
            )
        sharding = tuple(s for s in sharding if s != "zero3")
    if not load.cost.trainable:
        if sharding not in (("zero3",), PIN_WORDS["sharding"]):
            _require_none_pinned(load, "sharding", pins, "it trains nothing")
        sharding = tuple(s for s in sharding if s in ("none", "zero3"))
    elif work.unshardable:
        _require_none_pinned(load, "sharding", pins, work.unshardable)
        sharding = ("none",)
    return [(s, r) for s in sharding for r in recompute]


def list_backward_parts(load: SectionLoad, shape: ReplicaShape, sharding: str, pins: Pins) -> list[int]:
    """In how many parts the stages of a section may run backward, in order of preference among equals.

    Stages with cp run whole backwards here, unless pinned to split: they may deal their micro-batches
    instead, and the scheduled step decides about them (`secc.alloc.refine.interleaved_stages`).
    """
    if pins.splits_backward(load.name):
        return [2]
    return [1, 2] if shape.cp == 1 and may_split_backward(load, shape, sharding, pins) else [1]


def may_split_backward(load: SectionLoad, shape: ReplicaShape, sharding: str, pins: Pins) -> bool:
    """Whether stages may split their backward without a pin that asks for it. A number of stages that the
    user pins runs whole backwards."""
    return (
        load.mode == "train"
        and shape.pp > 1
        and pins.pinned_number(load.name, "pp") is None
        and shape.ep <= shape.tp
        and sharding != "zero3"
        and load.cost.trainable > 0
        and shape.offload != "activations"
        and "split" in pins.word_choices(load.name, "backward")
    )


def list_offloads(
    work: Workload, load: SectionLoad, shape: ReplicaShape, sharding: str, pins: Pins
) -> list[str]:
    """What may live in host memory, in order of preference among equals; empty if the pinned choice is
    impossible with this shape and sharding."""
    pinned = pins.words.get(load.name, {}).get("offload")
    shape = shape._replace(backward_parts=2) if pins.splits_backward(load.name) else shape
    possible = [
        what for what in PIN_WORDS["offload"] if not why_not_offloaded(load, what, shape, sharding, work)
    ]
    if pinned is not None:
        return [pinned] if pinned in possible else []
    return [what for what in possible if what == "none" or what in work.offloads]


def may_copy_in_place_of_recomputing(work: Workload, load: SectionLoad, c: Candidate) -> bool:
    """Whether a section that runs layers again would take less time with what they save in host memory, for a
    micro-batch of one mean sample."""
    if c.recompute == "none" or not load.mean_sizes:
        return False
    if why_not_offloaded(load, "activations", c.shape, c.sharding, work):
        return False

    def passes_ns(offload: str, recompute: str) -> int:
        forward, backward = work.rank_load(load, c.shape._replace(offload=offload)).pass_ns(recompute)
        return evaluate_expr(f"{forward} + {backward}", load.mean_sizes)

    return passes_ns("activations", "none") < passes_ns(c.offload, c.recompute)


def require_offload(
    work: Workload, load: SectionLoad, shape: ReplicaShape, shardings: Iterable[str], pins: Pins
) -> None:
    """Raises UserError for a pinned offload that no sharding of these allows."""
    pinned = pins.words.get(load.name, {}).get("offload", "none")
    shape = shape._replace(backward_parts=2) if pins.splits_backward(load.name) else shape
    reasons = [why_not_offloaded(load, pinned, shape, sharding, work) for sharding in shardings]
    if all(reasons):
        raise UserError(
            f"{load.name}.offload={pinned} is impossible: {reasons[0]}",
            remedy=f"leave it out, or set {load.name}.offload=none",
        )


def why_not_offloaded(
    load: SectionLoad, what: str, shape: ReplicaShape, sharding: str, work: Workload
) -> str:
    """Why host memory cannot have a section's optimizer states, weights or activations, "" if it can."""
    if what == "none":
        return ""
    if not work.cluster.device.host_memory * work.cluster.device.host_bytes_per_s:
        return "the cluster file says nothing of host memory (host: {gb_s: 51, memory_gib: 238})"
    if what == "optimizer":
        return "" if load.cost.trainable else "it trains nothing, so it has no optimizer states"
    if what == "activations":
        return _why_activations_stay(load, shape)
    return _why_weights_stay(load, shape, sharding)


def _why_activations_stay(load: SectionLoad, shape: ReplicaShape) -> str:
    """Why what a section saves for its backward cannot be in host memory meanwhile, "" if it can."""
    if load.mode == "forward":
        return "it has no backward, so it saves nothing"
    if load.cost.layers < 2:
        return "it has no layers that run one after another"
    return "both parts of a split backward need what was saved" if shape.backward_parts > 1 else ""


def _why_weights_stay(load: SectionLoad, shape: ReplicaShape, sharding: str) -> str:
    """Why a section's weights cannot come from host memory layer by layer, "" if they can."""
    if load.cost.trainable:
        return "it trains, and only weights that never change stay in host memory"
    if load.cost.layers < 2 or not load.cost.largest_layer_bytes:
        return "it has no layers that run one after another"
    if sharding == "zero3":
        return "zero3 gathers its layers from the other replicas"
    return "replicas share its experts (ep above tp)" if shape.ep > shape.tp else ""


def _require_none_pinned(load: SectionLoad, key: str, pins: Pins, reason: str) -> None:
    """Raises UserError if `key` is pinned to anything but "none"."""
    choice = pins.words.get(load.name, {}).get(key, "none")
    if choice != "none":
        raise UserError(
            f"{load.name}.{key}={choice} is impossible: {reason}",
            remedy=f"leave it out, or set {load.name}.{key}=none",
        )
