"""Memory of one rank of a section: parameters, gradients, optimizer states, and activations of micro-batches.

Gradients are produced while activations are freed, so their peaks do not add up. In the last backward of a
step, gradients are reduced as they are produced, while the activations of its micro-batch are freed. The
model takes both to change linearly over this backward. Sharding is that of ZeRO (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from typing import NamedTuple

from secc.cluster import Device
from secc.cost.model.section_cost import SectionCost
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES, MAX_BUCKETS_IN_FLIGHT, OFFLOADED_BUCKETS

OPTIMIZER_STATES_PER_PARAMETER = 2  # AdamW: two moments, in the dtype of the weight that it updates
UNLIMITED_MICRO_BATCHES = 1 << 30  # more than can be in flight


class ReducedGradients(NamedTuple):
    """Gradients that ranks reduce during the last backward, in bytes.

    total_bytes: all of them; 0 if none are reduced.
    in_flight_bytes: buckets in flight at once.
    shard_bytes: the rank's shard of the sums, in addition to its own gradients.
    own_freed: the rank frees its own gradients as soon as their bucket starts.
    """

    total_bytes: int = 0
    in_flight_bytes: int = 0
    shard_bytes: int = 0
    own_freed: bool = False


class RankMemory(NamedTuple):
    """Memory of one rank in bytes.

    parameters, optimizer: constant. buffers: of gathered layers under ZeRO-3, constant.
    gradients: as the rank's backwards accumulate them.
    activation: kept by each micro-batch in flight.
    working: transient memory of one backward, or of one forward without backward.
    micro_batches: micro-batches of a step on this rank.
    largest_sample: activations of the largest sample; if they exceed those of several micro-batches, it is
        alone in flight.
    kept_between: bytes that a micro-batch keeps in addition between the parts of a split backward; as many
        micro-batches are there at once as memory allows, at least one.
    reduced: gradients that are reduced during the last backward.
    host: bytes in host memory, on none of the device's; host_activation: more of them for each micro-batch
        in flight.
    """

    parameters: int
    gradients: int
    optimizer: int
    activation: int
    buffers: int = 0
    working: int = 0
    micro_batches: int = UNLIMITED_MICRO_BATCHES
    largest_sample: int = 0
    reduced: ReducedGradients = ReducedGradients()
    kept_between: int = 0
    host: int = 0
    host_activation: int = 0

    def host_bytes(self, in_flight: int) -> int:
        """Bytes in host memory with `in_flight` micro-batches between forward and backward."""
        return self.host + in_flight * self.host_activation

    def fits_device(self, in_flight: int, device: Device, others: int = 0) -> bool:
        """Whether `in_flight` micro-batches fit into a device's memory, in addition to `others` bytes of
        other sections, and into its part of its host's."""
        fits_host = not self.host_activation or self.host_bytes(in_flight) <= device.usable_host_memory
        return fits_host and self.total_bytes(in_flight) + others <= device.usable_memory

    @property
    def fixed(self) -> int:
        """Bytes besides gradients and activations."""
        return self.parameters + self.optimizer + self.buffers + self.working

    def transient_bytes(self, sharding: str) -> int:
        """Bytes that passes need for a time: gathered layers under ZeRO-3, and transient memory. (Layers from
        host memory count with the weights.)"""
        return self.working + (self.buffers if sharding == "zero3" else 0)

    def activation_bytes(self, in_flight: int) -> int:
        """The most activation bytes that `in_flight` micro-batches hold."""
        kept = in_flight * self.activation + self.kept_between
        return max(kept, self.largest_sample) if in_flight else 0

    def total_bytes(self, in_flight: int) -> int:
        """Peak bytes with up to `in_flight` micro-batches between forward and the end of their backward."""
        activations = self.activation_bytes(in_flight)
        return self.fixed + activations + self._extra_gradient_bytes(in_flight, activations)

    def extra_gradient_bytes(self, in_flight: int) -> int:
        """Gradient bytes in addition to the activations of `in_flight` micro-batches, at the peak.

        If all micro-batches of the step are in flight at once, there are no gradients yet when activations
        peak: gradients count in full only after the first of them has finished its backward.
        """
        return self._extra_gradient_bytes(in_flight, self.activation_bytes(in_flight))

    def _extra_gradient_bytes(self, in_flight: int, activations: int) -> int:
        """`extra_gradient_bytes` where the micro-batches hold `activations` bytes."""
        # Gradients of earlier micro-batches exist next to the activations, unless all micro-batches of the
        # step are in flight: then the first gradients appear when one of them has been freed.
        freed = 0
        if in_flight >= self.micro_batches:
            freed = activations - self.activation_bytes(in_flight - 1)
        return max(0, self.gradients - freed, self._last_backward_peak() - activations)

    def _last_backward_peak(self) -> int:
        """Peak of gradients and activations during the last backward, while gradients are reduced.

        Both are linear in the bytes produced so far, so the peak is where as many as possible are in flight,
        or at the end.
        """
        reduced = self.reduced
        if not reduced.total_bytes:
            return 0
        activations = self.activation_bytes(1)
        return max(
            self.last_backward_bytes(reduced.in_flight_bytes, activations),
            self.last_backward_bytes(reduced.total_bytes, activations),
        )

    def last_backward_bytes(self, produced: int, activations: int) -> int:
        """Gradients and activations when `produced` bytes of the gradients to reduce exist; the last
        micro-batch keeps `activations` bytes."""
        reduced = self.reduced
        remaining = reduced.total_bytes - produced
        own = remaining if reduced.own_freed else produced if self.micro_batches == 1 else reduced.total_bytes
        # The part not yet produced still has its share of the last micro-batch's activations. The rank's own
        # gradients shrink as buckets are freed (`own_freed`), grow from nothing if this is the only
        # micro-batch of the step, or exist in full from earlier ones. Sums grow with what is produced.
        linear = activations * remaining + self.gradients * own + reduced.shard_bytes * produced
        return linear // reduced.total_bytes + min(produced, reduced.in_flight_bytes)


