"""Each baseline's best step on the same samples, devices and costs as a plan of secc.

Layouts are ranked in closed form from the dataset's mean samples; of the best the order is computed, without
programs and messages, unless their work alone (`bound`) takes longer than orders that are known; those whose
order is shortest are simulated, and the shortest step that holds no more than there is memory counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from secc.alloc.problem.candidates import update_ns
from secc.baselines.layout import Base, Layout, base, planned
from secc.baselines.layout_bound import least
from secc.baselines.packing import Batch, cuts
from secc.baselines.schemes import SCHEMES, Scheme
from secc.baselines.search_space import Space
from secc.errors import UserError
from secc.process_map import mapped
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.batch_packing import Lot
from secc.runtime.schedule.scheduler import Arranged
from secc.simulate.events import Simulated
from secc.simulate.simulator import simulate

ALL = "all"
SIMULATED = 5  # layouts of a baseline that are simulated at once
ROUNDS = 4  # of them, until one fits
LOOKED = 8  # whose orders are computed at a time


@dataclass(frozen=True)
class Found:
    """A baseline's best: its step time, the devices that have work, and the layout as text. Without a layout
    that fits all are None."""

    step_time_s: float | None
    gpus: int | None
    layout: str


def names_of(text: str) -> list[str]:
    """The baselines named in `all` or a list such as `uniform,mimo`. Raises UserError for one that there is
    not."""
    names = list(SCHEMES) if text == ALL else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SCHEMES]
    if unknown or not names:
        raise UserError(
            f"there is no baseline {', '.join(unknown) or text!r}",
            remedy=f"baselines are {', '.join(SCHEMES)}, or all",
        )
    return names


class Comparison:
    """The baselines of one plan. Raises UserError for a directory without the IR of a plan."""

    def __init__(self, directory: Path) -> None:
        self.base: Base = base(directory)
        self.space = Space(self.base)

    def best(self, name: str, batches: Sequence[Sequence[SampleMeta]]) -> Found:
        """The best layout of a baseline, by its mean step over the global batches."""
        scheme = SCHEMES[name]
        layouts = scheme.layouts(self.space, Batch(self.base.plan, batches[0]).anchor)
        for _ in range(ROUNDS):
            some = [layouts[i] for i in self._ranked(layouts, scheme, batches[0])]
            if (found := self._shortest(some, scheme, batches)) is not None:
                return found
            layouts = [layout for layout in layouts if layout not in some]
        return Found(None, None, "no layout fits")

    def _shortest(
        self, layouts: Sequence[Layout], scheme: Scheme, batches: Sequence[Sequence[SampleMeta]]
    ) -> Found | None:
        """The layout with the shortest simulated steps, None where none of them fits."""
        if not layouts:
            return None
        first, *others = layouts
        steps = mapped(lambda samples: self._step(first, scheme, samples), batches)
        most = None if None in steps else sum(ns for ns in steps if ns is not None)
        times = [most, *mapped(lambda layout: self._shorter(layout, scheme, batches, most), others)]
        fitting = [(time, i) for i, time in enumerate(times) if time is not None]
        if not fitting:
            return None
        time, i = min(fitting)
        return Found(time / len(batches) / 1e9, layouts[i].ranks, describe(layouts[i]))

    def _ranked(self, layouts: Sequence[Layout], scheme: Scheme, samples: Sequence[SampleMeta]) -> list[int]:
        """The places of those with the shortest orders. Those that could take the least are looked at first,
        until no other can be among the shortest."""
        bounds = mapped(lambda layout: self._least(layout, scheme, samples) + self._update(layout), layouts)
        left = sorted(range(len(layouts)), key=lambda i: bounds[i])
        looks: list[tuple[int, int]] = []
        while left and (len(looks) < SIMULATED or bounds[left[0]] < looks[-1][0]):
            some, left = left[:LOOKED], left[LOOKED:]
            found = mapped(lambda i: self._look(layouts[i], scheme, samples), some)
            looks = sorted([*looks, *zip(found, some, strict=True)])[:SIMULATED]
        return [i for _, i in looks]

    def _least(self, layout: Layout, scheme: Scheme, samples: Sequence[SampleMeta]) -> int:
        """Ns that no order of its micro-batches can beat."""
        batch = Batch(planned(self.base, layout), samples)
        return least(batch.plan, batch.costs, cuts(batch, scheme.order, layout.samples))

    def _look(self, layout: Layout, scheme: Scheme, samples: Sequence[SampleMeta]) -> int:
        """Ns of a step by its order alone, and of the longest update."""
        return arranged(planned(self.base, layout), samples, scheme, layout).makespan + self._update(layout)

    def _update(self, layout: Layout) -> int:
        parts = ((self.space.rank(n, p.chosen.tp, p.chosen.pp), p.chosen) for n, p in layout.parts.items())
        return max(update_ns(self.base.work, load, c.dp, c.sharding) for load, c in parts)

    def _shorter(
        self, layout: Layout, scheme: Scheme, batches: Sequence[Sequence[SampleMeta]], most: int | None
    ) -> int | None:
        """Ns of the steps together, None where one of them does not fit, or they take longer than `most`."""
        found = [self._least(layout, scheme, samples) for samples in batches]
        for k, samples in enumerate(batches):
            if most is not None and sum(found) > most:
                return None
            if (own := self._step(layout, scheme, samples)) is None:
                return None
            found[k] = own
        return sum(found)

    def _step(self, layout: Layout, scheme: Scheme, samples: Sequence[SampleMeta]) -> int | None:
        """Ns of a step, None where it holds more than a rank has memory for."""
        found = step(planned(self.base, layout), samples, scheme, layout)
        return found.end if fullest(found, layout) <= self.space.capacity else None


def arranged(plan: Plan, samples: Sequence[SampleMeta], scheme: Scheme, layout: Layout) -> Arranged:
    """The order of one step of a baseline."""
    return Arranged(plan, samples, cuts(Batch(plan, samples), scheme.order, layout.samples), layout.ahead)


def step(plan: Plan, samples: Sequence[SampleMeta], scheme: Scheme, layout: Layout) -> Simulated:
    """One step of a baseline. Raises ScheduleError for a schedule that must not run, which would be an error
    of this package."""
    return simulate(plan, samples, arranged(plan, samples, scheme, layout).schedule())


def fullest(found: Simulated, layout: Layout) -> int:
    """Bytes on the rank of a step that holds the most: what stays, and of each section the most that is in
    flight at once.

    A sample that is larger than all that the plan lists counts as the largest of these: neither plans nor
    layouts are made for it.
    """
    plan, needs = found.plan, Counter[int]()
    costs = Costs(plan, found.samples)
    lots = {s.name: [m.samples for m in found.schedule.micro_batches[s.name]] for s in plan.sections}
    kept = {
        s.name: _kept(costs, s, lots[s.name], layout.parts[s.whole].memory.largest) for s in plan.sections
    }
    changes: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for c in (c for c in found.compute if kept[c.section]):
        size = kept[c.section][c.micro]
        changes[c.section, c.rank].append((c.start, 1, size) if c.kind == "F" else (c.end, -1, -size))
    for s in plan.sections:
        memory = layout.parts[s.whole].memory
        for rank in s.mesh.ranks[:: s.mesh.tp]:
            own = sorted(changes[s.name, rank])
            number, size = (max(accumulate(change[i] for change in own), default=0) for i in (1, 2))
            needs[rank] += (
                memory.total(1) if s.mode == "forward" else memory.total(number) - memory.kept(number) + size
            )
    return max(needs.values())


def _kept(costs: Costs, section: Section, lots: Sequence[Lot], largest: int) -> list[int]:
    """Bytes that micro-batches keep; of one sample no more than the largest listed one does, where samples
    are listed."""
    return [
        min(size, largest or size) if len(lot) == 1 else size
        for lot, size in zip(lots, costs.kept(section, lots), strict=False)
    ]


def describe(layout: Layout) -> str:
    """A layout for people: `vision dp4, language_model dp7 tp2 pp2; 4 samples a micro-batch`."""
    return f"{', '.join(_parts(layout))}; {layout.samples} mean samples a micro-batch"


def _parts(layout: Layout) -> Iterable[str]:
    for name, part in layout.parts.items():
        c = part.chosen
        more = "".join(f" {key}{n}" for key, n in (("tp", c.tp), ("pp", c.pp)) if n > 1)
        again = f" recompute {c.recompute}" if c.recompute != "none" else ""
        yield f"{name} dp{c.dp}{more}{again}"
