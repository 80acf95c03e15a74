"""Memory of one rank of a section: what stays (parameters, gradients, optimizer states) and what each
micro-batch in flight adds.

Gradients come as activations go, so both are not counted whole: the last backward of a step, whose gradients
travel as it makes them, frees what its micro-batch kept at the same time. Both are taken to change evenly.
"""

from __future__ import annotations

from typing import NamedTuple

from secc.cost.model.section_cost import SectionCost
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES, MAX_BUCKETS_IN_FLIGHT

OPTIMIZER_STATES_PER_PARAMETER = (
    2  # AdamW keeps two tensors for each trainable parameter, in the parameter's dtype
)
UNLIMITED_MICRO_BATCHES = 1 << 30  # micro-batches: more than are in flight


class ReducedGradients(NamedTuple):
    """Gradients that travel in the last backward: bytes of all of them (0: none travel) and of those under
    way at once, of the `shard` of their sums that a rank keeps beside its own gradients, and whether it frees
    its own when they start."""

    total_bytes: int = 0
    in_flight_bytes: int = 0
    shard_bytes: int = 0
    own_freed: bool = False


class RankMemory(NamedTuple):
    """Bytes on one rank: `parameters`, `gradients` as its backwards make them, `optimizer`, `buffers` of
    gathered layers, `activation` for each micro-batch in flight, and `working`: what the backward of one of
    them, or a forward without one, adds for a time. `micro_batches`: those of a step. `largest`: activations
    of the largest sample, which may be alone in flight where it takes more than several micro-batches."""

    parameters: int
    gradients: int
    optimizer: int
    activation: int
    buffers: int = 0
    working: int = 0
    micro_batches: int = UNLIMITED_MICRO_BATCHES
    largest_sample: int = 0
    reduced: ReducedGradients = ReducedGradients()

    @property
    def fixed(self) -> int:
        """Bytes besides gradients and what micro-batches keep."""
        return self.parameters + self.optimizer + self.buffers + self.working

    def activation_bytes(self, in_flight: int) -> int:
        """Bytes that so many micro-batches in flight keep at most."""
        return max(in_flight * self.activation, self.largest_sample) if in_flight else 0

    def total_bytes(self, in_flight: int) -> int:
        """Bytes with `in_flight` micro-batches between their forward and the end of their backward."""
        return self.fixed + self.activation_bytes(in_flight) + self.extra_gradient_bytes(in_flight)

    def extra_gradient_bytes(self, in_flight: int) -> int:
        """Bytes that gradients need beyond what these micro-batches keep at most.

        Where these are all of the step there are no gradients when they have run forward.
        """
        kept = self.activation_bytes(in_flight)
        early = 0 if in_flight < self.micro_batches else self.activation_bytes(in_flight - 1) - kept
        return max(0, self.gradients + early, self._last_backward_peak() - kept)

    def _last_backward_peak(self) -> int:
        """Bytes of gradients and activations at most while gradients travel: when as many are under way as
        can be, or all are made."""
        return (
            max(
                self._last_backward_bytes(self.reduced.in_flight_bytes),
                self._last_backward_bytes(self.reduced.total_bytes),
            )
            if self.reduced.total_bytes
            else 0
        )

    def _last_backward_bytes(self, made: int) -> int:
        """The same when so many bytes of what is summed are made."""
        sums = self.reduced
        left = sums.total_bytes - made
        own = left if sums.own_freed else made if self.micro_batches == 1 else sums.total_bytes
        parts = self.activation_bytes(1) * left + self.gradients * own + sums.shard_bytes * made
        return parts // sums.total_bytes + min(made, sums.in_flight_bytes)


def rank_memory(
    cost: SectionCost,
    activation: int,
    working: int = 0,
    dp: int = 1,
    sharding: str = "none",
    micro_batches: int = UNLIMITED_MICRO_BATCHES,
    largest: int = 0,
) -> RankMemory:
    """The memory of a rank that has the whole section: `activation` bytes for each micro-batch, `largest` for
    the largest sample.

    Sharded optimizers have a `dp`-th of the states and of the summed gradients. Under `zero2` a rank's own
    gradients are freed bucket by bucket in its last backward, so that they are never there as a whole if that
    is its only one (`micro_batches` is 1). Under `zero3` it has a `dp`-th of the parameters and of the
    gradients, too. Float32 masters count with the optimizer's states.
    """
    size, masters = cost.optimizer_weight_bytes, cost.master_bytes
    if sharding == "zero3" and dp > 1:
        return _zero3_memory(cost, activation, working, dp, micro_batches, largest)
    if sharding == "none" or dp == 1:
        sums = _reduced_gradients(cost, cost.trainable_bytes) if dp > 1 and size else ReducedGradients()
        return RankMemory(
            cost.param_bytes,
            size,
            OPTIMIZER_STATES_PER_PARAMETER * size + masters,
            activation,
            0,
            working,
            micro_batches,
            largest,
            sums,
        )
    shard = -(-size // dp)
    alone = sharding == "zero2" and micro_batches == 1
    own = min(size, BUCKET_BYTES) if alone else size
    sums = (
        _reduced_gradients(cost, size, shard, sharding == "zero2" and not alone)
        if size
        else ReducedGradients()
    )
    states = OPTIMIZER_STATES_PER_PARAMETER * shard + -(-masters // dp)
    return RankMemory(cost.param_bytes, own, states, activation, 0, working, micro_batches, largest, sums)


def _reduced_gradients(
    cost: SectionCost, of_bucket: int, shard: int = 0, freed: bool = False
) -> ReducedGradients:
    """The sums of a section's gradients, whose buckets are cut by `of_bucket` bytes in all."""
    wide = cost.gradient_sum_bytes
    return ReducedGradients(
        wide, min(wide, MAX_BUCKETS_IN_FLIGHT * BUCKET_BYTES * wide // of_bucket), shard, freed
    )


def _zero3_memory(
    cost: SectionCost, activation: int, working: int, dp: int, micro_batches: int, largest: int
) -> RankMemory:
    """Under `zero3`: shards, and while a pass goes on two layers and what is in none. Gradients of a layer
    are there twice, as they are made and in a flat buffer; those of what is in no layer stay until the pass
    ends."""
    layer, rest = cost.largest_layer_bytes, cost.outside_layers_bytes
    wide_layer, wide_rest = (
        size * cost.gradient_sum_bytes // max(1, cost.param_bytes) for size in (layer, rest)
    )
    buffers = 2 * layer + rest + max(2 * wide_layer + wide_rest, 2 * wide_rest)
    parameters, gradients, states, masters = (
        -(-size // dp)
        for size in (
            cost.param_bytes,
            cost.gradient_sum_bytes,
            OPTIMIZER_STATES_PER_PARAMETER * cost.optimizer_weight_bytes,
            cost.master_bytes,
        )
    )
    return RankMemory(
        parameters, gradients, states + masters, activation, buffers, working, micro_batches, largest
    )
