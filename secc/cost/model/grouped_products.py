"""Time of the products of experts, at the sizes that a rank gets.

A grouped product multiplies the rows of each expert by that expert's weights, in one kernel. It differs from
a large product in three ways:

- Rows fill tiles expert by expert, and the last tile of each expert is half empty on average. So a product
  takes as long as one with some rows more for each expert (`Device.expert_lost_rows`).
- However few rows there are, the weights of all experts are read. The longer of products and reading counts.
- The backward writes gradients of all experts, and adds them to those of the micro-batches before.

With 128 experts and 8 of them for each token, a sample of 3,000 tokens gives each expert 190 rows: a dense
layer with as many FLOPs reads a sixteenth of the weights. Several samples in a micro-batch, or experts in
parts on several replicas, give each expert more rows.
"""

from __future__ import annotations

from fractions import Fraction

from secc.cluster import Device
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.section_cost import SectionCost

ACCUMULATION_PASSES = 3  # a gradient is read, and its sum read and written


def grouped_forward_ns(cost: SectionCost, device: Device) -> str:
    """Nanoseconds of the products of experts in a forward on a rank, an expression over a micro-batch's
    symbols; "0" without grouped products."""
    return _grouped_ns(cost, cost.routed_work, Fraction(1), cost.expert_bytes, device)


def grouped_backward_ns(cost: SectionCost, device: Device) -> str:
    """Nanoseconds of the products of experts in a backward, as above: gradients of rows, and of weights that
    train."""
    if cost.routed_work == "0":
        return "0"
    products = 1 + Fraction(cost.expert_trainable, max(1, cost.expert_params))
    moved = cost.expert_bytes + cost.expert_trainable_bytes
    text = _grouped_ns(cost, cost.routed_backward_work, products, moved, device)
    added = 1000 * ACCUMULATION_PASSES * cost.expert_trainable_bytes // device.memory_bytes_per_us
    return f"{text} + {added}" if added else text


def grouped_again_ns(cost: SectionCost, device: Device, share: Fraction) -> str:
    """Nanoseconds of the products of experts in the fraction `share` of all layers, run again."""
    return scale_expression(grouped_forward_ns(cost, device), share) if share else "0"


def _grouped_ns(cost: SectionCost, work: str, products: Fraction, moved: int, device: Device) -> str:
    """The longer of `products` times the products of a forward, with `work`, and of moving `moved` bytes."""
    if work == "0":
        return "0"
    lost = int(device.expert_lost_rows * cost.expert_row_work * products)
    reading = 1000 * moved // device.memory_bytes_per_us
    return f"max(1000*({work} + {lost})//{device.flops_per_us(cost.dtype)}, {reading})"
