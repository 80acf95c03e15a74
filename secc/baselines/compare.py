"""Finds each baseline's best step on the same samples, devices and costs as a plan.

Layouts are ranked in closed form from the dataset's mean samples. The orders of the best are computed,
without programs and messages, unless a bound on their work (`secc.baselines.layout_bound`) already exceeds
known orders. The layouts with the shortest orders are simulated, and the shortest step within memory counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from secc.alloc.problem.parameter_update import gradient_and_optimizer_ns
from secc.baselines.layout import BaselineContext, BaselineLayout, load_context, plan_from_layout
from secc.baselines.layout_bound import layout_lower_bound
from secc.baselines.packing import BaselineBatch, cut_micro_batches
from secc.baselines.schemes import SCHEMES, BaselineScheme
from secc.baselines.search_space import BaselineSpace
from secc.errors import UserError
from secc.process_map import map_in_processes
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.batch_packing import SamplePositions
from secc.runtime.schedule.scheduler import FixedSchedule
from secc.simulate.events import SimulatedStep
from secc.simulate.simulator import simulate

ALL_BASELINES = "all"
SIMULATED_AT_ONCE = 5  # layouts of a baseline that are simulated in one round
SIMULATION_ROUNDS = 4  # rounds at most, until a layout fits
ORDERED_AT_ONCE = 8  # layouts that are ordered before bounds are compared again


@dataclass(frozen=True)
class BaselineResult:
    """A baseline's best: step time, number of devices with work, and the layout as text. Both numbers are
    None if no layout fits."""

    step_time_s: float | None
    gpus: int | None
    layout: str


def parse_baseline_names(text: str) -> list[str]:
    """Baselines named by `all` or a list such as `uniform,mimo`. Raises UserError for an unknown name."""
    names = (
        list(SCHEMES) if text == ALL_BASELINES else [name.strip() for name in text.split(",") if name.strip()]
    )
    unknown = [name for name in names if name not in SCHEMES]
    if unknown or not names:
        raise UserError(
            f"expected names of baselines, got {', '.join(unknown) or text!r}",
            remedy=f"baselines are {', '.join(SCHEMES)}, or all",
        )
    return names


class BaselineComparison:
    """The baselines of one plan. Raises UserError for a directory without the IR of a plan."""

    def __init__(self, directory: Path) -> None:
        self.base: BaselineContext = load_context(directory)
        self.space = BaselineSpace(self.base)

    def find_best(self, name: str, batches: Sequence[Sequence[SampleMeta]]) -> BaselineResult:
        """The best layout of a baseline, by its mean step over the global batches."""
        scheme = SCHEMES[name]
        layouts = scheme.layouts(self.space, BaselineBatch(self.base.plan, batches[0]).anchor)
        for _ in range(SIMULATION_ROUNDS):
            ranked = [layouts[i] for i in self._rank_by_order(layouts, scheme, batches[0])]
            if (result := self._shortest_simulated(ranked, scheme, batches)) is not None:
                return result
            layouts = [layout for layout in layouts if layout not in ranked]
        return BaselineResult(None, None, "no layout fits")

    def _shortest_simulated(
        self,
        layouts: Sequence[BaselineLayout],
        scheme: BaselineScheme,
        batches: Sequence[Sequence[SampleMeta]],
    ) -> BaselineResult | None:
        """The layout with the shortest simulated steps; None if none fits memory."""
        if not layouts:
            return None
        first, *others = layouts
        steps = map_in_processes(lambda samples: self._simulate_if_fits(first, scheme, samples), batches)
        most = None if None in steps else sum(ns for ns in steps if ns is not None)
        times = [
            most,
            *map_in_processes(lambda layout: self._total_if_shorter(layout, scheme, batches, most), others),
        ]
        fitting = [(time, i) for i, time in enumerate(times) if time is not None]
        if not fitting:
            return None
        time, i = min(fitting)
        return BaselineResult(time / len(batches) / 1e9, layouts[i].used_ranks, describe_layout(layouts[i]))

    def _rank_by_order(
        self, layouts: Sequence[BaselineLayout], scheme: BaselineScheme, samples: Sequence[SampleMeta]
    ) -> list[int]:
        """Indices of the layouts with the shortest orders.

        Layouts are ordered in the sequence of their bounds, until no remaining bound is below the best
        orders.
        """
        bounds = map_in_processes(
            lambda layout: self._lower_bound(layout, scheme, samples) + self._longest_update_ns(layout),
            layouts,
        )
        remaining = sorted(range(len(layouts)), key=lambda i: bounds[i])
        shortest: list[tuple[int, int]] = []
        while remaining and (len(shortest) < SIMULATED_AT_ONCE or bounds[remaining[0]] < shortest[-1][0]):
            next_layouts, remaining = remaining[:ORDERED_AT_ONCE], remaining[ORDERED_AT_ONCE:]
            ordered_ns = map_in_processes(
                lambda i: self._ordered_step_ns(layouts[i], scheme, samples), next_layouts
            )
            shortest = sorted([*shortest, *zip(ordered_ns, next_layouts, strict=True)])[:SIMULATED_AT_ONCE]
        return [i for _, i in shortest]

    def _lower_bound(
        self, layout: BaselineLayout, scheme: BaselineScheme, samples: Sequence[SampleMeta]
    ) -> int:
        """Ns that no order of the layout's micro-batches can beat."""
        batch = BaselineBatch(plan_from_layout(self.base, layout), samples)
        return layout_lower_bound(
            batch.plan, batch.costs, cut_micro_batches(batch, scheme.order, layout.samples_per_micro_batch)
        )

    def _ordered_step_ns(
        self, layout: BaselineLayout, scheme: BaselineScheme, samples: Sequence[SampleMeta]
    ) -> int:
        """Ns of a step by its order alone, plus the longest gradient reduction and optimizer step."""
        return order_step(
            plan_from_layout(self.base, layout), samples, scheme, layout
        ).makespan + self._longest_update_ns(layout)

    def _longest_update_ns(self, layout: BaselineLayout) -> int:
        parts = ((self.space.rank_load(n, p.chosen.shape), p.chosen) for n, p in layout.sections.items())
        return max(
            gradient_and_optimizer_ns(self.base.work, load, c.dp, c.micro_batch, c.sharding, c.recompute)
            for load, c in parts
        )

    def _total_if_shorter(
        self,
        layout: BaselineLayout,
        scheme: BaselineScheme,
        batches: Sequence[Sequence[SampleMeta]],
        most: int | None,
    ) -> int | None:
        """Sum of the simulated steps in ns; None if one does not fit memory, or the sum exceeds `most`."""
        step_ns = [self._lower_bound(layout, scheme, samples) for samples in batches]
        for k, samples in enumerate(batches):
            if most is not None and sum(step_ns) > most:
                return None
            if (simulated_ns := self._simulate_if_fits(layout, scheme, samples)) is None:
                return None
            step_ns[k] = simulated_ns
        return sum(step_ns)

    def _simulate_if_fits(
        self, layout: BaselineLayout, scheme: BaselineScheme, samples: Sequence[SampleMeta]
    ) -> int | None:
        """Ns of a simulated step, None if a rank exceeds memory."""
        simulated = simulate_step(plan_from_layout(self.base, layout), samples, scheme, layout)
        return simulated.end if peak_rank_bytes(simulated, layout) <= self.space.capacity else None


