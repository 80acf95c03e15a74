"""The graph of a plan's sections: cards of sections and labels of edges, which the page's script arranges."""

from __future__ import annotations

from dataclasses import dataclass

from secc.report.bar_rows import section_colours
from secc.report.plan_differences import section_edges
from secc.report.plan_tables import micro_batch_text, weights_text
from secc.report.text_table import bytes_text, short_ranks_text
from secc.runtime.plan.sample_predicates import describe_predicate
from secc.runtime.plan.schema import Plan, Section

MODE_TEXTS = {
    "train": ("trained", "its weights change"),
    "dgrad": ("frozen, passes gradients", "its weights stay, gradients pass through it"),
    "forward": ("frozen", "forward only"),
}
LOSS_CARD = "loss"


@dataclass(frozen=True)
class SectionCard:
    """A section in the graph; texts for people. `number` is its place in the plan, and `mode` that of
    plan.json."""

    number: int
    name: str
    colour: str
    mode: str
    mode_text: str
    ranks: str
    layout: str
    active_for: str
    facts: tuple[str, ...]


@dataclass(frozen=True)
class EdgeLabel:
    """What travels from one card to another one, numbers of cards; `two_way`: gradients come back."""

    source: int
    target: int
    source_name: str
    target_name: str
    text: str
    two_way: bool


@dataclass(frozen=True)
class SectionGraphFigure:
    """The cards and edges; the card of the loss has the number after the last section's."""

    cards: tuple[SectionCard, ...]
    edges: tuple[EdgeLabel, ...]


def section_graph_figure(plan: Plan) -> SectionGraphFigure:
    """Returns the graph of the user's sections and the loss."""
    sections, colours = plan.user_sections, section_colours(plan)
    numbers = {s.name: i for i, s in enumerate(sections)}
    shares = plan.prediction.get("sections", {})
    cards = tuple(
        _section_card(plan, s, i, colours[s.name], shares.get(s.name, {}).get("busy"))
        for i, s in enumerate(sections)
    )
    sent: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for e in section_edges(plan):
        sent.setdefault((e.src, e.dst), []).append((e.bytes_per_sample, e.grad))
    labels = [
        EdgeLabel(
            numbers[src],
            numbers[dst],
            src,
            dst,
            _traffic_text(plan, tensors),
            any(grad for _, grad in tensors),
        )
        for (src, dst), tensors in sent.items()
    ]
    section_of_stage = {s.name: s.user_section_name for s in plan.sections}
    losses = dict.fromkeys(
        section_of_stage.get(t.section, t.section) for t in plan.terms if not t.logged_scalar
    )
    labels += [EdgeLabel(numbers[n], len(cards), n, LOSS_CARD, "", True) for n in losses if n in numbers]
    return SectionGraphFigure(cards, tuple(labels))


def _section_card(plan: Plan, s: Section, number: int, colour: str, busy: object) -> SectionCard:
    mode, _ = MODE_TEXTS.get(s.mode, (s.mode, ""))
    degrees = {"dp": s.mesh.dp, "pp": s.mesh.pp, "tp": s.mesh.tp, "cp": s.mesh.cp, "ep": s.mesh.ep}
    layout = " · ".join(f"{name} {n}" for name, n in degrees.items() if n > 1)
    weights = weights_text(plan, s)
    facts = [f"{weights} weights"] if weights != "0" else []
    facts += [f"micro-batch {micro_batch_text(s)}"]
    facts += [f"recompute {s.recompute}"] if s.recompute != "none" else []
    facts += [s.sharding] if s.sharding != "none" else []
    facts += [f"{s.offload} on the host"] if s.offload != "none" else []
    facts += [f"busy {float(busy):.0%}"] if isinstance(busy, float | int) else []
    return SectionCard(
        number,
        s.name,
        colour,
        s.mode,
        mode,
        short_ranks_text(s.mesh.ranks),
        layout or ("one rank" if len(s.mesh.ranks) == 1 else ""),
        describe_predicate(s.when).removeprefix("samples with "),
        tuple(facts),
    )


def _traffic_text(plan: Plan, tensors: list[tuple[float, bool]]) -> str:
    """Bytes of a global batch that travel along an edge, forward and back."""
    forward = sum(size for size, _ in tensors) * plan.global_batch
    back = sum(size for size, grad in tensors if grad) * plan.global_batch
    count = f"{len(tensors)} tensors, " if len(tensors) > 1 else ""
    returned = f", {bytes_text(back)} back" if back else ""
    return f"{count}{bytes_text(forward)} a step{returned}"