def rank_memory(
    cost: SectionCost,
    activation: int,
    working: int = 0,
    dp: int = 1,
    sharding: str = "none",
    micro_batches: int = UNLIMITED_MICRO_BATCHES,
    largest: int = 0,
    offload: str = "none",
) -> RankMemory:
    """Compute the memory of a rank that holds a whole section.

    cost: cost of the section as this rank has it (`tp_pp_scaling.cost_on_rank`).
    activation: bytes that a micro-batch keeps. largest: bytes that the largest sample keeps.
    working: transient bytes of a backward. dp: replicas. micro_batches: micro-batches of a step on this rank.
    sharding: "none", "zero1" (optimizer states and summed gradients are sharded over dp), "zero2" (in
        addition, a rank's own gradients are freed bucket by bucket during its last backward; they never exist
        as a whole if `micro_batches` is 1) or "zero3" (in addition, parameters and gradients are sharded).

    offload: "none"; "optimizer": optimizer states are in host memory, and a few buckets of them on the
        device; "weights": frozen layers are in host memory, and two of them on the device.

    Float32 master weights count as optimizer states.
    """
    memory = _memory_on_device(cost, activation, working, dp, sharding, micro_batches, largest)
    if offload == "weights":
        buffers = min(2 * cost.largest_layer_bytes, layer_bytes(cost))
        return memory._replace(parameters=cost.outside_layers_bytes, buffers=buffers, host=layer_bytes(cost))
    return _with_states_on_host(memory, cost) if offload == "optimizer" else memory


def layer_bytes(cost: SectionCost) -> int:
    """Bytes of the parameters of all layers."""
    return max(0, cost.param_bytes - cost.outside_layers_bytes)


def _with_states_on_host(memory: RankMemory, cost: SectionCost) -> RankMemory:
    """The memory of a rank with optimizer states on its host and up to `OFFLOADED_BUCKETS` of them on its
    device. A parameter larger than a bucket has one of its own: all that is outside of layers may be one.
    """
    states, tensors = memory.optimizer, OPTIMIZER_STATES_PER_PARAMETER + (cost.master_bytes > 0)
    outside = states * cost.outside_layers_bytes // max(1, cost.param_bytes)
    streamed = min(states, outside + OFFLOADED_BUCKETS * tensors * BUCKET_BYTES)
    return memory._replace(optimizer=streamed, host=states)