def order_step(
    plan: Plan, samples: Sequence[SampleMeta], scheme: BaselineScheme, layout: BaselineLayout
) -> FixedSchedule:
    """Orders one step of a baseline."""
    return FixedSchedule(
        plan,
        samples,
        cut_micro_batches(BaselineBatch(plan, samples), scheme.order, layout.samples_per_micro_batch),
        layout.forwards_first,
    )


def simulate_step(
    plan: Plan, samples: Sequence[SampleMeta], scheme: BaselineScheme, layout: BaselineLayout
) -> SimulatedStep:
    """Simulates one step of a baseline. A ScheduleError would be a bug of this package."""
    return simulate(plan, samples, order_step(plan, samples, scheme, layout).emit_schedule())


def peak_rank_bytes(simulated: SimulatedStep, layout: BaselineLayout) -> int:
    """Bytes on the fullest rank of a step: what stays there, plus of each section the most that is in flight
    at once.

    A sample that is larger than all listed ones counts as the largest of these: neither plans nor baselines
    are made for it.
    """
    plan, needs = simulated.plan, Counter[int]()
    costs = PredictedCosts(plan, simulated.samples)
    samples_of = {
        s.name: [m.samples for m in simulated.schedule.micro_batches[s.name]] for s in plan.sections
    }
    kept_by_section = {
        s.name: _kept_bytes(
            costs, s, samples_of[s.name], layout.sections[s.user_section_name].memory.largest_sample
        )
        for s in plan.sections
    }
    changes: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for c in (c for c in simulated.compute if kept_by_section[c.section]):
        size = kept_by_section[c.section][c.micro]
        changes[c.section, c.rank].append((c.start, 1, size) if c.kind == "F" else (c.end, -1, -size))
    for s in plan.sections:
        memory = layout.sections[s.user_section_name].memory
        for rank in s.mesh.ranks[:: s.mesh.replica_size]:
            changes_of_rank = sorted(changes[s.name, rank])
            number, size = (
                max(accumulate(change[i] for change in changes_of_rank), default=0) for i in (1, 2)
            )
            needs[rank] += (
                memory.total_bytes(1)
                if s.mode == "forward"
                else memory.total_bytes(number) - memory.activation_bytes(number) + size
            )
    return max(needs.values())


def _kept_bytes(
    costs: PredictedCosts, section: Section, micro_batches: Sequence[SamplePositions], largest: int
) -> list[int]:
    """Bytes that micro-batches keep; a single sample counts at most as the largest listed one, if samples
    are listed."""
    return [
        min(size, largest or size) if len(positions) == 1 else size
        for positions, size in zip(micro_batches, costs.saved_bytes(section, micro_batches), strict=False)
    ]


def describe_layout(layout: BaselineLayout) -> str:
    """A layout as text: `vision dp4, language_model dp7 tp2 pp2; 4 samples a micro-batch`."""
    sections = ", ".join(_describe_sections(layout))
    return f"{sections}; {layout.samples_per_micro_batch} mean samples a micro-batch"


def _describe_sections(layout: BaselineLayout) -> Iterable[str]:
    for name, part in layout.sections.items():
        c = part.chosen
        degrees = {"tp": c.tp, "pp": c.pp, "cp": c.cp, "ep": c.ep}
        more = "".join(f" {key}{n}" for key, n in degrees.items() if n > 1)
        again = f" recompute {c.recompute}" if c.recompute != "none" else ""
        yield f"{name} dp{c.dp}{more}{again}"
