"""Draws plans at random: ranks for each section, shared or not, and every choice that a user may pin or
give to a run.

A draw keeps to choices that may be pinned at all (a split backward needs stages, a frozen section can only
shard its parameters). Choices that the compiler refuses for a model's own reasons (heads that tp does not
divide, too few layers) are dropped by `plan_without_refused_pins`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from secc.driver.compile import CompiledPlan
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.runtime.plan.schema import OVERLAPS, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.schedule import cross_step_prefetch
from tests.e2e.reference_runs import ReferencedModel

MOST_RANKS = 6
GLOBAL_BATCHES = (12, 7)
TP_CHOICES, PP_CHOICES, CP_CHOICES = (1, 2, 4), (1, 2, 3), (1, 2, 3, 4)
RUN_OPTION_CHOICES = (
    (),
    (),
    ("--comm", "rounds"),
    ("--run-ahead", "0"),
    ("--run-ahead", "0.01"),
    ("--order", "dataset"),
    ("--debug-comm",),
)


class Shape(NamedTuple):
    """How many ranks a section has along each mesh axis."""

    tp: int
    pp: int
    cp: int
    dp: int

    @property
    def ranks(self) -> int:
        """All ranks of the section."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class WantedPlan:
    """A way to distribute a model: number of ranks, samples of a step, pins by section, dtype, and options
    of the run."""

    ranks: int
    global_batch: int
    pins: tuple[str, ...]
    dtype: str = ""
    run_options: tuple[str, ...] = ()

    @property
    def options(self) -> CompileOptions:
        """The compile options."""
        return CompileOptions(
            cluster=f"local:{self.ranks}", global_batch=self.global_batch, set=self.pins, dtype=self.dtype
        )

    def __str__(self) -> str:
        words = [
            f"{self.ranks} ranks",
            f"{self.global_batch} samples",
            *self.pins,
            self.dtype,
            *self.run_options,
        ]
        return " ".join(w for w in words if w)


def draw_random_plan(
    rng: random.Random, sections: Sequence[Section], dtypes: Sequence[str] = ("",), experts: int = 0
) -> WantedPlan:
    """Draws a plan of two to six ranks for a model with these sections, each with mixtures of `experts`."""
    groups = _draw_groups(rng, [s.name for s in sections])
    rng.shuffle(groups)  # who is cut first has most ranks to choose from
    pins, ranks = list[str](), 0
    for left, names in zip(reversed(range(len(groups))), groups, strict=True):
        least = 2 if len(groups) == 1 else 1
        first = _draw_shape(rng, range(least, MOST_RANKS - ranks - left + 1))
        ranks += first.ranks
        pins += [f"{name}.with={names[0]}" for name in names[1:]]
        for section in (s for s in sections if s.name in names):
            shape = first if section.name == names[0] else _draw_shape(rng, (first.ranks,))
            pins += [*_draw_section_pins(rng, section, shape), *_draw_ep(rng, section, shape, experts)]
    return WantedPlan(
        ranks, rng.choice(GLOBAL_BATCHES), tuple(pins), rng.choice(dtypes), rng.choice(RUN_OPTION_CHOICES)
    )


def has_section_with(wanted: WantedPlan, pins: Sequence[str]) -> bool:
    """Whether one section of a plan has all of these pins, given as "cp" for any above 1 or as
    "norms=sequence"; true for none."""
    by_section: dict[str, set[str]] = {}
    for pin in wanted.pins:
        section, _, choice = pin.rpartition(".")
        by_section.setdefault(section, set()).update((choice, choice.partition("=")[0]))
    return not pins or any(words.issuperset(pins) for words in by_section.values())


def _draw_groups(rng: random.Random, names: Sequence[str]) -> list[list[str]]:
    """Groups sections by the devices they share; mostly each has its own."""
    found: list[list[str]] = []
    for name in names:
        if found and rng.random() < 0.2:
            rng.choice(found).append(name)
        else:
            found.append([name])
    return found


def _draw_shape(rng: random.Random, sizes: Container[int]) -> Shape:
    """Draws a shape with a number of ranks in `sizes`; each (tp, pp, cp) is equally likely."""
    drawn = (Shape(*axes) for axes in product(TP_CHOICES, PP_CHOICES, CP_CHOICES, range(1, MOST_RANKS + 1)))
    found = [shape for shape in drawn if shape.ranks in sizes]
    replica = rng.choice(list(dict.fromkeys(shape[:3] for shape in found)))
    return rng.choice([shape for shape in found if shape[:3] == replica])


