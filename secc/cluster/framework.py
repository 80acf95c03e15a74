"""What the software of a run makes of its devices, as far as step times depend on it.

Plans are priced for secc's own runtime. Steps that others have published ran with other software: norms and
activations that are not fused, collectives hidden behind products or left in the open. To compare predictions
with such steps, a device carries that software's habits (`tools/published/frameworks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """Habits of a training framework; the defaults are those of secc's runtime.

    layer_passes: how often operations other than products read or write the bytes of a layer's input in a
        forward; 0: as counted.
    lost_rows: a product takes as long as one with this many further rows.
    recompute_percent, tp_recompute_percent: time of a layer's second forward over that of its first, without
        and with tensor parallelism.
    tp_percent: time of collectives over tp, of what the links' rates say.
    tp_hidden_percent: the part of the collectives over tp that passes behind products.
    zero3_open_percent: the part of ZeRO-3's collectives that computation does not hide.
    hides_gathers: sharded optimizers' gathers of parameters pass behind the next forward.
    waits_of_two_stages: micro-batches for which two stages wait in a step, besides filling and draining.
    virtual_stages: parts of a model that each stage holds in turn, which shorten filling and draining.
    whole_inputs: tensors of the size of a layer's input that every rank of tp keeps whole for the backward
        where norms work on whole sequences; 0: as counted.
    """

    name: str = "secc"
    layer_passes: int = 0
    lost_rows: int = 0
    recompute_percent: int = 100
    tp_recompute_percent: int = 100
    tp_percent: int = 100
    tp_hidden_percent: int = 0
    zero3_open_percent: int = 0
    hides_gathers: bool = False
    waits_of_two_stages: int = 0
    virtual_stages: int = 1
    whole_inputs: int = 0


OWN_RUNTIME = Framework()
