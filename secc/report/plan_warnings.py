"""What a user should know about a plan before a run, each with what can be done about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from secc.report.plan_tables import taken_back_texts
from secc.report.text_table import TextTable
from secc.runtime.plan.schema import Plan
from secc.runtime.schedule.memory_bound import EXCESS_REMEDY

FULL_MEMORY = 0.97  # share of the usable memory from which a rank counts as full


@dataclass(frozen=True)
class PlanWarning:
    """A warning in plain words, and what to do about it ("" where nothing need be done)."""

    text: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """The text as a sentence; a name at its beginning stays as it is."""
        text = self.text if self.text.endswith(".") else f"{self.text}."
        return text[0].upper() + text[1:] if text.split()[0].isalpha() else text


def plan_warnings(plan: Plan) -> tuple[PlanWarning, ...]:
    """Returns the warnings about a plan, those that concern exactness first."""
    return (*_exactness_warnings(plan), *_cost_warnings(plan))


def _exactness_warnings(plan: Plan) -> Iterator[PlanWarning]:
    for line in plan.checks.get("accepted", ()):
        yield PlanWarning(
            f"accepted {line}", "compile without --accept to have plans refused that are not exact"
        )
    if any(not c["exact"] for c in plan.checks.get("patterns", ())):
        yield PlanWarning(
            "the plan is not exact for every input pattern", "see the table Checks, and do not train with it"
        )
    if edges := _uncompared_masks(plan):
        names = ", ".join(edges)
        yield PlanWarning(
            f"{names}: perhaps a mask, since it has no gradient. Wider micro-batches pad it with zeros, and"
            " this plan was not compared with plain PyTorch",
            "define small_model(), which shows what pads it, or give --widths global",
        )
    for text in plan.checks.get("left_out_terms", ()):
        yield PlanWarning(
            text,
            "let the dataset give batches of one kind, or compute the term for these samples of every batch "
            "(with a mask)",
        )
    if reason := plan.checks.get("evaluation"):
        yield PlanWarning(f"the plan cannot be evaluated: {reason}", "train without --eval-every")


def _uncompared_masks(plan: Plan) -> list[str]:
    """Returns the names of edges of a plan that was not compared that may carry masks: they have widths of
    their own, and no gradient although their section trains. What pads them was not seen, either."""
    if plan.checks.get("patterns"):
        return []
    seen = plan.checks.get("padding_seen", ())
    trained = {s.name for s in plan.sections if s.mode == "train"}
    masks = (e.name for e in plan.edges if e.extents and not e.grad and e.src in trained)
    return [name for name in masks if name not in seen]


def _cost_warnings(plan: Plan) -> Iterator[PlanWarning]:
    if excess := plan.prediction.get("simulated", {}).get("beyond_memory"):
        yield PlanWarning(f"in the shown step {excess}", EXCESS_REMEDY)
    if price := plan.checks.get("widths_price"):
        yield PlanWarning(f"micro-batches have the global batch's widths: {price}")
    for text in taken_back_texts(plan):
        yield PlanWarning(text, "pin the choice with --set to see it refused with its whole message")
    ranks = (
        plan.world_size + int(plan.solver["free_ranks"])
        if "free_ranks" in plan.solver
        else int(plan.cluster.get("ranks", 0))
    )
    if plan.world_size < ranks:
        needed = plan.solver.get("objective") == "gpus"
        why = "are not needed" if needed else "would not shorten the step"
        remedy = (
            "give them to other work" if needed else "use a smaller --cluster, or a larger --global-batch"
        )
        yield PlanWarning(f"{ranks - plan.world_size} of {ranks} ranks {why} and are not used", remedy)


def warnings_table(plan: Plan) -> TextTable:
    """The warnings of `plan_warnings` as a table."""
    rows = tuple((w.text, w.remedy) for w in plan_warnings(plan))
    return TextTable("Warnings", ("what", "what to do"), rows)


def page_warnings(plan: Plan) -> tuple[PlanWarning, ...]:
    """Returns the warnings of the report: also those about figures that the ten-line summary shows anyway."""
    return (*plan_warnings(plan), *_memory_warnings(plan), *_assumed_costs_warning(plan))


def _memory_warnings(plan: Plan) -> Iterator[PlanWarning]:
    """Yields a warning for each set of ranks with hardly any memory left."""
    full: dict[frozenset[int], list[str]] = {}
    for s in plan.user_sections:
        memory = plan.reasons.get(s.name, {}).get("memory")
        if memory and memory["used"] > FULL_MEMORY * memory["usable"]:
            full.setdefault(frozenset(s.mesh.ranks), []).append(s.name)
    for names in full.values():
        memory = plan.reasons[names[0]]["memory"]
        share = memory["used"] / memory["usable"]
        yield PlanWarning(
            f"ranks of {', '.join(names)} need {share:.0%} of the memory that tensors may have, by the model",
            f"if a run ends for lack of memory, compile with --set {names[-1]}.recompute=full or a smaller"
            f" {names[-1]}.micro_batch",
        )


def _assumed_costs_warning(plan: Plan) -> Iterator[PlanWarning]:
    assumed = [s.name for s in plan.user_sections if s.cost.label == "default"]
    if assumed:
        yield PlanWarning(
            f"times of {', '.join(assumed)} are assumed in some part: compare plans by them, but expect"
            " steps to last longer or shorter",
            "measure them: secc profile MODEL.py -o costs.json, then secc compile --costs costs.json",
        )
