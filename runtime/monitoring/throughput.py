"""How fast a step was: samples and labels a second, the share of the devices' peak, how busy sections are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule


def peak_seconds(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> float | None:
    """Returns the seconds that one device at its peak rate would need for the FLOPs of a global batch, from
    the sizes of its own micro-batches; None on CPUs, for devices of several kinds, and without costs."""
    device = plan.cluster.get("device", {})
    peaks = dict(device.get("gflops", ()))
    costs = [s.cost for s in plan.sections]
    if device.get("backend") == "cpu" or plan.cluster.get("groups") or "f32" not in peaks:
        return None
    if not all(c.flops and c.dtype for c in costs):
        return None
    sizes, nanoseconds = PredictedCosts(plan, samples, schedule.own_samples), 0.0
    for s in plan.sections:
        for m in (m for m in schedule.micro_batches[s.name] if not schedule.is_of_next_batch(m)):
            for together in sizes.computed_parts(s, m.samples):
                symbols = sizes.micro_batch_sizes(together)
                flops = evaluate_expr(s.cost.flops, symbols)
                if s.mode != "forward":
                    flops += evaluate_expr(s.cost.backward_flops or "0", symbols)
                nanoseconds += flops / peaks.get(s.cost.dtype, peaks["f32"])
    return nanoseconds / 1e9


def section_shares(
    plan: Plan, seconds: Mapping[tuple[str, str], float], step_seconds: float
) -> dict[str, float]:
    """Returns the shares of a step in which the ranks of each section compute (`section/NAME/busy`), wait for
    messages of other sections (`section/NAME/wait`) and wait for collectives among themselves
    (`section/NAME/exposed_communication`). What is left, they wait for their turn or work for other sections.

    `seconds`: by (section, kind), summed over replicas.
    """
    shares: dict[str, float] = {}
    for s in plan.user_sections:
        available = len(s.mesh.ranks) / s.mesh.replica_size * step_seconds
        if available > 0:
            forward, backward, wait, inside, outside = (seconds.get((s.name, kind), 0.0) for kind in "FBRCE")
            shares[f"section/{s.name}/busy"] = (forward + backward - inside) / available
            shares[f"section/{s.name}/wait"] = wait / available
            shares[f"section/{s.name}/exposed_communication"] = (inside + outside) / available
    return shares
