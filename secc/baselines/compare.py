"""Each baseline's best step on the same samples, devices and costs as a plan of secc.

Layouts are ranked in closed form from the dataset's mean samples; the best few are simulated on the samples themselves, and the shortest
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from secc.baselines.layout import Base, Layout, base, planned
from secc.baselines.packing import Batch, cuts
from secc.baselines.schemes import SCHEMES, Scheme
from secc.baselines.space import Space
from secc.errors import UserError
from secc.runtime.plan import Plan
from secc.runtime.program import SampleMeta
from secc.runtime.wavefront import arranged_schedule
from secc.simulate.events import Simulated
from secc.simulate.machine import simulate

ALL = "all"


@dataclass(frozen=True)
class Found:
    """A baseline's best: its step time, the devices that have work, and the layout as text. Without a layout that fits all are None."""

    step_time_s: float | None
    gpus: int | None
    layout: str


def names_of(text: str) -> list[str]:
    """The baselines named in `all` or a list such as `uniform,mimo`. Raises UserError for one that there is not."""
    names = list(SCHEMES) if text == ALL else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SCHEMES]
    if unknown or not names:
        raise UserError(f"there is no baseline {', '.join(unknown) or text!r}", remedy=f"baselines are {', '.join(SCHEMES)}, or all")
    return names


class Comparison:
    """The baselines of one plan. Raises UserError for a directory without the IR of a plan."""

    def __init__(self, directory: Path) -> None:
        self.base: Base = base(directory)
        self.space = Space(self.base)

    def best(self, name: str, batches: Sequence[Sequence[SampleMeta]]) -> Found:
        """The best layout of a baseline, by its mean step over the global batches."""
        scheme = SCHEMES[name]
        anchor = Batch(self.base.plan, batches[0]).anchor
        found: list[tuple[int, Layout]] = []
        for layout in scheme.layouts(self.space, anchor):
            plan = planned(self.base, layout)
            found.append((sum(step(plan, samples, scheme, layout).end for samples in batches), layout))
        if not found:
            return Found(None, None, "no layout fits")
        time, layout = min(found, key=lambda pair: pair[0])
        return Found(time / len(batches) / 1e9, layout.ranks, describe(layout))


def step(plan: Plan, samples: Sequence[SampleMeta], scheme: Scheme, layout: Layout) -> Simulated:
    """One step of a baseline. Raises ScheduleError for a schedule that must not run, which would be an error of this package."""
    batch = Batch(plan, samples)
    return simulate(plan, samples, arranged_schedule(plan, samples, cuts(batch, scheme.order, layout.samples), layout.ahead))


def describe(layout: Layout) -> str:
    """A layout for people: `vision dp4, language_model dp7 tp2 pp2; 4 samples a micro-batch`."""
    return f"{', '.join(_parts(layout))}; {layout.samples} mean samples a micro-batch"


def _parts(layout: Layout) -> Iterable[str]:
    for name, part in layout.parts.items():
        c = part.chosen
        more = "".join(f" {key}{n}" for key, n in (("tp", c.tp), ("pp", c.pp)) if n > 1)
        again = f" recompute {c.recompute}" if c.recompute != "none" else ""
        yield f"{name} dp{c.dp}{more}{again}"
