"""Writes small random compound models as model files that a person can read and run.

    python -m tests.e2e.random_models 17 > model.py
    python -m tests.e2e.random_models 17 experts > model.py

The seed decides everything: which encoders there are and which samples have their inputs, how features
join the text (at placeholders, before the tokens, added to every state), what is frozen, tied, shared or
called twice, which teachers there are, how padding is masked, how each loss is written, and with `experts`
which mixtures of experts the text components have.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.e2e.random_model_parts import (
    CLASSES,
    DATASET,
    DISTILLING,
    FEATURES,
    JUDGING,
    LANGUAGE,
    MIXTURES,
    PATCHES,
    STEERING,
)

ENCODERS = ("camera", "sonar", "radar")
TEACHERS = ("sage", "mentor")
FREEZING_CALLS = ("", ".requires_grad_(False)")
EXPERTS = 4


@dataclass
class ModelDraft:
    """A model file being written: lines of `__init__` and `forward`, terms of the loss, lines that make a
    sample."""

    rng: random.Random
    arguments: list[str] = field(default_factory=lambda: ["input_ids", "labels"])
    optional: list[str] = field(default_factory=list[str])
    init_lines: list[str] = field(default_factory=list[str])
    forward_lines: list[str] = field(default_factory=list[str])
    loss_terms: list[str] = field(default_factory=list[str])
    sample_lines: list[str] = field(default_factory=list[str])
    width: int = 8
    dropout: float = 0.0
    attention: str = "causal"
    steering_expressions: list[str] = field(
        default_factory=list[str]
    )  # [B, width] expressions that any component may be steered by
    has_trained: bool = False
    expert_rng: random.Random | None = None  # of mixtures, for a model with experts

    def write_text(self, width: int, depth: int, dropout: float) -> str:
        """Returns the call that makes a text component."""
        rng, plain = self.expert_rng, f"{width}, {depth}, {self.attention!r}, {dropout}"
        if rng is None:
            return f"Text({plain})"
        chosen = (EXPERTS, rng.choice((1, 2, 2)), rng.choice(("softmax", "sigmoid")), rng.random() < 0.4)
        more = ", ".join(map(repr, (rng.choice((1, 1, 2)), *chosen, rng.random() < 0.4)))
        return f"MixedText({plain}, {rng.choice(('Stacked', 'Stacked', 'Listed'))}, {more})"

    def flip(self, share: float) -> bool:
        return self.rng.random() < share

    def add_loss(self, term: str) -> None:
        factor = self.rng.choice(("", "", "0.5 * ", "2 / 3 * "))
        self.loss_terms.append(
            f"{factor}{term}" if factor == "" or term.startswith("F.") else f"{factor}({term})"
        )


def write_random_model(seed: int, experts: bool = False) -> str:
    """Returns the text of the model file of a seed, with mixtures of experts or without."""
    m = ModelDraft(random.Random(seed), expert_rng=random.Random(f"experts {seed}") if experts else None)
    m.width = m.rng.choice((8, 12, 16))
    m.dropout = 0.1 if m.flip(0.2) else 0.0
    m.attention = m.rng.choice(("causal", "causal", "causal", "masked", "open"))
    m.forward_lines.append("keep = (labels[:, 1:] != -100).float()")
    features = _add_encoders(m)
    _add_language(m, features)
    _add_branches(m, features)
    _add_teachers(m)
    if m.flip(0.15):
        m.loss_terms.append("1e-3 * self.text.head.weight.square().sum()")
    return _format_model(m, seed)


def _add_encoders(m: ModelDraft) -> list[tuple[str, str]]:
    """Adds components with inputs other than text; returns (name, how its features join the text) of each."""
    found: list[tuple[str, str]] = []
    for i, name in enumerate(ENCODERS[: m.rng.choice((0, 1, 1, 2, 2, 3))]):
        join = m.rng.choice(("places", "places", "before", "added"))
        same = next((other for other, how in found if how == join), "")
        encoder = same if same and m.flip(0.25) else name
        if encoder == name:
            frozen = m.rng.choice(("", "", *FREEZING_CALLS))
            m.has_trained |= not frozen
            m.init_lines.append(
                f"self.{name} = Encoder({FEATURES}, {m.width}, {m.rng.choice((1, 2, 3))}, "
                f"{m.dropout}){frozen}"
            )
        line = f"{name}_seen = self.{encoder}({name})"
        if m.flip(0.3):
            m.init_lines.append(
                f"self.{name}_adapter = nn.Sequential(nn.Linear({m.width}, {m.width}), nn.GELU(), "
                f"nn.Linear({m.width}, {m.width}))"
            )
            line = f"{name}_seen = self.{name}_adapter(self.{encoder}({name}))"
            m.has_trained = True
        _add_input(m, name, i, join, line)
        found.append((name, join))
    return found


def _add_input(m: ModelDraft, name: str, i: int, join: str, line: str) -> None:
    """Adds the key of an encoder: rows at placeholders, which samples may lack, or one entry for each
    sample."""
    if join != "places":
        m.arguments.append(name)
        m.sample_lines.append(f'sample["{name}"] = torch.randn({PATCHES}, {FEATURES}, generator=g)')
        m.forward_lines.append(line)
        if join == "added":
            m.steering_expressions.append(f"{name}_seen.mean(1)")
        return
    m.optional.append(name)
    m.forward_lines += [f"if {name} is not None:", f"    {line}"]
    most, share = m.rng.choice(((1, 0.5), (3, 0.5), (3, 0.8)))
    m.sample_lines.append(f'place(sample, "{name}", {i + 1}, most={most}, share={share}, g=g)')


def _add_language(m: ModelDraft, features: Sequence[tuple[str, str]]) -> None:
    """Adds the text component: embedding, features, layers, head, and its losses."""
    frozen = m.flip(0.2) and m.has_trained
    m.has_trained |= not frozen
    m.init_lines.append(
        f"self.text = {m.write_text(m.width, m.rng.choice((1, 2, 3)), m.dropout)}"
        f"{'.requires_grad_(False)' if frozen else ''}"
    )
    tie = m.flip(0.3)
    if tie:
        m.init_lines.append("self.text.head.weight = self.text.embed.weight")
    elif frozen or m.flip(0.2):
        m.init_lines.append("self.text.head.requires_grad_(True)")
    m.forward_lines.append("x = self.text.embed(input_ids)")
    for i, (name, join) in enumerate(features):
        if join == "places":
            scatter = f"x = x.masked_scatter((input_ids == {i + 1})[..., None], {name}_seen.flatten(0, 1))"
            m.forward_lines += [f"if {name} is not None:", f"    {scatter}"]
        elif join == "added" and m.flip(0.8):
            m.forward_lines.append(f"x = x + {name}_seen.mean(1)[:, None]")
    before = [name for name, join in features if join == "before"]
    m.forward_lines.append("mask = input_ids > 0")
    if before:
        m.forward_lines.append(f"x = torch.cat([{', '.join(f'{n}_seen' for n in before)}, x], dim=1)")
        m.forward_lines.append(
            f"mask = torch.cat([mask.new_ones(len(mask), {PATCHES * len(before)}), mask], dim=1)"
        )
    cut = f"[:, {PATCHES * len(before)}:]" if before else ""
    m.forward_lines += [f"h = self.text.states(x, mask){cut}", "logits = self.text.head(h)"]
    for loss in m.rng.sample(LANGUAGE, m.rng.choice((1, 1, 2))):
        m.add_loss(loss)
    if any("weight" in t.replace(".weight", "") for t in m.loss_terms):
        _add_required_key(m, "weight", "torch.rand((), generator=g) + 0.5")


def _add_branches(m: ModelDraft, features: Sequence[tuple[str, str]]) -> None:
    """Adds a second consumer of an encoder's features or of the text's states, with its own loss."""
    if m.flip(0.35):
        source = m.rng.choice(["pooled", *m.steering_expressions])
        if source == "pooled":
            m.forward_lines.append(
                "pooled = (h * mask[:, -h.shape[1]:, None]).sum(1)"
                " / mask[:, -h.shape[1]:].sum(1, keepdim=True)"
            )
        m.init_lines.append(
            f"self.judge = nn.Sequential(nn.Linear({m.width}, 12), nn.GELU(), nn.Linear(12, 3))"
        )
        m.forward_lines.append(f"judged = self.judge({source})")
        loss = m.rng.choice(JUDGING)
        m.add_loss(loss)
        if "kind" in loss:
            _add_required_key(m, "kind", "torch.randint(0, 3, (), generator=g)")
        if "target" in loss:
            _add_required_key(m, "target", "torch.rand(3, generator=g)")
    rows = [name for name, join in features if join == "places"]
    if rows and m.flip(0.35):
        name = m.rng.choice(rows)
        m.init_lines.append(f"self.{name}_back = nn.Linear({m.width}, {FEATURES})")
        m.forward_lines += [
            "loss = 0.0",
            f"if {name} is not None:",
            f"    loss = {m.rng.choice(STEERING).format(name=name)}",
        ]
        m.loss_terms.append("loss")


def _add_teachers(m: ModelDraft) -> None:
    """Adds frozen models with logits or states that the text component is distilled from."""
    for name in TEACHERS[: m.rng.choice((0, 0, 1, 1, 2))]:
        width = m.rng.choice((m.width, 20))
        m.init_lines.append(
            f"self.{name} = {m.write_text(width, m.rng.choice((1, 2)), 0.0)}.requires_grad_(False)"
        )
        text_mask = "mask[:, -input_ids.shape[1]:]"
        steer = (
            m.rng.choice(m.steering_expressions)
            if m.steering_expressions and width == m.width and m.flip(0.4)
            else ""
        )
        put = f" + {steer}[:, None]" if steer else ""
        m.forward_lines.append("with torch.no_grad():")
        m.forward_lines.append(
            f"    {name}_h = self.{name}.states(self.{name}.embed(input_ids){put}, {text_mask})"
        )
        m.forward_lines.append(f"    {name}_logits = self.{name}.head({name}_h)")
        loss = m.rng.choice(DISTILLING)
        if "project" in loss:
            m.init_lines.append(f"self.{name}_project = nn.Linear({m.width}, {width})")
        m.add_loss(loss.format(name=name))


def _add_required_key(m: ModelDraft, key: str, value: str) -> None:
    m.arguments.append(key)
    m.sample_lines.append(f'sample["{key}"] = {value}')


def _format_model(m: ModelDraft, seed: int) -> str:
    signature = ", ".join(["self", *m.arguments, *(f"{name}=None" for name in m.optional)])
    lines = [
        f'"""The random model of seed {seed}."""',
        CLASSES + (MIXTURES if m.expert_rng is not None else ""),
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
    ]
    lines += [f"        {line}" for line in m.init_lines]
    lines += ["", f"    def forward({signature}):"]
    lines += [f"        {line}" for line in m.forward_lines]
    lines += [
        f"        {'total = total +' if i else 'total ='} {term}" for i, term in enumerate(m.loss_terms)
    ]
    lines += ["        return total"]
    return "\n".join(lines) + DATASET.replace("# inputs", "\n        ".join(m.sample_lines or ["pass"]))


if __name__ == "__main__":
    print(write_random_model(int(sys.argv[1]), "experts" in sys.argv[2:]))
