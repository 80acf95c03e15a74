"""The first pass of a step, for losses that depend on sums over the global batch (balance losses under
`--balance-loss global`, any function under `--global-sums`) or on rows of all its samples (contrastive losses
under `--gather`).

A statistic is a sum over all samples of what sections compute, such as one number for each expert. Rows are
summed, too, each rank having zeros where it has no samples. They have to be known before the first backward,
so a step begins with a forward of all micro-batches without gradients, in train mode and with the step's
random numbers, on the ranks and in the order of an evaluation. Sums over ranks are in float64. The pass that
trains reads them (`SectionModule.statistic`, `SectionModule.gathered`). Buffers that forwards change are put
back, so that they change once in a step.

A sum may depend on another one (a mean of losses that are compared with a mean over the batch). Then
a second pass, which reads what the first one found, finds it, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from secc.runtime.plan.schema import Plan, is_gathered, is_statistic
from secc.runtime.plan.step_program import MicroBatch, SampleMeta
from secc.runtime.schedule.scheduler import ScheduleCache
from secc.runtime.sections.base import Batch
from secc.runtime.sections.batch_statistic import BatchRows, BatchStatistic, BatchValues
from secc.runtime.training.engine import Engine, StepInput
from secc.runtime.training.evaluation_data import evaluation_plan

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def count_first_passes(plan: Plan) -> int:
    """Returns the number of first passes of a step: more than one if some statistic depends on another."""
    return max((t.first_pass for t in plan.terms if is_statistic(t.name)), default=0)


def sum_statistics(
    plan: Plan,
    numerators: Mapping[str, torch.Tensor],
    coefficients: Mapping[str, float],
    samples: int,
    sum_over_ranks: SumOverRanks,
) -> BatchValues:
    """Returns the statistics and rows of a batch of `samples`. numerators: this rank's sums, by term.
    sum_over_ranks: sums a vector in float64; it is called once, on every rank at the same point."""
    terms = [t for t in plan.terms if is_statistic(t.name)]
    sizes = [t.entries * (samples if is_gathered(t.name) else 1) for t in terms]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    parts = dict(zip((t.name for t in terms), flat.split(sizes), strict=True))
    for name, part in parts.items():
        if name in numerators:
            part.copy_(numerators[name].flatten())
    found = dict[str, BatchStatistic | BatchRows]()
    for t, total in zip(terms, sum_over_ranks(flat).split(sizes), strict=True):
        if is_gathered(t.name):
            found[t.name] = BatchRows(total.view(samples, t.entries))
        elif t.name in coefficients:
            found[t.name] = BatchStatistic(coefficients[t.name] * total, coefficients[t.name] * samples)
    return found


class FirstPass:
    """Runs first passes on the sections, messages and process groups of the training `engine`. All ranks make
    it and call it at the same points."""

    def __init__(self, plan: Plan, model: nn.Module, engine: Engine, order: str = "wavefront") -> None:
        self.plan, self._model = evaluation_plan(plan), model
        self.schedule = ScheduleCache(self.plan, order)
        self._engine = Engine(
            self.plan,
            engine.sections,
            engine.transport.for_plan(self.plan),
            lambda section: None,
            engine.trace,
            groups=engine.groups,
            passes=engine.gatherers,
            evaluates=engine.evaluates,
            exchanges=engine.exchanges,
            norms=engine.norms,
            stopwatch=engine.stopwatch,
            before_compute=engine.before_compute,
        )

    def find_statistics(
        self,
        samples: Sequence[SampleMeta],
        load_batch: Callable[[MicroBatch], Batch],
        coefficients: Mapping[str, float],
        seed: int,
        sum_over_ranks: SumOverRanks,
    ) -> BatchValues:
        """Returns the statistics and rows of a global batch. Collective."""
        found: BatchValues = {}
        for _ in range(count_first_passes(self.plan)):
            step = StepInput(self.schedule(samples), samples, load_batch, None, seed, statistics=found)
            with torch.no_grad(), _kept_buffers(self._model), self._engine.stopwatch.paused():
                self._engine.run_step(step)
            numerators = self._engine.numerators
            found = sum_statistics(self.plan, numerators, coefficients, len(samples), sum_over_ranks)
        return found


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Gives buffers back the values that they have now."""
    kept = [(b, b.clone()) for b in model.buffers() if not b.is_meta]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
