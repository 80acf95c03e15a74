"""Memory of one rank of a section: what stays (parameters, gradients, optimizer states) and what each micro-batch in flight adds."""

from __future__ import annotations

from dataclasses import dataclass

from secc.cost.section import SectionCost
from secc.runtime.buckets import BUCKET_BYTES, WINDOW

OPTIMIZER_STATES = 2  # AdamW keeps two tensors for each trainable parameter, in the parameter's dtype
SUM_BYTES = 4  # gradients are summed in float32
MANY = 1 << 30  # micro-batches: more than are in flight


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: `parameters`, `gradients`, `optimizer`, `buffers` of gradients on their way, `activation` for each micro-batch in
    flight, and `working`: what the backward of one of them adds for a time. `micro_batches`: those of a step. `largest`: activations of
    the largest sample, which may be alone in flight where it takes more than several micro-batches."""

    parameters: int
    gradients: int
    optimizer: int
    activation: int
    buffers: int = 0
    working: int = 0
    micro_batches: int = MANY
    largest: int = 0

    @property
    def fixed(self) -> int:
        """Bytes besides gradients and what micro-batches keep."""
        return self.parameters + self.optimizer + self.buffers + self.working

    def kept(self, in_flight: int) -> int:
        """Bytes that so many micro-batches in flight keep at most."""
        return max(in_flight * self.activation, self.largest) if in_flight else 0

    def total(self, in_flight: int) -> int:
        """Bytes with `in_flight` micro-batches between their forward and the end of their backward.

        Where these are all of the step there are no gradients when they have run forward: a backward makes them as it frees what its
        micro-batch kept.
        """
        return self.fixed + self.kept(in_flight) + self.beside(in_flight)

    def beside(self, in_flight: int) -> int:
        """Bytes of gradients beside what all these micro-batches keep."""
        if in_flight < self.micro_batches:
            return self.gradients
        return max(0, self.gradients - self.kept(in_flight) + self.kept(in_flight - 1))


def memory(
    cost: SectionCost,
    activation: int,
    working: int = 0,
    dp: int = 1,
    sharding: str = "none",
    micro_batches: int = MANY,
    largest: int = 0,
) -> Memory:
    """The memory of a rank that has the whole section: `activation` bytes for each micro-batch, `largest` for the largest sample.

    Sharded optimizers have a `dp`-th of the states and of the summed gradients. Under `zero2` a rank's own gradients are freed bucket by
    bucket in its last backward, so that they are never there as a whole if that is its only one (`micro_batches` is 1). Under `zero3` it
    has a `dp`-th of the parameters and of the gradients, too. Float32 masters count with the optimizer's states.
    """
    size, masters = cost.summed_bytes, cost.master_bytes
    if sharding == "zero3" and dp > 1:
        return _gathered(cost, activation, working, dp, micro_batches, largest)
    wide = SUM_BYTES * cost.trainable
    of_bucket = size if sharding != "none" else cost.trainable_bytes  # buckets hold so many bytes of what is reduced
    buffers = min(wide, WINDOW * BUCKET_BYTES * wide // of_bucket) if dp > 1 and size else 0
    if sharding == "none" or dp == 1:
        return Memory(cost.param_bytes, size, OPTIMIZER_STATES * size + masters, activation, buffers, working, micro_batches, largest)
    shard = -(-size // dp)
    own = min(size, BUCKET_BYTES) if sharding == "zero2" and micro_batches == 1 else size
    states = OPTIMIZER_STATES * shard + -(-masters // dp)
    return Memory(cost.param_bytes, own + shard, states, activation, buffers, working, micro_batches, largest)


def _gathered(cost: SectionCost, activation: int, working: int, dp: int, micro_batches: int, largest: int) -> Memory:
    """Under `zero3`: shards, and while a pass goes on two layers and what is in none. Gradients of a layer are there twice, as they are
    made and in a flat buffer; those of what is in no layer stay until the pass ends."""
    layer, rest = cost.unit_bytes, cost.rest_bytes
    wide_layer, wide_rest = (size * cost.wide_bytes // max(1, cost.param_bytes) for size in (layer, rest))
    buffers = 2 * layer + rest + max(2 * wide_layer + wide_rest, 2 * wide_rest)
    parameters, gradients, states, masters = (
        -(-size // dp) for size in (cost.param_bytes, cost.wide_bytes, OPTIMIZER_STATES * cost.summed_bytes, cost.master_bytes)
    )
    return Memory(parameters, gradients, states + masters, activation, buffers, working, micro_batches, largest)
