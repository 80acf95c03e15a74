"""Draws plans at random: ranks for each section, shared or not, and every choice that a user may pin or ask
of a run.

A draw keeps to what may be pinned at all (a split backward needs stages, a frozen section has nothing to
shard but its parameters). What the compiler refuses beyond that, for a model's own reasons (heads that tp
does not divide, too few layers), `grant` leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from secc.driver.compile import Compiled, Options
from secc.errors import UserError
from secc.runtime.plan.schema import Section
from secc.runtime.plan.section_graph import Graph
from secc.runtime.schedule import cross_step_prefetch
from tests.e2e.reference_runs import Captured

MOST_RANKS = 6
GLOBAL_BATCHES = (12, 7)
TP, PP = (1, 2, 4), (1, 2, 3)
FLOWS = (
    (),
    (),
    ("--comm", "rounds"),
    ("--run-ahead", "0"),
    ("--run-ahead", "0.01"),
    ("--order", "dataset"),
    ("--debug-comm",),
)


@dataclass(frozen=True)
class Wanted:
    """A way to distribute a model: processes, samples of a step, pins by section, the dtype, and options of
    the run."""

    ranks: int
    global_batch: int
    pins: tuple[str, ...]
    dtype: str = ""
    run: tuple[str, ...] = ()

    @property
    def options(self) -> Options:
        """What `secc compile` is asked."""
        return Options(
            cluster=f"local:{self.ranks}", global_batch=self.global_batch, set=self.pins, dtype=self.dtype
        )

    def __str__(self) -> str:
        words = [f"{self.ranks} ranks", f"{self.global_batch} samples", *self.pins, self.dtype, *self.run]
        return " ".join(w for w in words if w)


def random_plan(rng: random.Random, sections: Sequence[Section], dtypes: Sequence[str] = ("",)) -> Wanted:
    """A plan of two to six ranks for a model with these sections."""
    groups = _groups(rng, [s.name for s in sections])
    rng.shuffle(groups)  # who is cut first has most ranks to choose from
    pins, ranks = list[str](), 0
    for left, names in zip(reversed(range(len(groups))), groups, strict=True):
        least = 2 if len(groups) == 1 else 1
        tp, pp, dp = _shape(rng, range(least, MOST_RANKS - ranks - left + 1))
        ranks += tp * pp * dp
        pins += [f"{name}.with={names[0]}" for name in names[1:]]
        for section in (s for s in sections if s.name in names):
            shape = (tp, pp, dp) if section.name == names[0] else _shape(rng, (tp * pp * dp,))
            pins += _section(rng, section, *shape)
    return Wanted(ranks, rng.choice(GLOBAL_BATCHES), tuple(pins), rng.choice(dtypes), rng.choice(FLOWS))


def _groups(rng: random.Random, names: Sequence[str]) -> list[list[str]]:
    """Sections by the devices they share: mostly each has its own."""
    found: list[list[str]] = []
    for name in names:
        if found and rng.random() < 0.2:
            rng.choice(found).append(name)
        else:
            found.append([name])
    return found


def _shape(rng: random.Random, sizes: Container[int]) -> tuple[int, int, int]:
    """tp, pp and dp for as many ranks as one of `sizes`; each way to cut is as likely as any other."""
    found = [
        (tp, pp, dp) for tp in TP for pp in PP for dp in range(1, MOST_RANKS + 1) if tp * pp * dp in sizes
    ]
    tp, pp = rng.choice(list(dict.fromkeys((tp, pp) for tp, pp, _ in found)))
    return rng.choice([shape for shape in found if shape[:2] == (tp, pp)])


def _section(rng: random.Random, section: Section, tp: int, pp: int, dp: int) -> Iterator[str]:
    chosen: dict[str, object] = {
        key: n for key, n in (("tp", tp), ("pp", pp), ("dp", dp)) if n > 1 or key == "dp"
    }
    if rng.random() < 0.7:
        chosen["micro_batch"] = rng.choice((1, 2, 3, 5))
    split = pp > 1 and tp == 1 and section.mode != "forward" and rng.random() < 0.4
    if split:
        chosen["backward"] = "split"
    elif section.mode != "forward":
        chosen["recompute"] = rng.choice(("none", "selective", "full"))
    chosen["sharding"] = rng.choice(
        [s for s in ("none", "zero1", "zero2", "zero3") if _shards(section, s, split)]
    )
    if tp > 1 and rng.random() < 0.25:
        chosen["norms"] = "sequence"
    yield from (f"{section.name}.{key}={value}" for key, value in chosen.items())


def _shards(section: Section, sharding: str, split: bool) -> bool:
    return sharding in (
        ("none", "zero3") if section.mode != "train" else ("none", "zero1", "zero2", "zero3")
    ) and not (split and sharding == "zero3")


def grant(wanted: Wanted, planned: Callable[[Options], Compiled]) -> tuple[Wanted, Compiled]:
    """The wish without what is refused, pin by pin, and its plan. Raises UserError if nothing is left to
    leave out."""
    try:
        made = planned(wanted.options)
        if wanted.run[:1] == ("--run-ahead",) and not cross_step_prefetch.sections(
            made.plan, Graph(made.plan)
        ):
            wanted = replace(wanted, run=())
        return wanted, made
    except UserError as refusal:
        if not wanted.pins:
            raise
        return grant(
            replace(
                wanted, pins=tuple(pin for pin in wanted.pins if pin not in _refused(wanted.pins, refusal))
            ),
            planned,
        )


def _refused(pins: Sequence[str], refusal: UserError) -> list[str]:
    """The pin that the message or its remedy names, else the last one; how many replicas there are, too,
    where that changes their size."""
    named = next((pin for pin in pins if pin in refusal.message), "")
    named = named or next((pin for pin in pins if pin.partition("=")[0] in refusal.remedy), pins[-1])
    section, _, choice = named.rpartition(".")
    return [
        pin
        for pin in pins
        if pin == named or (choice[:3] in ("tp=", "pp=") and pin.startswith(f"{section}.dp="))
    ]


@dataclass(frozen=True)
class Outcome:
    """A plan as it was granted, what it has, and what went wrong with its run, "" where it is exact."""

    granted: Wanted
    has: tuple[str, ...] = ()
    error: str = ""


def trial(model: Captured, wanted: Wanted, folder: Path) -> Outcome:
    """A run of the model under a plan as wanted, compared with its reference."""
    granted, has = wanted, tuple[str, ...]()
    try:
        granted, made = grant(wanted, model.planned)
        has = (*features(made), " ".join(granted.run)) if granted.run else features(made)
        wrong = model.differences(made, folder, *granted.run)
    except Exception as defect:  # a plan that fails is a finding, and the others are still to be tried
        return Outcome(granted, has, f"{granted}: {type(defect).__name__}: {defect}")
    return Outcome(granted, has, f"{granted}: {wrong[0]}" if wrong else "")


def features(made: Compiled) -> tuple[str, ...]:
    """What a plan has beside replicas: "tp=2", "zero1", "recompute=full" and their like."""
    found = {made.plan.dtype, f"ranks={made.plan.world_size}"} - {""}
    for s in made.plan.whole_sections:
        found |= {
            f"{axis}={n}" for axis, n in (("tp", s.mesh.tp), ("pp", s.mesh.pp), ("dp", s.mesh.dp)) if n > 1
        }
        found |= {s.sharding, f"recompute={s.recompute}"} - {"none", "recompute=none"}
    found |= {"split backward" for s in made.plan.sections if s.weight_permille}
    return tuple(sorted(found))
