"""Proves the shortest schedule of a small batch with CP-SAT: a yardstick for the bounds and for the
scheduler.

  Sets
      U        visits: a sample in a section (`secc.bounds.work`), each with a forward and, where owed, a
          backward
      R(u)     replicas of u's section, by their first ranks

  Variables
      x[u,r]   0/1: u runs on replica r of R(u) and keeps all its ranks busy
      f[u]     start of u's forward
      b[u]     start of u's backward
      w[u]     start of the second part (weight gradients) of a split backward
      T        step time

  Constraints, each family with the method that adds it
      sum_r x[u,r] = 1;  tasks on a rank do not overlap                                    _add_replica_choice
      b[u] >= f[u] + forward[u];  f[v] >= f[u] + forward[u] + message along each edge (u, v),
      b[u] >= b[v] + backward[v] + message where its gradient returns;
      w[u] >= b[u] + backward[u]                                                           _add_precedences
      T >= the end of each task + the closing time of its section                          _add_step_end
      a sample is on the same replica of all stages of a pipeline                          _add_stage_replicas
      a stage holds at most its in-flight limit, from f to the end of the last task
          _add_in_flight_limits
      replicas with equal ranks are interchangeable: the first visit goes to the first     _break_symmetry

Objective: the least T. Every micro-batch is one sample, so plans with larger micro-batches are refused.
Stages may take samples in different orders. In-flight limits are enforced for pipelines without other
consumers only; elsewhere the scheduler may exceed them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from secc.bounds.pipeline_bounds import has_in_flight_slots
from secc.bounds.work import BatchWork, SampleVisit
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.step_program import compute_kinds, owes_backward

SOLVER_SEED = 7


@dataclass(frozen=True)
class OptimalSchedule:
    """The best schedule found: step time and proven lower bound in ns, and by (section, sample) the rank,
    the start of the forward, and the start of the backward (of the forward if none is owed)."""

    step_ns: int
    bound_ns: int
    placements: dict[tuple[str, int], tuple[int, int, int]]

    @property
    def is_optimal(self) -> bool:
        """Whether the schedule is proven to be the shortest."""
        return self.step_ns == self.bound_ns


def solve_schedule(
    work: BatchWork, limit: float = 10.0, hint_ns: int | None = None
) -> OptimalSchedule | None:
    """Finds the shortest schedule within `limit` units of deterministic time (about seconds); None if none
    was found.

    `hint_ns`: step time of a known schedule, which prunes the search. Raises ValueError if micro-batches may
    hold several samples.
    """
    if any(s.most_samples != 1 for s in work.sections):
        raise ValueError("an exact schedule needs micro-batches of one sample")
    model = _ScheduleModel(work, hint_ns)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SOLVER_SEED
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model.cp)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return None
    return OptimalSchedule(
        round(solver.objective_value), round(solver.best_objective_bound), model.read_placements(solver)
    )


class _ScheduleModel:
    """CP-SAT model of a batch's work."""

    def __init__(self, work: BatchWork, hint_ns: int | None) -> None:
        self.work, self.cp = work, cp_model.CpModel()
        self.horizon = hint_ns if hint_ns is not None else _serial_ns(work)
        self.units = {(u.section, u.sample): u for units in work.visits.values() for u in units}
        self.owing_backward = {s.name for s in work.sections if owes_backward(s)}
        self.x = {
            k: {r: self.cp.new_bool_var(f"x{k}{r}") for r in work.replica_ranks[k[0]]} for k in self.units
        }
        self.forward = {
            k: self.cp.new_int_var(u.forward_head, self.horizon, f"f{k}") for k, u in self.units.items()
        }
        self.backward = {
            k: self.cp.new_int_var(u.backward_head or 0, self.horizon, f"b{k}")
            for k, u in self.units.items()
            if k[0] in self.owing_backward
        }
        split = {s.name for s in work.sections if compute_kinds(s)[-1] == "W"}
        self.weight = {k: self.cp.new_int_var(0, self.horizon, f"w{k}") for k in self.units if k[0] in split}
        self.step_time = self.cp.new_int_var(0, self.horizon, "T")
        self.replicas = {s.name: {ranks[0]: ranks for ranks in ranks_by_replica(s)} for s in work.sections}
        self.pipelines = [stages for stages in work.plan.pipelines.values() if len(stages) > 1]
        for family in (
            self._add_replica_choice,
            self._add_precedences,
            self._add_step_end,
            self._add_stage_replicas,
            self._add_in_flight_limits,
            self._break_symmetry,
        ):
            family()
        self.cp.minimize(self.step_time)

    def read_placements(self, solver: cp_model.CpSolver) -> dict[tuple[str, int], tuple[int, int, int]]:
        """Rank and starts of each visit in the solver's schedule."""
        placements: dict[tuple[str, int], tuple[int, int, int]] = {}
        for k, choice in self.x.items():
            rank = next(r for r, chosen in choice.items() if solver.boolean_value(chosen))
            start = solver.value(self.forward[k])
            placements[k] = rank, start, solver.value(self.backward[k]) if k in self.backward else start
        return placements

    def _add_replica_choice(self) -> None:
        jobs: dict[int, list[cp_model.IntervalVar]] = {}
        for k, u in self.units.items():
            self.cp.add_exactly_one(self.x[k].values())
            for rank, chosen in self.x[k].items():
                for start, duration in self._visit_jobs(k, u):
                    interval = self.cp.new_optional_fixed_size_interval_var(
                        start, duration, chosen, f"i{k}{rank}"
                    )
                    for busy in self.replicas[k[0]][rank]:
                        jobs.setdefault(busy, []).append(interval)
        for intervals in jobs.values():
            self.cp.add_no_overlap(intervals)

    def _visit_jobs(self, k: tuple[str, int], u: SampleVisit) -> list[tuple[cp_model.IntVar, int]]:
        """(start, duration) of each task of a visit, in order."""
        starts = (self.forward, self.backward, self.weight)
        return [
            (start[k], ns)
            for start, ns in zip(starts, (u.forward, u.backward, u.second_part), strict=True)
            if k in start
        ]

    def _add_precedences(self) -> None:
        for k, start in self.backward.items():
            self.cp.add(start >= self.forward[k] + self.units[k].forward)
        for arc in self.work.edges:
            for p, wait in arc.message_ns.items():
                src, dst = (arc.src, p), (arc.dst, p)
                self.cp.add(self.forward[dst] >= self.forward[src] + self.units[src].forward + wait)
                if arc.returns_gradient:
                    self.cp.add(self.backward[src] >= self.backward[dst] + self.units[dst].backward + wait)

        for k, start in self.weight.items():
            self.cp.add(start >= self.backward[k] + self.units[k].backward)

    def _add_step_end(self) -> None:
        for k, u in self.units.items():
            for start, duration in self._visit_jobs(k, u):
                self.cp.add(self.step_time >= start + duration + self.work.closing_ns[k[0]])

    def _add_stage_replicas(self) -> None:
        for first, *others in self.pipelines:
            for stage in others:
                for p in self.work.active_samples[stage.name]:
                    for a, b in zip(
                        self.work.replica_ranks[first.name], self.work.replica_ranks[stage.name], strict=True
                    ):
                        self.cp.add(self.x[first.name, p][a] == self.x[stage.name, p][b])

    def _add_in_flight_limits(self) -> None:
        for section in (s for s in self.work.sections if has_in_flight_slots(self.work, s)):
            visit_jobs = [(k, self._visit_jobs(k, u)) for k, u in self.units.items() if k[0] == section.name]
            for rank in self.work.replica_ranks[section.name]:
                intervals = [
                    self.cp.new_optional_interval_var(
                        jobs[0][0], self.cp.new_int_var(0, self.horizon, ""), end, self.x[k][rank], ""
                    )
                    for k, jobs in visit_jobs
                    for end in (jobs[-1][0] + jobs[-1][1],)
                ]
                self.cp.add_cumulative(intervals, [1] * len(intervals), section.in_flight)

    def _break_symmetry(self) -> None:
        """Fixes the first visit of interchangeable replicas to the first one.

        Replicas of a section can be renamed where no two sections share only some of their ranks. Stages of a
        pipeline are renamed together.
        """
        staged = {s.name for stages in self.pipelines for s in stages}
        sets = [frozenset(self.work.replica_ranks[s.name]) for s in self.work.sections]
        alone = {
            frozenset(self.work.replica_ranks[s.name]) for s in self.work.sections if s.name not in staged
        }
        if (
            self._shares_ranks_unevenly()
            or any(a & b for a in set(sets) for b in set(sets) if a != b)
            or len(set(sets)) < len(alone) + len(staged)
        ):
            return
        for ranks in alone:
            first = next((k for k in self.units if frozenset(self.work.replica_ranks[k[0]]) == ranks), None)
            if first is not None:
                self.cp.add(self.x[first][min(ranks)] == 1)
        for stages in self.pipelines:
            for p in self.work.active_samples[stages[0].name][:1]:
                self.cp.add(self.x[stages[0].name, p][self.work.replica_ranks[stages[0].name][0]] == 1)

    def _shares_ranks_unevenly(self) -> bool:
        """Whether sections share ranks in replicas that differ."""
        groups = {frozenset(ranks) for found in self.replicas.values() for ranks in found.values()}
        return any(a & b for a in groups for b in groups if a != b)


def _serial_ns(work: BatchWork) -> int:
    """Upper bound of any schedule: all tasks and messages one after the other."""
    jobs = sum(u.forward + u.backward + u.second_part for units in work.visits.values() for u in units)
    return (
        jobs
        + 2 * sum(sum(a.message_ns.values()) for a in work.edges)
        + max(work.closing_ns.values(), default=0)
    )