def _draw_section_pins(rng: random.Random, section: Section, shape: Shape) -> Iterator[str]:
    chosen: dict[str, object] = {key: n for key, n in shape._asdict().items() if n > 1 or key == "dp"}
    if rng.random() < 0.7:
        chosen["micro_batch"] = rng.choice((1, 2, 3, 5))
    may_split = shape.pp > 1 and section.mode != "forward"
    split = may_split and rng.random() < 0.4
    if split:
        chosen["backward"] = "split"
    if section.mode != "forward":
        chosen["recompute"] = rng.choice(("none", "selective", "full"))
    if shape.pp > 1 and rng.random() < 0.3:
        chosen |= {"chunks": 2, "placement": rng.choice(("loop", "v"))}
    chosen["sharding"] = rng.choice(
        [s for s in ("none", "zero1", "zero2", "zero3") if _may_shard(section, s, split)]
    )
    if shape.cp > 1:
        chosen["cp_per"] = rng.choice(("micro_batch", "section"))
    if shape.tp > 1 and rng.random() < 0.25:
        chosen["norms"] = "sequence"
    if shape.tp > 1:
        chosen["overlap"] = rng.choice(OVERLAPS)
    offloads = ["optimizer"] if section.mode == "train" else ["weights"]
    if section.mode != "forward" and not split:
        offloads.append("activations")
    if rng.random() < 0.35:
        chosen["offload"] = rng.choice(offloads)
    yield from (f"{section.name}.{key}={value}" for key, value in chosen.items())


def _draw_ep(rng: random.Random, section: Section, shape: Shape, experts: int) -> Iterator[str]:
    """Draws mostly a number of parts that experts may form, inside a replica or over several."""
    tp, dp = shape.tp, shape.dp
    has_experts = experts > 0 and any("experts" in name for name in section.params)
    fitting = [
        n
        for n in (2, 4)
        if has_experts and experts % n == 0 and (tp % n == 0 or (n % tp == 0 and dp % (n // tp) == 0))
    ]
    if fitting and rng.random() < 0.8:
        yield f"{section.name}.ep={rng.choice(fitting)}"


def _may_shard(section: Section, sharding: str, split: bool) -> bool:
    return sharding in (
        ("none", "zero3") if section.mode != "train" else ("none", "zero1", "zero2", "zero3")
    ) and not (split and sharding == "zero3")


def plan_without_refused_pins(
    wanted: WantedPlan, planned: Callable[[CompileOptions], CompiledPlan]
) -> tuple[WantedPlan, CompiledPlan]:
    """Drops refused pins one by one; returns what is left and its plan. Raises UserError if it is refused
    without pins."""
    try:
        made = planned(wanted.options)
        if wanted.run_options[:1] == ("--run-ahead",) and not cross_step_prefetch.find_prefetchable_sections(
            made.plan, SectionGraph(made.plan)
        ):
            wanted = replace(wanted, run_options=())
        return wanted, made
    except UserError as refusal:
        if not wanted.pins:
            raise
        return plan_without_refused_pins(
            replace(
                wanted,
                pins=tuple(pin for pin in wanted.pins if pin not in _find_refused_pins(wanted.pins, refusal)),
            ),
            planned,
        )


def _find_refused_pins(pins: Sequence[str], refusal: UserError) -> list[str]:
    """Returns the pin that the message or its remedy names, else the last one; and the section's dp if its
    tp, pp or cp changes."""
    named = next((pin for pin in pins if pin in refusal.message), "")
    named = named or next((pin for pin in pins if pin.partition("=")[0] in refusal.remedy), pins[-1])
    section, _, choice = named.rpartition(".")
    return [
        pin
        for pin in pins
        if pin == named or (choice[:3] in ("tp=", "pp=", "cp=") and pin.startswith(f"{section}.dp="))
    ]


@dataclass(frozen=True)
class RunOutcome:
    """A plan without its refused pins, its features, and the error of its run, "" if it is exact."""

    granted: WantedPlan
    plan_features: tuple[str, ...] = ()
    error: str = ""


def try_plan(model: ReferencedModel, wanted: WantedPlan, folder: Path) -> RunOutcome:
    """Runs the model under a plan and compares it with its reference."""
    granted, has = wanted, tuple[str, ...]()
    try:
        granted, made = plan_without_refused_pins(wanted, model.plan_with)
        has = (
            (*list_features(made), " ".join(granted.run_options))
            if granted.run_options
            else list_features(made)
        )
        wrong = model.list_differences(made, folder, *granted.run_options)
    except Exception as defect:  # a plan that fails is a finding, and the others are still to be tried
        return RunOutcome(granted, has, f"{granted}: {type(defect).__name__}: {defect}")
    return RunOutcome(granted, has, f"{granted}: {wrong[0]}" if wrong else "")


def list_features(made: CompiledPlan) -> tuple[str, ...]:
    """Returns the features of a plan other than replicas: "tp=2", "zero1", "recompute=full" and so on."""
    found = {made.plan.dtype, f"ranks={made.plan.world_size}"} - {""}
    for s in made.plan.user_sections:
        found |= {
            f"{axis}={n}" for axis in ("tp", "pp", "cp", "dp", "ep") if (n := getattr(s.mesh, axis)) > 1
        }
        found |= {f"cp per {s.cp_per}"} if s.may_deal else set()
        found |= {"norms=sequence" + " with cp" * (s.mesh.cp > 1)} if s.norms == "sequence" else set()
        found |= {s.sharding, f"recompute={s.recompute}"} - {"none", "recompute=none"}
    found |= {f"chunks in a {s.placement}" for s in made.plan.sections if s.chunks > 1}
    found |= {"split backward" for s in made.plan.sections if s.weight_permille}
    return tuple(sorted(found))
