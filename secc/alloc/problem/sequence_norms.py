"""Decides whether norms and residuals of a section may work on the positions of a rank of tp (sequence
parallelism, Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).

Ranks then keep less and move less memory, and exchange a quarter more. Candidates would double if each came
in both forms, so the faster one counts; the other one is priced only where the faster one does not fit, and
for stages, which wait less for each other if they have memory for more micro-batches. With cp, ranks of tp
divide the rows of a rank.
"""

from __future__ import annotations

from secc.alloc.problem.pins import Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.runtime.plan.expr_eval import evaluate_expr


def list_norms(work: Workload, load: SectionLoad, shape: ReplicaShape, pins: Pins) -> tuple[str, ...]:
    """How norms of a section may work, the preferred way first: the pinned one alone, else what is faster for
    a mean sample. Parts of the sequence always need less memory, so whole sequences never come second.

    Which layers are exact on parts is shown after allocation, so a choice may be taken back.
    """
    if load.name in pins.words and "norms" in pins.words[load.name]:
        return ("sequence",) if pins.splits_sequence(load.name) and shape.tp > 1 else ("whole",)
    possible = (
        shape.tp > 1
        and not load.cost.experts
        and work.cluster.device.backend != "cpu"
        and f"{load.name}.norms=sequence" not in pins.refused
        and work.has_sequences(load)
    )
    if not possible:
        return ("whole",)

    def step_ns(norms: str) -> int:
        rank = work.rank_load(load, shape._replace(norms=norms))
        text = f"{rank.forward_ns} + {rank.backward_ns['none']}"
        return evaluate_expr(text, load.mean_sizes)

    return ("sequence",) if step_ns("sequence") < step_ns("whole") else ("whole", "sequence")
