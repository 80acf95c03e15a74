"""Takes from the memory for activations what tensor parallelism leaves whole on each rank.

Allocation divides all parameters of a section by its tp. Which modules are split is found later, and the
others need their whole memory on each rank.
"""

from __future__ import annotations

from dataclasses import replace

from secc.bounds.traffic import Traffic
from secc.runtime.plan.schema import Plan, Section


def subtract_whole_parameters(plan: Plan) -> Plan:
    """Returns the plan with less `room_bytes` for the sections on ranks with parameters that tp leaves whole.
    At least a byte is left, which schedules treat as room for one micro-batch."""
    traffic = Traffic(plan)
    lost = {s.name: _bytes_beyond_share(traffic, s) for s in plan.sections}
    ranks = {s.name: frozenset(s.mesh.ranks) for s in plan.sections}

    def shrink_room(section: Section) -> Section:
        together = [s for s in plan.sections if ranks[s.name] & ranks[section.name]]
        excess, rooms = sum(lost[s.name] for s in together), sum(s.room_bytes for s in together)
        return replace(section, room_bytes=max(1, section.room_bytes - section.room_bytes * excess // rooms))

    if not any(lost.values()):
        return plan
    return replace(plan, sections=tuple(shrink_room(s) if s.room_bytes else s for s in plan.sections))


def _bytes_beyond_share(traffic: Traffic, section: Section) -> int:
    """Bytes of a section's parameters on a rank that tp leaves whole, beyond the part that allocation counts:
    weights, and of trained ones gradients and optimizer states."""
    tp, copies = section.mesh.tp, section.mesh.copies
    if tp == 1:
        return 0
    whole = set(section.params).difference(shard.name for shard in section.shards)
    trained = {n for n in whole if traffic.plan.model.parameters.get(n, "").endswith(" train")}
    weights = sum(map(traffic.bytes_on_rank, whole if section.offload != "weights" else trained))
    gradients = sum(map(traffic.updated_bytes_on_rank, trained))
    states = sum(traffic.state_bytes(n) for n in trained.difference(traffic.offloaded_names))
    if section.sharding == "zero3":
        weights, gradients = weights // copies, gradients // copies
    states //= copies if section.sharding != "none" else 1
    return (weights + gradients + states) * (tp - 1) // tp
