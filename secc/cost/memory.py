"""Memory of one rank of a section: what stays (parameters, gradients, optimizer states) and what each micro-batch in flight adds."""

from __future__ import annotations

from dataclasses import dataclass

from secc.cost.section import SectionCost

OPTIMIZER_STATES = 2  # AdamW keeps two tensors for each trainable parameter, in the parameter's dtype


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: `parameters`, `gradients`, `optimizer`, and `activation` for each micro-batch in flight."""

    parameters: int
    gradients: int
    optimizer: int
    activation: int

    def total(self, in_flight: int) -> int:
        """Bytes with `in_flight` micro-batches between their forward and the end of their backward."""
        return self.parameters + self.gradients + self.optimizer + in_flight * self.activation


def memory(cost: SectionCost, activation: int) -> Memory:
    """The memory of a rank that holds the whole section, `activation` bytes for each micro-batch in flight."""
    return Memory(cost.param_bytes, cost.trainable_bytes, OPTIMIZER_STATES * cost.trainable_bytes, activation)
