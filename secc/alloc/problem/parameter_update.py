"""Prices what follows the last backward of a step: sums of gradients, gathers of updated parameters, and the
optimizer step."""

from __future__ import annotations

from fractions import Fraction

from secc.alloc.problem.micro_batch_times import busiest_replica_ns, deferred_backward_ns
from secc.alloc.problem.section_load import BusiestReplica, SectionLoad, UpdateTimes
from secc.alloc.problem.workload import Workload
from secc.cluster import OWN_RUNTIME, Cluster
from secc.cost.model import roofline
from secc.cost.model.memory import rank_memory
from secc.cost.model.section_cost import SectionCost
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.parameters.reduction_times import exposed_gather_ns


def gradient_and_optimizer_ns(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str
) -> int:
    """Time from the last backward to the end of the step, in ns: sums of gradients as far as that backward
    does not hide them, gathers of parameters as far as the next forward does not, and optimizer step."""
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    return update_ns(work, load, dp, sharding, recompute, busy)


def update_ns(
    work: Workload, load: SectionLoad, dp: int, sharding: str, recompute: str, busy: BusiestReplica
) -> int:
    update = update_times(work, load, dp, sharding)
    deferred = deferred_backward_ns(load, busy.backward_ns, recompute)
    last = deferred if load.shape.backward_parts > 1 else busy.backward_ns
    exposed = exposed_sums_ns(update.sums, load.cost.trainable_bytes, last) + update.optimizer
    if update.gathers:
        exposed += exposed_gather_ns(update.gathers, update.open_share, busy.mean_forward_ns)
    return exposed


def exposed_sums_ns(sums_ns: int, parameter_bytes: int, last_backward_ns: int) -> int:
    """How long sums of the gradients of `parameter_bytes` of parameters take beyond the last backward. A
    bucket is summed when that backward has all of its gradients, so the first one waits for a part of it, and
    the last one for all of it."""
    parameter_bytes = max(1, parameter_bytes)
    bucket = min(BUCKET_BYTES, parameter_bytes)
    hidden = (parameter_bytes - bucket) * last_backward_ns // parameter_bytes
    return max(sums_ns - hidden, bucket * sums_ns // parameter_bytes)


def update_times(
    work: Workload, load: SectionLoad, dp: int, sharding: str, stages_between: int = 1
) -> UpdateTimes:
    """What follows the backwards of a section on one of its ranks (memoised). stages_between: how many stages
    of a replica lie on ranks between a stage and the same stage of the next replica, itself included."""
    key = dp, sharding, stages_between
    if key not in load.cached_updates:
        load.cached_updates[key] = _price_update(work, load, dp, sharding, stages_between)
    return load.cached_updates[key]


def _price_update(
    work: Workload, load: SectionLoad, dp: int, sharding: str, stages_between: int
) -> UpdateTimes:
    cost, cluster = load.cost, work.cluster
    if load.mode != "train":
        return UpdateTimes(0, 0, 0, 0)
    copies = dp * load.shape.cp

    def step_ns(shards: int = 1) -> int:
        step = roofline.optimizer_step_ns(cost, cluster.device, shards)
        if load.shape.offload != "optimizer":
            return step
        states = rank_memory(cost, 0, dp=copies, sharding=sharding).optimizer
        return roofline.offloaded_step_ns(step, states, cluster.device)

    if sharding == "zero3" and copies > 1:
        # Every backward has summed its gradients.
        return UpdateTimes(0, 0, 0, step_ns(copies))
    # Experts are summed over the replicas that hold the same ones, all else over all replicas.
    # `place` puts replicas of a stage, not stages of a replica, next to each other where sums take long and
    # no other section has these ranks.
    replicas, stride = cost.expert_replicas, load.shape.tp * stages_between
    experts = cost.expert_gradient_sum_bytes if replicas > 1 else 0
    if sharding == "none":
        sums = roofline.gradient_all_reduce_ns(
            cost.gradient_sum_bytes - experts, copies, cluster, stride
        ) + roofline.gradient_all_reduce_ns(experts, copies // replicas, cluster, stride * replicas)
        return UpdateTimes(sums, 0, 0, step_ns())
    weights = cost.expert_trainable_bytes if replicas > 1 else 0
    sums = roofline.gradient_reduce_scatter_ns(
        cost.gradient_sum_bytes - experts, copies, cluster, stride
    ) + roofline.gradient_reduce_scatter_ns(experts, copies // replicas, cluster, stride * replicas)
    gathers = roofline.parameter_all_gather_ns(
        cost.trainable_bytes - weights, copies, cluster, stride
    ) + roofline.parameter_all_gather_ns(weights, copies // replicas, cluster, stride * replicas)
    if cluster.device.framework.hides_gathers:
        gathers = 0
    open_gathers = int(_open_share(cost, cluster) * gathers)
    return UpdateTimes(sums, gathers, open_gathers, step_ns(copies // replicas if replicas > 1 else copies))


def _open_share(cost: SectionCost, cluster: Cluster) -> Fraction:
    """The part of gathers that no forward hides: of what is outside of layers, and of one layer. All of them
    on CPUs, which copy the bytes themselves, and under frameworks that wait for them."""
    waits = cluster.device.backend == "cpu" or cluster.device.framework != OWN_RUNTIME
    if waits or not cost.layers or not cost.param_bytes:
        return Fraction(1)
    outside = min(cost.outside_layers_bytes, cost.param_bytes)
    return Fraction(outside + (cost.param_bytes - outside) // cost.layers, cost.param_bytes)
