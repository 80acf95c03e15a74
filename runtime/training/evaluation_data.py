"""The batches of an evaluation: which samples they hold, their schedules, and the plan that orders them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from secc.runtime.data.data_plane import DataPlane
from secc.runtime.data.epoch_order import EvaluationOrder
from secc.runtime.model.user_file import UserModel
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.schema import Plan
from secc.runtime.schedule.scheduler import ScheduleCache
from secc.runtime.training.step_planner import PlannedStep, plan_steps

_KEPT_BATCHES = 4  # of streams: the metadata of later batches are read before a batch is computed
SetName = str  # "" for the only set if `eval_dataset()` returns a dataset


def evaluation_plan(plan: Plan) -> Plan:
    """Returns the plan of a forward without gradients: the same sections on the same ranks."""
    sections = (
        dataclasses.replace(s, mode="forward", in_flight=0, room_bytes=0, weight_permille=0, cp_per="section")
        for s in plan.sections
    )
    edges = (dataclasses.replace(e, grad=False) for e in plan.edges)
    return dataclasses.replace(plan, sections=tuple(sections), edges=tuple(edges), run_ahead_gib=0.0)


class EvaluationData:
    """The batches of an evaluation and their schedules, for `plan_steps`. It forks a loader process: make it
    before process groups, threads and GPU contexts."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        user: UserModel,
        batch: int | None,
        order: str,
        trace: ChromeTrace,
        make_data_plane: Callable[[UserModel, EvaluationOrder], DataPlane],
    ) -> None:
        self.plan, self.rank, self.trace = evaluation_plan(plan), rank, trace
        batch = batch or plan.global_batch
        self.user = user.for_evaluation(_KEPT_BATCHES * batch)
        self.lengths = self.user.evaluation_lengths
        self.order = EvaluationOrder(list(self.lengths.values()), batch)
        self.schedule_batch = ScheduleCache(self.plan, order)
        self.data_plane = make_data_plane(self.user, self.order)
        self._next_step = 0
        self._widths_known = plan.widths != "global"

    def plan_pass(self, ahead: int) -> Iterator[tuple[SetName, PlannedStep]]:
        """Yields the batches of one pass over all sets, each with the set that it belongs to. Collective."""
        if not self._widths_known:
            self._find_widths()
        names = list(self.lengths)
        first = self._next_step
        self._next_step += len(self.order.batches)
        for step in plan_steps(self, first, self._next_step, ahead):
            yield names[self.order.batches[step.batch.step % len(self.order.batches)][0]], step

    def _find_widths(self) -> None:
        """Finds the widths of each set, if padded positions can reach the loss: then every micro-batch is as
        wide as if its set were one batch. Reads all metadata once. Collective."""
        numbers = [number for number, _, _ in self.order.batches]
        sizes: dict[int, list[dict[str, int]]] = {}
        for number in numbers:
            sizes.setdefault(number, []).append(self.data_plane.next_batch().sizes)
        self._next_step += len(numbers)
        padded = [s.name for s in self.plan.symbols if s.is_padded]
        totals = {number: combine_sizes(found, self.plan.symbols) for number, found in sizes.items()}
        widths = {number: {name: total[name] for name in padded} for number, total in totals.items()}
        self.data_plane.widths_of_set = lambda step: widths[numbers[step % len(numbers)]]
        self._widths_known = True