def _memory_on_device(
    cost: SectionCost,
    activation: int,
    working: int,
    dp: int,
    sharding: str,
    micro_batches: int,
    largest: int,
) -> RankMemory:
    """The memory of a rank without offloading."""
    size, masters = cost.optimizer_weight_bytes, cost.master_bytes
    if sharding == "zero3" and dp > 1:
        return _zero3_memory(cost, activation, working, dp, micro_batches, largest)
    if sharding == "none" or dp == 1:
        sums = _reduced_gradients(cost, cost.trainable_bytes) if dp > 1 and size else ReducedGradients()
        return RankMemory(
            parameters=cost.param_bytes,
            gradients=size,
            optimizer=OPTIMIZER_STATES_PER_PARAMETER * size + masters,
            activation=activation,
            working=working,
            micro_batches=micro_batches,
            largest_sample=largest,
            reduced=sums,
        )
    shard, masters = _share_of_replicas(cost, size, dp), _share_of_replicas(cost, masters, dp)
    alone = sharding == "zero2" and micro_batches == 1
    own = min(size, BUCKET_BYTES) if alone else size
    sums = (
        _reduced_gradients(cost, size, shard, sharding == "zero2" and not alone)
        if size
        else ReducedGradients()
    )
    states = OPTIMIZER_STATES_PER_PARAMETER * shard + masters
    return RankMemory(
        parameters=cost.param_bytes,
        gradients=own,
        optimizer=states,
        activation=activation,
        working=working,
        micro_batches=micro_batches,
        largest_sample=largest,
        reduced=sums,
    )


def _share_of_replicas(cost: SectionCost, size: int, dp: int) -> int:
    """Bytes of a rank's share of `size` bytes of trainable parameters' states over `dp` replicas; those of
    experts are shared by the replicas that hold the same ones."""
    if cost.expert_replicas == 1 or not cost.trainable:
        return -(-size // dp)
    experts = size * cost.expert_trainable // cost.trainable
    return -(-(size - experts) // dp) + -(-experts * cost.expert_replicas // dp)


def _reduced_gradients(
    cost: SectionCost, of_bucket: int, shard: int = 0, freed: bool = False
) -> ReducedGradients:
    """The reduction of a section's gradients. Buckets are formed over parameters with `of_bucket` bytes in
    total, and reduced in the dtype of the sums."""
    return reduced_gradients(cost.gradient_sum_bytes, of_bucket, shard, freed)


def reduced_gradients(summed: int, bucketed: int, shard: int = 0, freed: bool = False) -> ReducedGradients:
    """The reduction of gradients of `summed` bytes as they are summed; buckets are formed over parameters of
    `bucketed` bytes."""
    most = MAX_BUCKETS_IN_FLIGHT * BUCKET_BYTES * summed // max(1, bucketed)
    return ReducedGradients(summed, min(summed, most), shard, freed)


def _zero3_memory(
    cost: SectionCost, activation: int, working: int, dp: int, micro_batches: int, largest: int
) -> RankMemory:
    """Memory under ZeRO-3: shards, and during a pass two gathered layers and all parameters outside of
    layers.

    Gradients of a layer exist twice, as produced and in a flat buffer. Those of parameters outside of layers
    stay until the pass ends.
    """
    layer, outside = cost.largest_layer_bytes, cost.outside_layers_bytes
    wide_layer, wide_outside = (
        size * cost.gradient_sum_bytes // max(1, cost.param_bytes) for size in (layer, outside)
    )
    buffers = 2 * layer + outside + max(2 * wide_layer + wide_outside, 2 * wide_outside)
    # Experts that other replicas have not are whole.
    divided = cost.expert_replicas > 1
    experts, expert_gradients = (
        size if divided else 0 for size in (cost.expert_bytes, cost.expert_gradient_sum_bytes)
    )
    states = OPTIMIZER_STATES_PER_PARAMETER * cost.optimizer_weight_bytes + cost.master_bytes
    return RankMemory(
        parameters=experts + -(-(cost.param_bytes - experts) // dp),
        gradients=expert_gradients + -(-(cost.gradient_sum_bytes - expert_gradients) // dp),
        optimizer=_share_of_replicas(cost, states, dp),
        activation=activation,
        buffers=buffers,
        working=working,
        micro_batches=micro_batches,
        largest_sample=largest,
    )
