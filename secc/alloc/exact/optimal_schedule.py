"""The proven shortest schedule of a small batch by CP-SAT: the yardstick for bounds and for the wavefront
order.

Sets
    U        units: a sample in a section (`secc.bounds.work`), each with a forward and, where one is owed, a
    backward R(u)     replicas of u's section, by their first ranks

Variables
    x[u,r]   0/1: u runs on replica r of R(u), which keeps all its ranks busy f[u]     start of u's forward;
    b[u] start of its backward;  w[u] start of the second part of a backward that is split T        time of
    the step

Constraints, each family by the function that adds it
    sum_r x[u,r] = 1;  the jobs on a rank do not overlap                                        `_place`
    b[u] >= f[u] + forward[u];  f[v] >= f[u] + forward[u] + wait along each edge (u, v),
    b[u] >= b[v] + backward[v] + wait where its gradient returns;  w[u] >= b[u] + backward[u]     `_order`
    T >= the end of each job + the closing of its section                                        `_end`
    a sample is on the same replica of all stages of a pipeline                                  `_stages`
    a stage holds at most as many as it has room for, from f to the end of the last job           `_room`
    replicas of one section with equal ranks' duties are alike: the first unit goes to the first  `_symmetry`

Objective: the least T. Every micro-batch is one sample, so plans with larger micro-batches are refused.
Stages may take samples in different orders. Room counts for pipelines that nothing else consumes; for others
it is a wish.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from secc.bounds.pipeline_bounds import has_slots
from secc.bounds.work import Unit, Work
from secc.runtime.plan.replica_routes import replicas
from secc.runtime.plan.step_program import computations, owes_backward

SEED = 7


@dataclass(frozen=True)
class Exact:
    """The best schedule found: its time in ns, the proven lower bound, and each unit's rank and starts, by
    (section, sample)."""

    ns: int
    bound_ns: int
    placed: dict[
        tuple[str, int], tuple[int, int, int]
    ]  # rank, start of forward, start of backward (of the forward where none is owed)

    @property
    def optimal(self) -> bool:
        return self.ns == self.bound_ns


def solve(work: Work, limit: float = 10.0, hint_ns: int | None = None) -> Exact | None:
    """The shortest schedule, within `limit` units of deterministic time (about seconds). None where no
    schedule was found in that time.

    `hint_ns` is the time of a known schedule, which prunes the search. Raises ValueError where a micro-batch
    may hold several samples.
    """
    if any(s.micro_batch != 1 for s in work.sections):
        raise ValueError("an exact schedule needs micro-batches of one sample")
    model = _Model(work, hint_ns)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model.cp)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return None
    return Exact(round(solver.objective_value), round(solver.best_objective_bound), model.placed(solver))


class _Model:
    """The CP-SAT model of a batch's work."""

    def __init__(self, work: Work, hint_ns: int | None) -> None:
        self.work, self.cp = work, cp_model.CpModel()
        self.horizon = hint_ns if hint_ns is not None else _serial(work)
        self.units = {(u.section, u.sample): u for units in work.units.values() for u in units}
        self.late = {s.name for s in work.sections if owes_backward(s)}
        self.x = {k: {r: self.cp.new_bool_var(f"x{k}{r}") for r in work.ranks[k[0]]} for k in self.units}
        self.forward = {
            k: self.cp.new_int_var(u.forward_head, self.horizon, f"f{k}") for k, u in self.units.items()
        }
        self.backward = {
            k: self.cp.new_int_var(u.backward_head or 0, self.horizon, f"b{k}")
            for k, u in self.units.items()
            if k[0] in self.late
        }
        split = {s.name for s in work.sections if computations(s)[-1] == "W"}
        self.weight = {k: self.cp.new_int_var(0, self.horizon, f"w{k}") for k in self.units if k[0] in split}
        self.time = self.cp.new_int_var(0, self.horizon, "T")
        self.replicas = {s.name: {ranks[0]: ranks for ranks in replicas(s)} for s in work.sections}
        self.pipelines = [stages for stages in work.plan.pipelines.values() if len(stages) > 1]
        for family in (self._place, self._order, self._end, self._stages, self._room, self._symmetry):
            family()
        self.cp.minimize(self.time)

    def placed(self, solver: cp_model.CpSolver) -> dict[tuple[str, int], tuple[int, int, int]]:
        """Each unit's rank and starts in the solver's schedule."""
        found: dict[tuple[str, int], tuple[int, int, int]] = {}
        for k, choice in self.x.items():
            rank = next(r for r, chosen in choice.items() if solver.boolean_value(chosen))
            start = solver.value(self.forward[k])
            found[k] = rank, start, solver.value(self.backward[k]) if k in self.backward else start
        return found

    def _place(self) -> None:
        jobs: dict[int, list[cp_model.IntervalVar]] = {}
        for k, u in self.units.items():
            self.cp.add_exactly_one(self.x[k].values())
            for rank, chosen in self.x[k].items():
                for start, duration in self._jobs(k, u):
                    interval = self.cp.new_optional_fixed_size_interval_var(
                        start, duration, chosen, f"i{k}{rank}"
                    )
                    for busy in self.replicas[k[0]][rank]:
                        jobs.setdefault(busy, []).append(interval)
        for intervals in jobs.values():
            self.cp.add_no_overlap(intervals)

    def _jobs(self, k: tuple[str, int], u: Unit) -> list[tuple[cp_model.IntVar, int]]:
        """(start, duration) of each job of a unit, in their order."""
        starts = (self.forward, self.backward, self.weight)
        return [
            (start[k], ns)
            for start, ns in zip(starts, (u.forward, u.backward, u.last), strict=True)
            if k in start
        ]

    def _order(self) -> None:
        for k, start in self.backward.items():
            self.cp.add(start >= self.forward[k] + self.units[k].forward)
        for arc in self.work.arcs:
            for p, wait in arc.wait.items():
                src, dst = (arc.src, p), (arc.dst, p)
                self.cp.add(self.forward[dst] >= self.forward[src] + self.units[src].forward + wait)
                if arc.gradient:
                    self.cp.add(self.backward[src] >= self.backward[dst] + self.units[dst].backward + wait)

        for k, start in self.weight.items():
            self.cp.add(start >= self.backward[k] + self.units[k].backward)

    def _end(self) -> None:
        for k, u in self.units.items():
            for start, duration in self._jobs(k, u):
                self.cp.add(self.time >= start + duration + self.work.closing[k[0]])

    def _stages(self) -> None:
        for first, *others in self.pipelines:
            for stage in others:
                for p in self.work.active[stage.name]:
                    for a, b in zip(self.work.ranks[first.name], self.work.ranks[stage.name], strict=True):
                        self.cp.add(self.x[first.name, p][a] == self.x[stage.name, p][b])

    def _room(self) -> None:
        for section in (s for s in self.work.sections if has_slots(self.work, s)):
            held = [(k, self._jobs(k, u)) for k, u in self.units.items() if k[0] == section.name]
            for rank in self.work.ranks[section.name]:
                intervals = [
                    self.cp.new_optional_interval_var(
                        jobs[0][0], self.cp.new_int_var(0, self.horizon, ""), end, self.x[k][rank], ""
                    )
                    for k, jobs in held
                    for end in (jobs[-1][0] + jobs[-1][1],)
                ]
                self.cp.add_cumulative(intervals, [1] * len(intervals), section.in_flight)

    def _symmetry(self) -> None:
        """Where no two sections share some ranks only, replicas of a section can be renamed, so its first
        unit may go to its first one.

        Stages of a pipeline are renamed together.
        """
        staged = {s.name for stages in self.pipelines for s in stages}
        sets = [frozenset(self.work.ranks[s.name]) for s in self.work.sections]
        alone = {frozenset(self.work.ranks[s.name]) for s in self.work.sections if s.name not in staged}
        if (
            self._mixed()
            or any(a & b for a in set(sets) for b in set(sets) if a != b)
            or len(set(sets)) < len(alone) + len(staged)
        ):
            return
        for ranks in alone:
            first = next((k for k in self.units if frozenset(self.work.ranks[k[0]]) == ranks), None)
            if first is not None:
                self.cp.add(self.x[first][min(ranks)] == 1)
        for stages in self.pipelines:
            for p in self.work.active[stages[0].name][:1]:
                self.cp.add(self.x[stages[0].name, p][self.work.ranks[stages[0].name][0]] == 1)

    def _mixed(self) -> bool:
        """Whether sections share ranks in replicas that are not the same."""
        groups = {frozenset(ranks) for found in self.replicas.values() for ranks in found.values()}
        return any(a & b for a in groups for b in groups if a != b)


def _serial(work: Work) -> int:
    """More than any schedule needs: all work and all waits one after the other."""
    jobs = sum(u.forward + u.backward + u.last for units in work.units.values() for u in units)
    return jobs + 2 * sum(sum(a.wait.values()) for a in work.arcs) + max(work.closing.values(), default=0)
