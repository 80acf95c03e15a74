"""The cost of a section on a rank as a framework's code would have it (`secc.cluster.Framework`)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from secc.cluster import OWN_RUNTIME, Framework
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS, RecomputeCost
from secc.cost.model.section_cost import SectionCost


def cost_under_framework(cost: SectionCost, tp: int, framework: Framework) -> SectionCost:
    """Returns the cost of a rank of `tp` with the framework's traffic of norms and activations, products of
    few rows, and recomputation; the same cost for secc's own runtime."""
    if framework == OWN_RUNTIME:
        return cost
    lost = 2 * framework.lost_rows * max(0, cost.params - cost.expert_params)
    lost_backward = lost + 2 * framework.lost_rows * max(0, cost.trainable - cost.expert_trainable)
    moved = _layer_traffic(cost, tp, framework)
    percent = framework.tp_recompute_percent if tp > 1 else framework.recompute_percent
    again = {
        kind: _recompute_under_framework(
            costs, int(lost * RECOMPUTED_LAYERS[kind]), moved, RECOMPUTED_LAYERS[kind], Fraction(percent, 100)
        )
        for kind, costs in cost.recompute.items()
    }
    return replace(
        cost,
        work=f"{cost.work} + {lost}",
        backward_work=f"{cost.backward_work} + {lost_backward}" if cost.backward_work != "0" else "0",
        glue_bytes=moved or cost.glue_bytes,
        recompute=again,
    )


def saved_under_framework(
    whole: SectionCost, rank: SectionCost, tp: int, layers: Fraction, framework: Framework
) -> str:
    """Bytes that a rank of `tp` keeps from forward to backward. `whole`, `rank`: costs of the section, and of
    the rank as secc's runtime has it. `layers`: the fraction of the section's layers on the rank."""
    if not framework.whole_inputs or tp == 1 or rank.sequence_parallel:
        return rank.saved
    kept_whole = f"{framework.whole_inputs}*({whole.layer_input_bytes})"
    divided = scale_expression(f"{whole.saved} - {kept_whole}", layers / tp)
    return f"{scale_expression(kept_whole, layers)} + {divided}"


def _layer_traffic(cost: SectionCost, tp: int, framework: Framework) -> str:
    """Bytes that operations other than products move in a forward, "" where they are as counted."""
    if not framework.layer_passes:
        return ""
    inputs = scale_expression(
        f"{framework.layer_passes}*({cost.layer_input_bytes})", Fraction(1, _parts(cost, tp))
    )
    return f"{inputs} + {cost.logits_moved}" if cost.logits_moved != "0" else inputs


def _parts(cost: SectionCost, tp: int) -> int:
    return tp if cost.sequence_parallel else 1


def _recompute_under_framework(
    costs: RecomputeCost, lost: int, moved: str, layers: Fraction, slowness: Fraction
) -> RecomputeCost:
    """The cost of running the fraction `layers` of all layers again, to their ends."""
    own_moved = scale_expression(moved, layers) if moved else costs.moved
    return replace(
        costs,
        work=scale_expression(f"{costs.work} + {costs.unneeded} + {lost}", slowness),
        moved=scale_expression(own_moved, slowness),
    )
